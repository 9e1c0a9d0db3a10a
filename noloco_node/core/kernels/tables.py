"""Constants that both partners must share for ever: another table is another protocol version. numpy only."""

import numpy as np
from numpy.typing import NDArray

BLOCK = 256
"""Elements with one range and one checksum."""
PHASES = 4096
"""Entries of the dither's table: 16 KiB stay in a core's first cache."""
STRIDE = 2531
"""PHASES over the golden ratio, made odd: neighbouring blocks begin far apart in the table."""
WIDTHS = (8, 4, 2, 1)
"""Of the planes in which codes are packed: `bits` is 8 or a sum of the others."""
ROUNDER = float(3 << 22)
"""Added to and subtracted from an fp32 number below 2^22, it rounds to the nearest whole number, ties to even."""
LIMIT = float((1 << 22) - 1)
"""|k| never exceeds it: fp32 still holds k + dither, and no rounding is left to the hardware's taste."""


def _scatter(count: int) -> NDArray[np.int64]:
    """0 … count−1 in an order without pattern. Each step is one-to-one on numbers below `count`, a power of two."""
    x = np.arange(count, dtype=np.int64)
    half = count.bit_length() // 2
    for odd in (0x2C1B3, 0x1A85D, 0x3AD45):
        x = (x * odd + 0x1B56C) & (count - 1)
        x ^= x >> half
    return x


def _dither() -> NDArray[np.float32]:
    """Every multiple of 1/4096 once, centred on zero; the head again at the end, so that no block wraps around."""
    levels = (_scatter(PHASES) + 0.5) / PHASES - 0.5
    return np.concatenate([levels, levels[:BLOCK]]).astype(np.float32)


def _weights() -> NDArray[np.int32]:
    """Different, odd, below 2^15: one, two or three elements that are off by one range each cannot cancel."""
    return (2 * _scatter(1 << 14)[:BLOCK] + 1).astype(np.int32)


def _spots(weights: NDArray[np.int32]) -> NDArray[np.int16]:
    """By how much a checksum is off, modulo 2^16 -> 1 + the place of the one element that is a range higher, or minus
    that where it is a range lower; 0 where no single element explains it."""
    spots = np.zeros(1 << 16, np.int16)
    spots[weights] = np.arange(1, BLOCK + 1)
    spots[-weights] = -np.arange(1, BLOCK + 1)
    return spots


DITHER = _dither()
WEIGHTS = _weights()
SPOTS = _spots(WEIGHTS)
