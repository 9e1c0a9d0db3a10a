"""The lattice kernels for a CPU: fused numba loops that LLVM vectorises, on one thread, without the interpreter's lock.

One thread is a choice: it keeps up with memory (encoding at the speed of a copy, decoding at half), it leaves the other
cores to the training thread, any number of threads may call at once, and a fork finds no thread pool to break.

Each loop body that must vectorise runs over slices of known length, with 32-bit types spelled out where numba would
widen them; packing works on eight codes at a time inside 64-bit words (little-endian, as torch is everywhere today).
Compiled at the first call, a few seconds, and kept on disk where numba finds a folder that can be written.
"""

# ruff: noqa: PLR0913, PLR0917 - what one pass reads and writes

from collections.abc import Callable
from functools import cache
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
    _compiled(_encode)(u.numpy(), *_grid(grid), bits, codes.numpy(), sums.numpy())
    return codes, sums


def decode(mine: Tensor, theirs: Tensor, half_step: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    c = torch.empty(len(mine), BLOCK)
    sums, energy = torch.empty(2, len(mine), dtype=torch.int32)
    _compiled(_decode)(
        mine.numpy(), theirs.numpy(), half_step.numpy(), _SMALL_WEIGHTS, bits, c.numpy(), sums.numpy(), energy.numpy()
    )
    return c, sums, energy


def unpack(packed: Tensor, bits: int) -> Tensor:
    codes = torch.empty(len(packed), BLOCK, dtype=torch.int32)
    _compiled(_unpack_all)(packed.numpy(), bits, codes.numpy())
    return codes


def steps(u: Tensor, grid: "Grid", which: Tensor) -> Tensor:
    k = torch.empty(len(which), BLOCK, dtype=torch.int32)
    _compiled(_steps)(u.numpy(), *_grid(grid), which.numpy(), k.numpy())
    return k


def resolve(u: Tensor, grid: "Grid", which: Tensor, theirs: Tensor, width: int, c: Tensor) -> tuple[Tensor, Tensor]:
    sums = torch.empty(len(which), dtype=torch.int32)
    energy = torch.empty(len(which), dtype=torch.float64)
    half_step = grid.half_step.numpy()
    _compiled(_resolve)(
        u.numpy(),
        *_grid(grid),
        half_step,
        which.numpy(),
        theirs.numpy(),
        width,
        c.numpy(),
        sums.numpy(),
        energy.numpy(),
    )
    return sums, energy


def _grid(grid: "Grid") -> tuple[Any, ...]:
    return grid.inverse.numpy(), grid.seed, tables.DITHER, _WEIGHTS


@cache
def _compiled(kernel: Callable[..., None]) -> Callable[..., None]:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made: Callable[..., None] = numba.njit(cache=True, **options)(kernel)
    except RuntimeError:  # neither the package's folder nor the home's can be written: compile every time
        made = numba.njit(**options)(kernel)
    return made


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


def _unpack_all(packed: Any, bits: Any, codes: Any) -> None:
    code, words_in = np.empty(BLOCK, np.uint8), packed.view(np.uint64)
    words = code.view(np.uint64)
    for b in range(packed.shape[0]):
        _unpack(words_in, b, bits, words)
        codes[b] = code


def _steps(u: Any, inverse: Any, seed: Any, table: Any, w: Any, which: Any, k: Any) -> None:
    for i in range(which.shape[0]):
        b = which[i]
        begin = (seed + STRIDE * b) % PHASES
        for j in range(BLOCK):
            k[i, j] = _step(u[b, j], inverse[b], table[begin + j])


def _resolve(
    u: Any,
    inverse: Any,
    seed: Any,
    table: Any,
    w: Any,
    half_step: Any,
    which: Any,
    theirs: Any,
    width: Any,
    c: Any,
    sums: Any,
    energy: Any,
) -> None:
    low, high, span, none = np.int32(-(1 << (width - 1))), np.int32(1 << (width - 1)), np.int32(1 << width), np.int32(0)
    mask = np.int32((1 << width) - 1)
    for i in range(which.shape[0]):
        b, total, squares = which[i], np.uint32(0), 0.0
        begin = (seed + STRIDE * b) % PHASES
        for j in range(BLOCK):
            k = _step(u[b, j], inverse[b], table[begin + j])
            r = np.int32(theirs[i, j] - np.int32(k & mask))
            r = np.int32(r + (span if r < low else none))
            d = np.int32(r - (span if r > high else none))
            total = np.uint32(total + np.uint32(np.uint32(np.int32(k + d)) * w[j]))
            squares += float(d) * float(d)
            c[b, j] = np.float32(d) * half_step[b]
        sums[i], energy[i] = total, squares


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
