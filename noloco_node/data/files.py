"""A volunteer's own files as one token file, made at the first start and kept: text, jsonl, parquet and arrow.

Each document (documents.py) is cut into parts, of which one in 16 is held out by its text (parts.py). The tokenizer's
end token follows each document, and each part of one that what comes next is not on the same side.

A token file alone is used as it is; several, or one among other files, are copied into one. The kept file is found by
the names, sizes and times of its sources. Knows nothing of runs.
"""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noloco_node.base.units import count
from noloco_node.data import sources, token_cache, token_file
from noloco_node.data.documents import Documents, Reading
from noloco_node.data.parts import batches, is_held_out, parts
from noloco_node.data.sources import TOKENS, Sources
from noloco_node.data.token_file import FileTokens
from noloco_node.data.tokens import Tokenizer
from noloco_node.errors import UsageError

log = logging.getLogger(__name__)

BATCH_PARTS, BATCH_TEXT = 4096, 4 << 20
"""Tokenized at once, whichever is reached first: enough for the tokenizer's threads, with little memory."""
LOG_S = 10.0


@dataclass(frozen=True, slots=True)
class FilesProgress:
    share: float
    """Of the files' bytes, 0 to 1."""
    tokens: int
    left_s: float | None
    """None before there is anything to estimate from."""


Report = Callable[[FilesProgress], None]


def load(where: Sources, tokenizer: Tokenizer, field: str) -> tuple[FileTokens, FileTokens]:
    """The tokens to train on and those held out."""
    reading = Reading(field, where.encoding)
    paths = sources.find(where.files)
    if len(paths) == 1 and paths[0].name.endswith(TOKENS):
        return token_file.load(paths[0], tokenizer)
    kept = where.cache / f"{_key(paths, tokenizer, reading)}{TOKENS}"
    if kept.exists():
        token_cache.use(kept)
        try:
            return token_file.load(kept, tokenizer)
        except UsageError as error:
            log.warning("what is kept of these files cannot be used: %s", error)
    log.info("tokenizing %s into %s", count(len(paths), "file"), kept)
    tokenize(paths, kept, tokenizer, reading, _logger())
    return token_file.load(kept, tokenizer)


def tokenize(
    paths: Sequence[Path], out: Path, tokenizer: Tokenizer, reading: Reading, report: Report
) -> tuple[int, int]:
    """Make the token file `out`. Returns its numbers of tokens to train on and of held-out ones."""
    began, sizes = time.monotonic(), [path.stat().st_size for path in paths]
    total = max(1, sum(sizes))
    with token_file.Writer(out, tokenizer) as writer:
        for path, size, before in zip(paths, sizes, itertools.accumulate(sizes, initial=0), strict=False):
            for within in _add(path, writer, tokenizer, reading):
                share = (before + within * size) / total
                spent = time.monotonic() - began
                report(
                    FilesProgress(share, writer.train + writer.held_out, spent * (1 - share) / share if share else None)
                )
        if not writer.train + writer.held_out:
            raise UsageError(f"there is no text in {count(len(paths), 'file')}, {paths[0]} first: name others")
    return writer.train, writer.held_out


def _add(path: Path, writer: token_file.Writer, tokenizer: Tokenizer, reading: Reading) -> Iterator[float]:
    """Write one file's tokens; yields the share of it that is done after each batch."""
    if path.name.endswith(TOKENS):
        for stored, held_out in zip(token_file.load(path, tokenizer), (False, True), strict=True):
            for start in range(0, len(stored), token_file.PIECE):
                writer.add(stored[start : start + token_file.PIECE], held_out)
        yield 1.0
        return
    end = np.array([tokenizer.end], np.uint32)
    documents, empty = Documents(path, reading), True
    found = (part for document in documents for part in _parts(document))
    for batch in batches(found, lambda part: len(part.text), BATCH_PARTS, BATCH_TEXT):
        for part, tokens in zip(batch, tokenizer.encode([part.text for part in batch]), strict=True):
            writer.add(tokens, part.held_out)
            if part.ends:
                writer.add(end, part.held_out)
        empty = False
        yield documents.share
    if empty:
        log.warning("%s holds no text", path)


@dataclass(frozen=True, slots=True)
class Part:
    text: str
    held_out: bool
    ends: bool
    """Whether the text that goes on with it ends here, as what is next is on the other side, or another document."""


def _parts(document: Iterable[str]) -> Iterator[Part]:
    before: tuple[str, bool] | None = None
    for text in parts(document):
        held_out = is_held_out(text.encode())
        if before:
            yield Part(*before, ends=before[1] != held_out)
        before = text, held_out
    if before:
        yield Part(*before, ends=True)


def _key(paths: Sequence[Path], tokenizer: Tokenizer, reading: Reading) -> str:
    """A digest of everything that the token file depends on."""
    digest = hashlib.sha256(f"{token_file.VERSION}\n{reading.field}\n{reading.encoding}\n".encode() + tokenizer.digest)
    for path in paths:
        found = path.stat()
        digest.update(f"\n{path}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _logger() -> Report:
    """Logs the progress every LOG_S."""
    logged = time.monotonic()

    def report(progress: FilesProgress) -> None:
        nonlocal logged
        if time.monotonic() - logged >= LOG_S:
            logged = time.monotonic()
            left = "" if progress.left_s is None else f", about {progress.left_s / 60:.0f} min left"
            log.info("tokenizing: %.0f%%, %d tokens%s", 100 * progress.share, progress.tokens, left)

    return report
