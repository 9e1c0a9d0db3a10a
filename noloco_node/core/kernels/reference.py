"""The lattice kernels as plain torch operations: what is meant, on any device, and slow."""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noloco_node.core.kernels.tables import BLOCK, DITHER, LIMIT, PHASES, ROUNDER, STRIDE, WEIGHTS, WIDTHS

if TYPE_CHECKING:
    from noloco_node.core.kernels import Grid

NAME = "torch"


@cache
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The dither's table and the weights. Copied once: a copy to a GPU waits for all that it does."""
    return torch.from_numpy(DITHER).to(device), torch.from_numpy(WEIGHTS).to(device)


def peaks(u: Tensor) -> Tensor:
    return (u.view(torch.int32) & 0x7FFFFFFF).amax(1)


def encode(u: Tensor, grid: "Grid", bits: int) -> tuple[Tensor, Tensor]:
    k = steps(u, grid, torch.arange(len(u), device=u.device))
    return pack(k & (1 << bits) - 1, bits), sums(k)


def decode(mine: Tensor, theirs: Tensor, half_step: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    d = difference(unpack(theirs, bits) - unpack(mine, bits), bits)
    return d.float() * half_step[:, None], sums(d), (d * d).sum(1, dtype=torch.int32)


# ---- for the few blocks that are sent again, `which` (int64) ----
def steps(u: Tensor, grid: "Grid", which: Tensor) -> Tensor:
    """k itself, int32 (which, 256)."""
    begin = (grid.seed + STRIDE * which) % PHASES
    place = begin[:, None] + torch.arange(BLOCK, device=u.device)
    dither = constants(u.device)[0][place]
    t = (u[which] * grid.inverse[which, None] + dither).clamp(-LIMIT, LIMIT)
    return ((t + ROUNDER) - ROUNDER).to(torch.int32)


def resolve(  # noqa: PLR0913, PLR0917
    u: Tensor, grid: "Grid", which: Tensor, theirs: Tensor, width: int, c: Tensor
) -> tuple[Tensor, Tensor]:
    """From the lowest `width` ≤ 24 bits of the partner's k, int32 (which, 256), writes these blocks of c; (sums of the
    partner's k, energies as float64)."""
    k = steps(u, grid, which)
    d = difference(theirs - (k & (1 << width) - 1), width)
    c[which] = d.float() * grid.half_step[which, None]
    return sums(k + d), d.double().square().sum(1)


def difference(r: Tensor, width: int) -> Tensor:
    half = 1 << width - 1
    return r + ((r < -half).int() - (r > half).int() << width)


def sums(k: Tensor) -> Tensor:
    """Σ k · w mod 2^32 of each block."""
    return (k.long() * constants(k.device)[1]).sum(1).to(torch.int32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes int32 (blocks, 256) -> uint8 (blocks, 32 · bits)."""
    planes, low = [], 0
    for width in planes_of(bits):
        groups = (codes >> low & (1 << width) - 1).view(-1, 8 // width, 32 * width)
        planes.append(sum(groups[:, g] << g * width for g in range(8 // width)))
        low += width
    return torch.cat(planes, 1).to(torch.uint8)  # type: ignore[arg-type]  # sum() of tensors is a tensor


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes uint8 (blocks, 32 · bits) -> int32 (blocks, 256)."""
    codes = torch.zeros(len(packed), BLOCK, dtype=torch.int32, device=packed.device)
    low = 0
    for width in planes_of(bits):
        plane = packed[:, 32 * low : 32 * (low + width)].to(torch.int32)
        groups = [plane >> g * width & (1 << width) - 1 for g in range(8 // width)]
        codes |= torch.cat(groups, 1) << low
        low += width
    return codes


def planes_of(bits: int) -> list[int]:
    return [width for width in WIDTHS if bits & width]
