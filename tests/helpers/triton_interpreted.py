"""A program: Triton's kernels, carried out by Triton's interpreter, against the reference, bit for bit.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported. Says how many comparisons were made.
"""

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from test_kernels import BITS, KINDS, check, equal, grid, rows

from noloco_node.core.kernels import BLOCK, cuda, reference

BLOCKS = [0, 1, 9]
"""None, less than a program's, and such that the last program has few."""


def main() -> None:
    compared = 0
    for bits, blocks in itertools.product(BITS, BLOCKS):
        for kind, octave in zip(KINDS, itertools.cycle([-97, -40, -14, 0, 80]), strict=False):
            u, v = rows(kind, blocks, bits), rows("normal", blocks, blocks)
            check(cuda, "cpu", (u, v), grid(blocks, 1000 * bits + blocks, octave), bits)
            compared += 1
    broken = torch.ones(4, BLOCK)
    broken[0, 7], broken[1, 8], broken[2, 9] = torch.nan, -torch.inf, -3e38
    assert equal((cuda.peaks(broken),), (reference.peaks(broken),))
    sys.stdout.write(str(compared + 1))


if __name__ == "__main__":
    main()
