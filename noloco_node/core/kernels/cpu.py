"""The lattice kernels for a CPU: fused numba loops that LLVM vectorises, on one thread, without the interpreter's lock.

One thread is a choice: it keeps up with memory (encoding at the speed of a copy, decoding at half), it leaves the other
cores to the training thread, any number of threads may call at once, and a fork finds no thread pool to break.

Each loop body that must vectorise runs over slices of known length, with 32-bit types spelled out where numba would
widen them; packing works on eight codes at a time inside 64-bit words (little-endian, as torch is everywhere today).
Compiled at the first call, two or three seconds, and kept on disk where numba finds a folder that can be written.
"""

# ruff: noqa: PLR0913, PLR0917 - what one pass reads and writes

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from noloco_node.core.kernels import tables
from noloco_node.core.kernels.tables import BLOCK, PHASES, STRIDE

if TYPE_CHECKING:
    from noloco_node.core.kernels import Grid

log = logging.getLogger(__name__)

NAME = "numba"

_F = TypeVar("_F", bound=Callable[..., Any])
_inlined: Callable[[_F], _F] = register_jitable(inline="always")
_called: Callable[[_F], _F] = register_jitable

_ROUNDER = np.float32(tables.ROUNDER)
_LIMIT = np.float32(tables.LIMIT)
_BYTES = np.uint64(0x0101010101010101)
_ABSOLUTE = np.int32(0x7FFFFFFF)
_WEIGHTS = tables.WEIGHTS.astype(np.uint32)
_SMALL_WEIGHTS = tables.WEIGHTS.astype(np.int16)


def hold_memory() -> None:
    """Once a process has freed a piece of nearly 32 MiB, glibc no longer gives smaller ones back to the system at once.

    Else every fragment's correction comes in fresh pages, whose faults take longer than all the arithmetic. Nothing is
    written to this piece, so it costs nothing; other allocators do not mind.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def peaks(u: Tensor) -> Tensor:
    out = torch.empty(len(u), dtype=torch.int32)
    _compiled(_peaks)(u.view(torch.int32).numpy(), out.numpy())
    return out


def encode(u: Tensor, grid: "Grid", bits: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(len(u), 32 * bits, dtype=torch.uint8)
    sums = torch.empty(len(u), dtype=torch.int32)
    table = grid.inverse.numpy(), grid.seed, tables.DITHER, _WEIGHTS
    _compiled(_encode)(u.numpy(), *table, bits, codes.numpy(), sums.numpy())
    return codes, sums


def decode(mine: Tensor, theirs: Tensor, half_step: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    c = torch.empty(len(mine), BLOCK)
    sums, energy = torch.empty(2, len(mine), dtype=torch.int32)
    _compiled(_decode)(
        mine.numpy(), theirs.numpy(), half_step.numpy(), _SMALL_WEIGHTS, bits, c.numpy(), sums.numpy(), energy.numpy()
    )
    return c, sums, energy


_ready: dict[Callable[..., None], Callable[..., None]] = {}


def _compiled(kernel: Callable[..., None]) -> Callable[..., None]:
    return _ready.get(kernel) or partial(_first_call, kernel)


def _first_call(kernel: Callable[..., None], *args: Any) -> None:
    """Reads or writes what is kept on disk. Where that fails, in whatever way numba finds a damaged file (a power cut
    may leave empty ones) or a full disk, the kernel is compiled without it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    made = alone = numba.njit(**options)(kernel)
    try:
        made = numba.njit(cache=True, **options)(kernel)
        made(*args)
    except Exception as error:  # noqa: BLE001 (what is wrong with the kernel itself is raised below)
        log.info("a kernel is compiled afresh, as the one kept on disk cannot be used, or none be kept: %r", error)
        with suppress(Exception):  # none is kept, or it cannot be written
            made._cache.flush()  # then a damaged one is begun anew at the next start
        made = alone
        made(*args)
    _ready[kernel] = made


def _peaks(u: Any, out: Any) -> None:
    for b in range(u.shape[0]):
        x, peak = u[b], np.int32(0)
        for j in range(BLOCK):
            peak = max(peak, np.int32(x[j] & _ABSOLUTE))
        out[b] = peak


def _encode(u: Any, inverse: Any, seed: Any, table: Any, w: Any, bits: Any, codes: Any, sums: Any) -> None:
    code = np.empty(BLOCK, np.uint8)
    words, packed = code.view(np.uint64), codes.view(np.uint64)
    for b in range(u.shape[0]):
        begin = (seed + STRIDE * b) % PHASES
        x, dither = u[b], table[begin : begin + BLOCK]
        s, total = inverse[b], np.uint32(0)
        for j in range(BLOCK):
            k = _step(x[j], s, dither[j])
            total = np.uint32(total + np.uint32(np.uint32(k) * w[j]))
            code[j] = np.uint8(k)
        sums[b] = total
        _pack(words, bits, packed, b)


def _decode(mine: Any, theirs: Any, half_step: Any, w: Any, bits: Any, c: Any, sums: Any, energy: Any) -> None:
    code_i, code_j = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
    words_i, words_j = code_i.view(np.uint64), code_j.view(np.uint64)
    packed_i, packed_j = mine.view(np.uint64), theirs.view(np.uint64)
    low, high, span, none = np.int16(-(1 << (bits - 1))), np.int16(1 << (bits - 1)), np.int16(1 << bits), np.int16(0)
    for b in range(mine.shape[0]):
        _unpack(packed_i, b, bits, words_i)
        _unpack(packed_j, b, bits, words_j)
        out, h, total, squares = c[b], half_step[b], np.int32(0), np.int32(0)
        for j in range(BLOCK):
            r = np.int16(np.int16(code_j[j]) - np.int16(code_i[j]))
            d = np.int16(r + (span if r < low else none))
            d = np.int16(d - (span if r > high else none))
            total = np.int32(total + np.int32(np.int32(d) * np.int32(w[j])))
            squares = np.int32(squares + np.int32(np.int32(d) * np.int32(d)))
            out[j] = np.float32(d) * h
        sums[b], energy[b] = total, squares


@_inlined
def _step(x: Any, s: Any, dither: Any) -> Any:
    t = min(max(x * s + dither, -_LIMIT), _LIMIT)
    return np.int32((t + _ROUNDER) - _ROUNDER)


# Planes are written out one by one: LLVM unrolls loops whose width it knows.
@_inlined
def _pack(code: Any, bits: Any, packed: Any, b: Any) -> None:
    if bits == 8:
        _put(code, packed, b, 8, 0)
    if bits & 4:
        _put(code, packed, b, 4, 0)
    if bits & 2:
        _put(code, packed, b, 2, bits & 4)
    if bits & 1:
        _put(code, packed, b, 1, bits & 6)


@_inlined
def _put(code: Any, packed: Any, b: Any, width: Any, low: Any) -> None:
    """One plane, of the bits from `low` on."""
    mask, words, start, down = np.uint64((1 << width) - 1) * _BYTES, 4 * width, 4 * low, np.uint64(low)
    for j in range(words):
        v = np.uint64(0)
        for g in range(8 // width):
            v |= ((code[j + g * words] >> down) & mask) << np.uint64(g * width)
        packed[b, start + j] = v


@_called
def _unpack(packed: Any, b: Any, bits: Any, code: Any) -> None:
    code[:] = 0
    if bits == 8:
        _get(packed, b, code, 8, 0)
    if bits & 4:
        _get(packed, b, code, 4, 0)
    if bits & 2:
        _get(packed, b, code, 2, bits & 4)
    if bits & 1:
        _get(packed, b, code, 1, bits & 6)


@_called
def _get(packed: Any, b: Any, code: Any, width: Any, low: Any) -> None:
    """One plane, of the bits from `low` on."""
    mask, words, start, up = np.uint64((1 << width) - 1) * _BYTES, 4 * width, 4 * low, np.uint64(low)
    for g in range(8 // width):
        down = np.uint64(g * width)
        for j in range(words):
            code[g * words + j] |= ((packed[b, start + j] >> down) & mask) << up
