"""How far apart two partners may be, block by block, for the low bits to suffice: ranges wished, agreed, remembered.

A range is an fp32 number with two bits after the leading one, (4, 5, 6 or 7)/4 · 2^e, kept as the upper 11 bits of that
number: its *code* counts quarter octaves, and one more is the next larger range.

- *Wished for*: 2.2 · max|βΔ| of the block (at least a share of the vector's: `hints` in codec.py), halfway (in octaves)
  towards what earlier exchanges saw there, relative to the rest of the fragment. Never so small that k would not fit
  (LIMIT in core/kernels/tables.py).
- *Agreed*: how far apart a pair is depends on when its two sides last swapped and with whom, and changes fivefold from
  one partner to the next, by the same factor in all blocks. So each side also sends a few elements of u in full: the
  0.9 quantile of |u_j − u_i| over the larger of both ranges is the shift of all ranges. It is computed in whole numbers
  and single roundings, so that both sides get the same. Whatever a partner claims, no range exceeds 64 times our own
  wish.
- *Remembered*: the differences in the last exchange, in each block relative to the fragment's median, one byte a block,
  and how far the estimate was off; and a margin over the 0.9 quantile, which moves until 1.4% of the blocks miss.

*(Eight replicas of a small Llama, 4 bits: 1.0% of blocks missed; without the elements in full 6.5%, with ranges fixed
at 2.2 · max|βΔ| 22%.)*

numpy alone: it handles one number a block.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noloco_node.core.codecs.codec import Payload
from noloco_node.core.kernels.tables import BLOCK
from noloco_node.errors import PeerMisbehaved

Codes = NDArray[np.int32]
Floats = NDArray[np.float32]
Places = NDArray[np.int64]

LOWEST, HIGHEST = (127 - 90) * 4, (127 + 100) * 4
"""Codes of 2^-90 and 2^100: steps, their inverses and every difference of two k stay normal fp32 numbers."""
LARGEST = np.int32((127 + 110) << 23)
"""2^110 as the bits of an fp32 number: a weight beyond it fits no range, and no model either."""
WINDOW = 255
"""Quarter octaves below the largest range of a fragment that its one byte a block reaches."""
GUESS = np.float32(2.2)
"""Times max|βΔ|: two replicas that went apart for one round differ by √2 of it, and a larger one somewhere."""
UNMOVED = 16
"""Where βΔ is not known, a block is assumed to have moved by 1/16 of its largest weight."""
STILL = 8
"""No estimate is below a quarter of the fragment's median: rows that only one replica has trained do move."""
DOWN = 8
"""An agreement shifts ranges at most two octaves down: wishes leave so much room above what the largest k allows."""
CAP = 24
"""... and to at most six octaves above either side's wish: replicas that trained apart for twenty rounds to the end of
a schedule, when βΔ is small, were four above it."""
QUANTILE = 0.9
SAMPLES = 1024
"""Elements sent in full: the quantile is good to 4%, for 0.004 bytes a parameter of a fragment of 1 Mi."""
EACH = 64
"""... and at most one element in so many."""
TARGET = 0.014
"""Share of blocks that should miss: wider ranges raise the error of every block, narrower ones cost bytes in more."""
GAIN = 32.0
"""Sixteenths of an octave by which the margin rises when all blocks miss."""
MARGIN, NARROWEST, WIDEST = 19, 8, 60
"""Sixteenths of an octave from the 0.9 quantile of |u_j − u_i| to the range less a step: 19 is 3.7 standard deviations.
Each fragment begins there and finds its own."""
LEVELS = (-32, 8)
"""Quarter octaves that the memory moves all estimates of a fragment: down to where an estimate is far too large, up to
what the next agreement can still take back."""
REACH = 64
"""The memory follows a block up to four octaves (in sixteenths) away from the fragment's median."""

_HEADER = struct.Struct("<HBx")


@dataclass(frozen=True, slots=True)
class RangeWish:
    """What each side sends first about a fragment."""

    codes: Codes
    margin: int
    sample: Floats
    """Elements of u in full."""
    where: Places
    """Which elements: not sent, both draw the same."""

    def pack(self) -> bytes:
        base = int(self.codes.min(initial=HIGHEST))
        header = _HEADER.pack(base, self.margin)
        return header + (self.codes - base).astype(np.uint8).tobytes() + self.sample.astype("<f4").tobytes()

    @classmethod
    def parse(cls, payload: Payload, like: "RangeWish") -> "RangeWish":
        """A partner's. Raises PeerMisbehaved. `like`: our own, which has the same sizes."""
        blocks, samples = len(like.codes), len(like.sample)
        wanted = _HEADER.size + blocks + 4 * samples
        if len(payload) != wanted:
            raise PeerMisbehaved("bad_length", f"{len(payload)} bytes of ranges instead of {wanted}")
        base, margin = _HEADER.unpack_from(payload)
        codes = np.frombuffer(payload, np.uint8, blocks, _HEADER.size).astype(np.int32) + np.int32(base)
        sample = np.frombuffer(payload, "<f4", samples, _HEADER.size + blocks).astype(np.float32)
        if not NARROWEST <= margin <= WIDEST or (blocks and not LOWEST <= codes.min() <= codes.max() <= HIGHEST):
            raise PeerMisbehaved("bad_range")
        if not np.isfinite(sample).all():
            raise PeerMisbehaved("nonfinite")
        return cls(codes, margin, sample, like.where)


class RangeMemory:
    """What was learned from exchanges about one fragment: a byte a block and two numbers."""

    def __init__(self, blocks: int, bits: int) -> None:
        self.blocks = blocks
        self._bits = bits
        half = 1 << bits - 1
        self._margin = MARGIN + 16 * math.log2(half / (half - 1))  # the outermost code may be either partner's
        self._level = 0.0
        """Quarter octaves from the estimate to the ranges agreed lately."""
        self._profile: NDArray[np.int8] | None = None
        """Sixteenths of an octave that the differences of a block lie above the fragment's median."""

    def wish(self, peaks: Codes, moved: Floats | None, sample: Floats, where: Places) -> RangeWish:
        """`peaks`: bits of the largest |u| of each block. `moved`: max|βΔ| of each block, if known."""
        codes = (peaks >> 21) - UNMOVED if moved is None else code_of(moved * GUESS)
        codes += round(self._level)
        median = _median(codes)
        codes = np.maximum(codes, median - STILL)
        if self._profile is not None:
            codes = (4 * (codes + median) + self._profile + 7) >> 3  # half and half, in sixteenths, rounded up
        codes = np.maximum(codes, smallest(peaks, self._bits))
        top = min(int(codes.max(initial=LOWEST)), HIGHEST)
        codes = np.minimum(np.maximum(codes, max(top - WINDOW, LOWEST)), top)
        return RangeWish(codes, math.ceil(self._margin), sample, where)

    def learn(self, wished: RangeWish, agreed: Codes, energy: NDArray[np.float64], missed: int) -> None:
        """After an exchange: Σ d² of each block in steps, and how many blocks missed."""
        if not self.blocks:
            return
        off = np.clip(agreed - wished.codes, -DOWN, CAP)  # below that, only a partner's tiny wish lowers a range
        level = self._level + float(off.mean()) / 4  # slowly: partners differ
        self._level = min(max(level, LEVELS[0]), LEVELS[1])
        # Steps are a fixed share of ranges, and the root of a sum of squares has half as many octaves as the sum.
        seen = 4 * agreed + (_sixteenths(np.maximum(energy, 4.0).astype(np.float32)) >> 1)
        seen = (seen - _median(seen)).clip(-REACH, REACH)
        self._profile = (seen if self._profile is None else (self._profile + seen) >> 1).astype(np.int8)
        surplus = (missed - TARGET * self.blocks) / max(self.blocks, SAMPLES)
        self._margin = min(max(self._margin + max(GAIN * surplus, -1.5), NARROWEST), WIDEST)


def code_of(x: Floats) -> Codes:
    """The smallest range that is not below x ≥ 0."""
    codes: Codes = (x.view(np.int32) + np.int32((1 << 21) - 1)) >> 21
    return codes


def value_of(codes: Codes) -> Floats:
    values: Floats = (codes << 21).view(np.float32)
    return values


def smallest(peaks: Codes, bits: int) -> Codes:
    """Codes of ranges whose steps are at least 32 units in the last place of a block's largest element; 8 after a shift
    down, which keeps |k| below 2^21."""
    codes: Codes = (peaks >> 21) + 4 * (bits - 19)
    return codes


def places(size: int, seed: int) -> Places:
    """Which elements of a fragment are sent in full. An odd stride walks through all columns of a matrix."""
    count = min(SAMPLES, -(-size // EACH))
    stride = size // max(count, 1) | 1
    return (seed + stride * np.arange(count, dtype=np.int64)) % max(size, 1)


def agree(mine: RangeWish, theirs: RangeWish) -> Codes:
    """The same on both sides, whichever is called mine."""
    larger, smaller = np.maximum(mine.codes, theirs.codes), np.minimum(mine.codes, theirs.codes)
    agreed: Codes = np.minimum(larger + _shift(mine, theirs, larger), smaller + CAP)
    return np.minimum(np.maximum(agreed, LOWEST), HIGHEST)


def _shift(mine: RangeWish, theirs: RangeWish, larger: Codes) -> int:
    """Quarter octaves from the larger of both wishes to the range that the elements in full need."""
    samples = len(mine.sample)
    if not samples:
        return 0
    apart = np.abs(np.subtract(theirs.sample, mine.sample, dtype=np.float64)) / value_of(larger[mine.where // BLOCK])
    rank = int(QUANTILE * samples)
    apart.partition(rank)
    quantile = np.minimum(apart[rank : rank + 1], 2.0**60).astype(np.float32)
    sixteenths = int(_sixteenths(quantile)[0]) + max(mine.margin, theirs.margin)
    return max(-(-sixteenths // 4), -DOWN)


def _sixteenths(x: Floats) -> Codes:
    """log2 x in sixteenths, rounded down; between powers of two it is linear, at most 1.4 of them too small."""
    logs: Codes = (x.view(np.int32) >> 19) - (127 << 4)
    return logs


def _median(codes: Codes) -> int:
    middle = len(codes) // 2
    return int(np.partition(codes, middle)[middle]) if len(codes) else 0
