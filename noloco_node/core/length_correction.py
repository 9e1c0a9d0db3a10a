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
would overshoot until the correction comes, and the later that is, the more it would cost: a loss of 1.445 instead of
1.441 where it comes 2 of 50 steps late, 1.484 instead of 1.464 at 10 (8 replicas of `tiny`, one seed).

Lengths are read from the device once a round: a correction that lands waits for nothing.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor

from noloco_node.core.fragments import touched
from noloco_node.core.outer import OuterSettings, snapshot

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
    learned: bool = False
    """Whether `scale` follows from them."""
    before: float = 1.0
    """The scale at the last boundary with an offer."""


class LengthCorrection:
    def __init__(self, sizes: Sequence[int], owed: Tensor | None = None) -> None:
        """`sizes`: numbers of elements of the model's tensors, in the order of its flat vectors. `owed`: memory of
        their sum for what is owed, best where φ is."""
        self._tensors = [_Tensor() for _ in sizes]
        self._places = list(pairwise(accumulate(sizes, initial=0)))
        self._owed = torch.empty(sum(sizes), dtype=OWED) if owed is None else owed
        """e of the last offer."""
        self._owed.zero_()
        self._landed: set[int] = set()
        """Where the fragments begin whose correction has landed; of a large model there are thousands."""
        self._unread: list[tuple[_Tensor, Tensor]] = []
        """‖c‖ of parts of a tensor, not in `corrected` yet."""

    @property
    def scales(self) -> list[float]:
        self._learn()
        return [tensor.scale for tensor in self._tensors]

    def offer(self, theta: Tensor, phi: Tensor, hyper: OuterSettings, u: Tensor) -> list[float]:
        """Writes a snapshot with a longer βΔ. The corrections that follow are compared with it. Returns ‖Δ‖ of each
        piece."""
        self._learn()
        lengths: list[Tensor] = []
        counts = []
        for tensor, (start, end) in zip(self._tensors, self._places, strict=True):
            part = slice(start, end)
            found = snapshot(theta[part], phi[part], hyper, u[part], tensor.scale, self._owed[part])
            lengths += found
            counts.append(len(found))
        known = torch.stack(lengths).tolist() if lengths else []
        each = iter(known)
        for tensor, count in zip(self._tensors, counts, strict=True):
            square = sum(length * length for length in islice(each, count))
            tensor.offered = (hyper.beta * tensor.scale) ** 2 * square
            tensor.corrected, tensor.elements, tensor.learned, tensor.before = 0.0, 0, False, tensor.scale
        self._landed.clear()
        return known

    @contextmanager
    def completed(self, start: int, c: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """What to add, within, to a correction of the elements from `start` on: what is owed there, if anything. If
        that fails, as a GPU may have no memory for it, it is owed as before."""
        end = start + len(c)
        if end > len(self._owed):
            raise ValueError(f"{len(c)} elements from {start} on do not lie in a vector of {len(self._owed)}")
        parts = [
            (tensor, c[max(first - start, 0) : last - start])
            for tensor, (first, last) in self._touched(start, end)
            if tensor.elements < last - first
        ]
        unread = [(tensor, torch.linalg.vector_norm(part)) for tensor, part in parts]
        again = start in self._landed  # of the round's second partner, whose fragments lie in the same places
        yield () if again else (self._owed[start:end],)
        for tensor, part in parts:
            tensor.elements += len(part)
        self._unread += unread
        self._landed.add(start)

    def owed(self, start: int, size: int) -> Tensor:
        """What `completed` added in these elements, for the last offer."""
        return self._owed[start : start + size]

    def take_back(self, start: int, size: int) -> None:
        """As if no correction of these elements had come for the last offer."""
        self._learn()
        self._landed.discard(start)
        for tensor, _ in self._touched(start, start + size):
            tensor.scale, tensor.corrected, tensor.elements, tensor.learned = tensor.before, 0.0, 0, False

    def load(self, scales: Sequence[float]) -> None:
        """The `scales` of a checkpoint."""
        for tensor, scale in zip(self._tensors, scales, strict=True):
            tensor.scale = scale

    def _touched(self, start: int, end: int) -> Iterator[tuple[_Tensor, tuple[int, int]]]:
        """The tensors that have some of these elements, and where they lie."""
        return ((self._tensors[at], self._places[at]) for at in touched(self._places, start, end))

    def _learn(self) -> None:
        """From the tensors whose correction is whole."""
        lengths = torch.stack([length for _, length in self._unread]).tolist() if self._unread else ()
        for (tensor, _), length in zip(self._unread, lengths, strict=True):
            tensor.corrected += length**2
        self._unread = []
        for tensor, (first, last) in zip(self._tensors, self._places, strict=True):
            if tensor.elements >= last - first and not tensor.learned:
                tensor.learned = True
                _learn(tensor)


def _learn(tensor: _Tensor) -> None:
    if not math.isfinite(tensor.corrected):
        return  # NaN would stay for ever
    left = max(tensor.offered - tensor.corrected, tensor.offered / LARGEST_SCALE**2)
    seen = math.sqrt(tensor.offered / left) if left > 0 else 1.0
    tensor.scale += (seen - tensor.scale) / 2
