"""A text in parts of about 2 kB, of which one in 16 is held out. Both are decided by the text alone.

A part ends after a line when the checksum of this line and the one before it is small enough; a line of twice the
length is twice as likely to end one, and what has no ends of line is cut after each LINE characters. So the same text
has the same parts under any file name, in any kind of file and beside any other files; with something before it, the
same but for the first two. Each part is on the same side for every volunteer. The same words with other ends of line,
or in another spelling, are another text; one that repeats a few lines for ever is cut where it happens to be.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

PART_BYTES = 2 << 10
"""In the mean. With 200 kB of text only 2 in 1000 sets have no part to hold out."""
LINE = 4 << 10
"""Characters of the longest line; after so many a part always ends."""
HELD_OUT = 16
"""One part in this number is held out: no replica trains on it."""

_LONGEST = 32 * PART_BYTES  # only a text that repeats itself gets there
_LIMIT = (1 << 32) // PART_BYTES


def lines_of(text: TextIO) -> Iterator[str]:
    """`text` must not translate ends of line."""
    return iter(lambda: text.readline(LINE), "")


def parts(lines: Iterable[str]) -> Iterator[str]:
    """Put together, they are the lines."""
    part: list[str] = []
    before = length = 0
    for line in lines:
        part.append(line)
        raw = line.encode()
        length += len(raw)
        ends = zlib.crc32(raw, before) < _LIMIT * len(raw) or length >= _LONGEST
        before = zlib.crc32(raw)
        if ends:
            yield "".join(part)
            part, length = [], 0
    if part:
        yield "".join(part)


def batches(found: Iterable[T], length: Callable[[T], int], most: int, longest: int) -> Iterator[list[T]]:
    """Lists of so many, or of so much length, whichever is reached first."""
    batch: list[T] = []
    total = 0
    for each in found:
        batch.append(each)
        total += length(each)
        if total >= longest or len(batch) >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def is_held_out(content: bytes) -> bool:
    """By a hash of it: the same for every replica."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT == 0
