"""How much length averaging takes from what replicas learned, and how it is given back.

Two replicas' Δ are nearly orthogonal, more and more as training goes on, and the mean of two such vectors is shorter
than either, by up to a factor 1/sqrt 2 (also found in arXiv 2604.21428). Each replica learns by how much from its own
swaps, tensor by tensor, offers its next Δ longer by that, and adds the rest of the length together with the correction:

    at a boundary             u = β s Δ + γ φ ;  e = β (s − 1) Δ is owed ;  R² = ‖β s Δ‖² ;  the local step is of β Δ
    a correction c lands      c + e is added, where core/outer.py has c ;  C² = ‖c‖²
    if both are equally long  ‖mean‖² = R² − C²   (parallelogram)
    then                      s ← s + (R / ‖mean‖ − s) / 2

The differences of φ are in c too and count. Both partners still take the difference of two vectors that both know, so
corrections stay exact opposites and nothing more is sent. In a solo round nothing was shortened and nothing is added,
and s stays; a new node has s = 1. With the longer Δ already in the local step, without the partner's half, a replica
would overshoot until the correction comes, and the later that is, the more it would cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from noloco_node.core.outer import moved, owe

LARGEST_SCALE = 1.5
"""Two orthogonal vectors of one length lose a factor sqrt 2; what a swap seems to lose beyond that is noise."""
OWED = torch.bfloat16
"""Two bytes an element: the rounded number is what a partner gets, so rounding changes only the step's length."""


@dataclass(slots=True)
class _Tensor:
    """What is known of one of the model's tensors."""

    scale: float = 1.0
    offered: float = 0.0
    """‖β s Δ‖² at the last boundary with an offer."""
    corrected: float = 0.0
    """Σ c² of the elements corrected since."""
    elements: int = 0
    """How many those are; nothing is learned from a further partner in the same round."""
    before: float = 1.0
    """The scale at the last boundary with an offer."""


@dataclass(slots=True)
class LengthCorrection:
    sizes: Sequence[int]
    """Numbers of elements of the model's tensors, in the order of its flat vectors."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where φ is, best."""
    _tensors: list[_Tensor] = field(init=False)
    _places: list[tuple[int, int]] = field(init=False)
    _owed: Tensor = field(init=False)
    """e of the last offer."""
    _landed: list[tuple[int, int]] = field(init=False, default_factory=list)
    """Where its correction has landed."""

    def __post_init__(self) -> None:
        self._tensors = [_Tensor() for _ in self.sizes]
        self._places = list(pairwise(accumulate(self.sizes, initial=0)))
        self._owed = torch.zeros(sum(self.sizes), dtype=OWED, device=self.device)

    @property
    def scales(self) -> list[float]:
        return [tensor.scale for tensor in self._tensors]

    def offer(self, theta: Tensor, phi: Tensor, beta: float, u: Tensor) -> None:
        """Makes βΔ in a snapshot longer. The corrections that follow are compared with it."""
        for tensor, (start, end) in zip(self._tensors, self._places, strict=True):
            part = slice(start, end)
            if tensor.scale > 1:
                owe(theta[part], phi[part], beta * (tensor.scale - 1), u[part], self._owed[part])
            else:
                self._owed[part].zero_()
            tensor.offered = (beta * tensor.scale * moved(theta[part], phi[part])) ** 2
            tensor.corrected, tensor.elements, tensor.before = 0.0, 0, tensor.scale
        self._landed.clear()

    def complete(self, start: int, c: Tensor) -> Tensor:
        """For a correction of the elements from `start` on. Returns what to add: c, and what is owed there."""
        if start + len(c) > len(self._owed):
            raise ValueError(f"{len(c)} elements from {start} on do not lie in a vector of {len(self._owed)}")
        for tensor, (first, last) in zip(self._tensors, self._places, strict=True):
            part = c[max(first - start, 0) : max(last - start, 0)]
            if len(part) and tensor.elements < last - first:
                tensor.corrected += float(torch.linalg.vector_norm(part)) ** 2
                tensor.elements += len(part)
                if tensor.elements >= last - first:
                    self._learn(tensor)
        if any(first < start + len(c) and start < last for first, last in self._landed):
            return c  # of the round's second partner
        self._landed.append((start, start + len(c)))
        return c + self._owed[start : start + len(c)].to(c.device)

    def owed(self, start: int, size: int) -> Tensor:
        """What `complete` added in these elements, for the last offer."""
        return self._owed[start : start + size]

    def take_back(self, start: int, size: int) -> None:
        """As if no correction of these elements had come for the last offer."""
        self._landed = [part for part in self._landed if part != (start, start + size)]
        for tensor, (first, last) in zip(self._tensors, self._places, strict=True):
            if first < start + size and start < last:
                tensor.scale, tensor.corrected, tensor.elements = tensor.before, 0.0, 0

    def load(self, scales: Sequence[float]) -> None:
        """The `scales` of a checkpoint."""
        for tensor, scale in zip(self._tensors, scales, strict=True):
            tensor.scale = scale

    @staticmethod
    def _learn(tensor: _Tensor) -> None:
        if not math.isfinite(tensor.corrected):
            return  # NaN would stay for ever
        left = max(tensor.offered - tensor.corrected, tensor.offered / LARGEST_SCALE**2)
        seen = math.sqrt(tensor.offered / left) if left > 0 else 1.0
        tensor.scale += (seen - tensor.scale) / 2
