"""How much length averaging takes from what replicas learned, and how it is given back.

Two replicas' Δ are nearly orthogonal, more and more as training goes on, and the mean of two such vectors is shorter
than either, by up to a factor 1/sqrt 2 (what others saw: arXiv 2604.21428). Each replica learns by how much from its
own swaps, tensor by tensor, and lengthens its next Δ:

    at a boundary, before the snapshot        θ ← φ + s Δ ;  R² = ‖β s Δ‖²
    from a swap                               C² = ‖c‖²
    partners of one length (parallelogram)    ‖mean‖² = R² − C²
    then                                      s ← s + (R / ‖mean‖ − s) / 2

φ's own differences are in c too and count. Both partners still take the difference of the same two vectors, so
corrections stay exact opposites and no more crosses the wire. A node that meets nobody keeps its s; a new one has 1.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from noloco_node.core.outer import lengthen, moved

LARGEST_SCALE = 1.5
"""Two orthogonal vectors of one length lose a factor sqrt 2; what a swap seems to lose beyond that is noise."""


@dataclass(slots=True)
class _Tensor:
    """What is known of one of the model's tensors."""

    scale: float = 1.0
    offered: float = 0.0
    """‖β s Δ‖² at the last boundary with an offer."""
    told: float = 0.0
    """Σ c² of the elements heard since."""
    heard: int = 0
    """How many those are; a further partner in the same round teaches nothing more."""


@dataclass(slots=True)
class Norms:
    sizes: Sequence[int]
    """Elements of the model's tensors, in the order of its flat vectors."""
    _tensors: list[_Tensor] = field(init=False)
    _places: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._tensors = [_Tensor() for _ in self.sizes]
        self._places = list(pairwise(accumulate(self.sizes, initial=0)))

    @property
    def scales(self) -> list[float]:
        return [tensor.scale for tensor in self._tensors]

    def lengthen(self, theta: Tensor, phi: Tensor) -> None:
        """At a boundary, before everything else."""
        for tensor, (start, end) in zip(self._tensors, self._places, strict=True):
            if tensor.scale > 1:
                lengthen(theta[start:end], phi[start:end], tensor.scale)

    def offer(self, theta: Tensor, phi: Tensor, beta: float) -> None:
        """A snapshot is taken now: what comes from partners is measured by it."""
        for tensor, (start, end) in zip(self._tensors, self._places, strict=True):
            tensor.offered, tensor.told, tensor.heard = (beta * moved(theta[start:end], phi[start:end])) ** 2, 0.0, 0

    def hear(self, start: int, c: Tensor) -> None:
        """A correction of the elements from `start` on."""
        for tensor, (first, last) in zip(self._tensors, self._places, strict=True):
            part = c[max(first - start, 0) : max(last - start, 0)]
            if len(part) and tensor.heard < last - first:
                tensor.told += float(torch.linalg.vector_norm(part)) ** 2
                tensor.heard += len(part)
                if tensor.heard >= last - first:
                    self._learn(tensor)

    def state(self) -> list[dict[str, Any]]:
        """Plain values, for a checkpoint."""
        return [asdict(tensor) for tensor in self._tensors]

    def load(self, state: list[dict[str, Any]]) -> None:
        self._tensors = [_Tensor(**each) for each in state]

    @staticmethod
    def _learn(tensor: _Tensor) -> None:
        left = max(tensor.offered - tensor.told, tensor.offered / LARGEST_SCALE**2)
        seen = math.sqrt(tensor.offered / left) if left > 0 else 1.0
        tensor.scale += (seen - tensor.scale) / 2
