"""Lattice kernels: what runs over every element of a fragment, written three times, bit for bit alike.

`reference` is plain torch, runs anywhere and says what is meant; `cpu` is numba, `cuda` is Triton, both fused, and
tests hold them to the reference. What is done with the few blocks that are sent again is in the reference alone: when
numba compiled that too, a first start took 11 s for it instead of 3. A vector is cut into blocks of 256, its length
a multiple of that. For an element u of a block with step s, in fp32, each operation rounded once (no fused
multiply-add: it would change bits):

    t = u · (1/s) + dither, clamped to ±(2^22 − 1)         k = t rounded to the nearest whole number, ties to even
    sum of a block = Σ k · w mod 2^32                       code = k mod 2^bits

and against a partner's codes, with r = code_j − code_i and half = 2^(bits−1), without reading u again:

    d = r, plus 2^bits where r < −half, minus 2^bits where r > half       c = d · (s/2)       k_j = k_i + d

At exactly ±half, where the nearest partner is not unique, r keeps its sign: so d_j = −d_i always, and with it
c_j = −c_i to the bit and one verdict of the checksum on both sides.

Packing: a block's codes of `bits` = 8, or a sum of 4, 2 and 1, lie as planes of these widths, the widest (the lowest
bits) first. In a plane of width v, byte i holds the elements i, i + 32 v, i + 64 v, …, the first in its lowest bits:
32 · bits bytes a block, and every loop runs over neighbours in memory.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.core import gpu
from noloco_node.core.kernels import reference
from noloco_node.core.kernels.tables import BLOCK, PHASES

__all__ = ["BLOCK", "PHASES", "Grid", "Kernels", "for_device"]


@dataclass(frozen=True, slots=True)
class Grid:
    """What two partners round to; tensors with one entry a block, on the vector's device."""

    inverse: Tensor
    """1/s, fp32."""
    half_step: Tensor
    """s/2, fp32."""
    seed: int
    """Where in its table the dither of block 0 begins, below PHASES; block b begins STRIDE · b further."""


class Kernels(Protocol):
    """`u` is fp32, contiguous, whole blocks: (blocks, 256). Sums and energies are int32 (blocks,)."""

    NAME: str

    def peaks(self, u: Tensor) -> Tensor:
        """The largest |u| of each block, as the bits of an fp32 number in an int32: NaN and Inf exceed all others."""
        ...

    def encode(self, u: Tensor, grid: Grid, bits: int) -> tuple[Tensor, Tensor]:
        """(codes uint8 (blocks, 32 · bits), sums)"""
        ...

    def decode(self, mine: Tensor, theirs: Tensor, half_step: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """From both sides' codes: (c fp32 (blocks, 256), sums of the partner's k less those of ours, energies Σ d²)"""
        ...


@cache
def for_device(kind: str) -> Kernels:
    """The fastest that works here; its NAME says which. `kind`: a torch device's type. The first time on a GPU takes
    seconds: Triton compiles something, to see whether it can."""
    if kind == "cpu":
        from noloco_node.core.kernels import cpu

        cpu.hold_memory()
        return cpu
    if kind == "cuda" and torch.cuda.is_available():
        return gpu.kernels(f"{__name__}.cuda", "swaps are coded on the GPU") or reference
    return reference
