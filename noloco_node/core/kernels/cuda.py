"""The lattice kernels for CUDA, in Triton: one program works on a few blocks, and each reads its vector once.

Bits count more than speed here, so multiplications and additions are not contracted (`enable_fp_fusion=False`), and
rounding is the same adding and subtracting of a large number as everywhere else. Triton compiles a kernel at its first
call for a number of bits, and needs a C compiler then; `try_out` finds out whether it can, before anything depends on
it. It would compile again for other sizes (divisible by 16 or not) if it were not told to leave them alone.
"""

# Inside a kernel Triton reads annotations as its own: there are none but tl.constexpr.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from noloco_node.core.kernels import tables
from noloco_node.core.kernels.reference import constants
from noloco_node.core.kernels.tables import BLOCK

if TYPE_CHECKING:
    from noloco_node.core.kernels import Grid

NAME = "triton"

ROWS = 8
"""Blocks a program: 2048 elements, sixteen a thread."""
_ROUNDER = tl.constexpr(tables.ROUNDER)
_LIMIT = tl.constexpr(tables.LIMIT)
_BLOCK = tl.constexpr(BLOCK)
_PHASES, _STRIDE = tl.constexpr(tables.PHASES), tl.constexpr(tables.STRIDE)
_EXACT = {"enable_fp_fusion": False, "num_warps": 4}


def try_out() -> None:
    """Raises whatever Triton raises where kernels cannot be built."""
    from noloco_node.core.kernels import Grid

    ones = torch.ones(1, device="cuda")
    grid = Grid(ones, ones / 2, 0)
    u = torch.zeros(1, BLOCK, device="cuda")
    peaks(u)
    codes, _ = encode(u, grid, 4)
    decode(codes, codes, grid.half_step, 4)


def peaks(u: Tensor) -> Tensor:
    blocks = len(u)
    out = torch.empty(blocks, dtype=torch.int32, device=u.device)
    if blocks:
        _peaks[_programs(blocks)](u.view(torch.int32), out, blocks, ROWS=ROWS, **_EXACT)
    return out


def encode(u: Tensor, grid: "Grid", bits: int) -> tuple[Tensor, Tensor]:
    blocks = len(u)
    codes = torch.empty(blocks, 32 * bits, dtype=torch.uint8, device=u.device)
    sums = torch.empty(blocks, dtype=torch.int32, device=u.device)
    if blocks:
        dither, weights = constants(u.device)
        _encode[_programs(blocks)](
            u, grid.inverse, grid.seed, dither, weights, codes, sums, blocks, BITS=bits, ROWS=ROWS, **_EXACT
        )
    return codes, sums


def decode(mine: Tensor, theirs: Tensor, half_step: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = len(mine)
    c = torch.empty(blocks, BLOCK, device=mine.device)
    sums, energy = (torch.empty(blocks, dtype=torch.int32, device=mine.device) for _ in range(2))
    if blocks:
        _, weights = constants(mine.device)
        _decode[_programs(blocks)](
            mine, theirs, half_step, weights, c, sums, energy, blocks, BITS=bits, ROWS=ROWS, **_EXACT
        )
    return c, sums, energy


def _programs(blocks: int) -> tuple[int]:
    return (triton.cdiv(blocks, ROWS),)


_for_all_sizes = triton.jit(do_not_specialize=["blocks", "seed"])


@_for_all_sizes
def _peaks(u, out, blocks, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (rows,)
    inside = row < blocks
    at = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(u + at, mask=inside[:, None], other=0) & 0x7FFFFFFF
    tl.store(out + row, tl.max(x, axis=1), mask=inside)


@triton.jit
def _steps(u, inverse, seed, dither, row, inside):
    """k, int32 (rows, 256)."""
    column = tl.arange(0, _BLOCK)[None, :]
    x = tl.load(u + row[:, None] * _BLOCK + column, mask=inside[:, None], other=0.0)
    s = tl.load(inverse + row, mask=inside, other=0.0)
    begin = (seed + _STRIDE * row) % _PHASES
    t = x * s[:, None] + tl.load(dither + begin[:, None] + column)
    t = tl.minimum(tl.maximum(t, -_LIMIT), _LIMIT)
    return ((t + _ROUNDER) - _ROUNDER).to(tl.int32)


@triton.jit
def _put(codes, k, row, inside, BITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """One plane of packed codes; the wider ones, which hold lower bits, come before it."""
    part = (k >> (BITS - BITS % (2 * WIDTH))) & ((1 << WIDTH) - 1)
    groups = tl.reshape(part, (ROWS, 8 // WIDTH, 32 * WIDTH))
    shift = (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None]
    plane = tl.sum(groups << shift, axis=1)  # the groups' bits do not overlap
    at = row[:, None] * (32 * BITS) + 32 * (BITS - BITS % (2 * WIDTH)) + tl.arange(0, 32 * WIDTH)[None, :]
    tl.store(codes + at, plane.to(tl.uint8), mask=inside[:, None])


@triton.jit
def _get(codes, row, inside, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """What one plane gives to each element's code, int32 (rows, 256)."""
    column = tl.arange(0, _BLOCK)[None, :]
    at = row[:, None] * (32 * BITS) + 32 * (BITS - BITS % (2 * WIDTH)) + column % (32 * WIDTH)
    plane = tl.load(codes + at, mask=inside[:, None], other=0).to(tl.int32)
    part = (plane >> (column // (32 * WIDTH) * WIDTH)) & ((1 << WIDTH) - 1)
    return part << (BITS - BITS % (2 * WIDTH))


@_for_all_sizes
def _encode(u, inverse, seed, dither, weights, codes, sums, blocks, BITS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < blocks
    k = _steps(u, inverse, seed, dither, row, inside)
    w = tl.load(weights + tl.arange(0, _BLOCK))[None, :]
    tl.store(sums + row, tl.sum(k * w, axis=1), mask=inside)
    if BITS == 8:
        _put(codes, k, row, inside, BITS, 8, ROWS)
    if BITS & 4:
        _put(codes, k, row, inside, BITS, 4, ROWS)
    if BITS & 2:
        _put(codes, k, row, inside, BITS, 2, ROWS)
    if BITS & 1:
        _put(codes, k, row, inside, BITS, 1, ROWS)


@_for_all_sizes
def _decode(mine, theirs, half_step, weights, c, sums, energy, blocks, BITS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < blocks
    r = tl.zeros((ROWS, _BLOCK), dtype=tl.int32)
    if BITS == 8:
        r += _get(theirs, row, inside, BITS, 8) - _get(mine, row, inside, BITS, 8)
    if BITS & 4:
        r += _get(theirs, row, inside, BITS, 4) - _get(mine, row, inside, BITS, 4)
    if BITS & 2:
        r += _get(theirs, row, inside, BITS, 2) - _get(mine, row, inside, BITS, 2)
    if BITS & 1:
        r += _get(theirs, row, inside, BITS, 1) - _get(mine, row, inside, BITS, 1)
    d = tl.where(r < -(1 << (BITS - 1)), r + (1 << BITS), tl.where(r > (1 << (BITS - 1)), r - (1 << BITS), r))
    w = tl.load(weights + tl.arange(0, _BLOCK))[None, :]
    tl.store(sums + row, tl.sum(d * w, axis=1), mask=inside)
    tl.store(energy + row, tl.sum(d * d, axis=1), mask=inside)
    h = tl.load(half_step + row, mask=inside, other=0.0)
    column = tl.arange(0, _BLOCK)[None, :]
    tl.store(c + row[:, None] * _BLOCK + column, d.to(tl.float32) * h[:, None], mask=inside[:, None])
