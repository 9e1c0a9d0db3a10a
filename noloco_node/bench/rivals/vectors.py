"""The vector that a worker brings to a step: weights that all share, and a movement of its own.

Noise, the same in every stretch of 1 M elements: no system that is measured gains by that, and 100 M elements are there
within a second.
"""

import torch
from torch import Tensor

STRETCH = 1 << 20
WEIGHT, MOVED = 0.02, 1e-3
"""Root mean squares: those of a model's matrices, and about what AdamW moves them in a phase."""
_PROBED = 1024
"""So many that a codec of few bits is not misjudged by chance: of 64 the distance left varied by a fifth."""


def weights(out: Tensor, worker: int, step: int) -> Tensor:
    """Fills it with the vector of one worker before a step. Returns a stretch of its movement."""
    shared = torch.empty(STRETCH).normal_(0, WEIGHT, generator=torch.Generator().manual_seed(1))
    own = torch.Generator().manual_seed(1000 * step + worker + 2)
    moved = torch.empty(STRETCH).normal_(0, MOVED, generator=own)
    for part in torch.split(out, STRETCH):
        torch.add(shared[: len(part)], moved[: len(part)], out=part)
    return moved


def probe(vector: Tensor) -> list[float]:
    """Elements from all over it, by which the bench sees that they were averaged."""
    return [float(vector[at]) for at in probed(len(vector))]


def probed(size: int) -> list[int]:
    return [at * (size - 1) // (_PROBED - 1) for at in range(_PROBED)]
