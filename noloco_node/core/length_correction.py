"""How much length averaging takes from what replicas learned, and how it is given back.

Two replicas' Δ are nearly orthogonal, more and more as training goes on, and the mean of two such vectors is shorter
than either, by up to a factor 1/sqrt 2 (also found in arXiv 2604.21428). Each replica learns by how much from its own
swaps, tensor by tensor, offers its next Δ longer by that, and adds the rest of the length together with the correction:

    at a boundary             M = β s Δ ;  u = M + γ φ ;  e = (1 − 1/s) M is owed ;  the local step is of β Δ = M − e
    a correction c lands      c + e is added, where core/outer.py has c
    if both are equally long  ‖mean of both M‖² = ⟨M, mean⟩ = ‖M‖² + ⟨M, c⟩, for c is half the difference of both M
    then                      s ← s + (‖M‖ / ‖mean‖ − s) / 2

The difference of φ is in c too. It has little to do with what one of the two learned last, so the product does not see
it. *(Tried: ‖mean‖² = ‖M‖² − ‖c‖², which holds where φ is the same. s ran to its limit, 1.48 on average instead of
1.31, and the loss ended at 1.438 instead of 1.431; 1.420 instead of 1.414 where replicas read different text.)*

Both partners still take the difference of two vectors that both know, so corrections stay exact opposites and nothing
more is sent. The lengths are not opposites: a swap moves the pair's mean by (e_i + e_j)/2, along what the two have
learned, which is what it is for. In a solo round nothing was shortened and nothing is added, and s stays; a new node
has s = 1. With the longer Δ already in the local step, without the partner's half, a replica would overshoot until the
correction comes, and the later that is, the more it would cost.

Products are read from the device once a round: a correction that lands waits for nothing.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from noloco_node.core.outer import lengthen, moved

LARGEST_SCALE = math.sqrt(2)
"""Two orthogonal vectors of one length lose so much; what a swap seems to lose beyond that is noise."""
OFFERED = torch.bfloat16
"""Two bytes an element: a share of the rounded number is what a partner gets, so rounding changes only the step's
length."""


@dataclass(slots=True)
class _Tensor:
    """What is known of one of the model's tensors."""

    scale: float = 1.0
    offered: float = 0.0
    """‖M‖² at the last boundary with an offer."""
    along: float = 0.0
    """⟨M, c⟩ of the elements corrected since."""
    elements: int = 0
    """How many those are; nothing is learned from a further partner in the same round."""
    learned: bool = False
    """Whether `scale` follows from them."""
    before: float = 1.0
    """The scale at the last boundary with an offer."""


class LengthCorrection:
    def __init__(self, sizes: Sequence[int], offered: Tensor | None = None) -> None:
        """`sizes`: numbers of elements of the model's tensors, in the order of its flat vectors. `offered`: memory of
        their sum for M, best where φ is."""
        self._tensors = [_Tensor() for _ in sizes]
        self._places = list(pairwise(accumulate(sizes, initial=0)))
        self._starts = [start for start, _ in self._places]
        self._offered = torch.empty(sum(sizes), dtype=OFFERED) if offered is None else offered
        """M of the last offer."""
        self._offered.zero_()
        self._landed: list[tuple[int, int]] = []
        """Where its correction has landed."""
        self._unread: list[tuple[_Tensor, Tensor]] = []
        """⟨M, c⟩ of parts of a tensor, not in `along` yet."""

    @property
    def scales(self) -> list[float]:
        self._learn()
        return [tensor.scale for tensor in self._tensors]

    def offer(self, theta: Tensor, phi: Tensor, beta: float, u: Tensor) -> None:
        """Makes βΔ in a snapshot longer. The corrections that follow are compared with it."""
        self._learn()
        squares = []
        for tensor, (start, end) in zip(self._tensors, self._places, strict=True):
            part = slice(start, end)
            lengthen(theta[part], phi[part], beta * tensor.scale, _owed(tensor.scale), u[part], self._offered[part])
            squares.append(moved(theta[part], phi[part]))
        for tensor, square in zip(self._tensors, torch.stack(squares).tolist() if squares else (), strict=True):
            tensor.offered = (beta * tensor.scale) ** 2 * square
            tensor.along, tensor.elements, tensor.learned, tensor.before = 0.0, 0, False, tensor.scale
        self._landed.clear()

    def complete(self, start: int, c: Tensor) -> Tensor:
        """For a correction of the elements from `start` on. Returns what to add: c, and what is owed there."""
        end = start + len(c)
        if end > len(self._offered):
            raise ValueError(f"{len(c)} elements from {start} on do not lie in a vector of {len(self._offered)}")
        offered = self._offered[start:end].to(c.device, non_blocking=True).to(c.dtype)
        again = any(first < end and start < last for first, last in self._landed)  # of the round's second partner
        unread, whole = [], c if again else c.clone()
        for tensor, (first, last) in self._touched(start, end):
            part = slice(max(first - start, 0), last - start)
            if tensor.elements < last - first:
                unread.append((tensor, torch.dot(c[part], offered[part])))
            if not again:
                whole[part].add_(offered[part], alpha=_owed(tensor.before))
        for tensor, (first, last) in self._touched(start, end):  # from here on nothing is allocated: where a GPU has no
            if tensor.elements < last - first:  # memory, nothing has changed
                tensor.elements += min(last, end) - max(first, start)
        self._unread += unread
        if not again:
            self._landed.append((start, end))
        return whole

    def owed(self, start: int, size: int) -> Tensor:
        """What `complete` added in these elements, for the last offer."""
        owed = self._offered[start : start + size].float()
        for tensor, (first, last) in self._touched(start, start + size):
            owed[max(first - start, 0) : last - start].mul_(_owed(tensor.before))
        return owed

    def take_back(self, start: int, size: int) -> None:
        """As if no correction of these elements had come for the last offer."""
        self._learn()
        self._landed = [part for part in self._landed if part[1] <= start or start + size <= part[0]]
        for tensor, _ in self._touched(start, start + size):
            tensor.scale, tensor.along, tensor.elements, tensor.learned = tensor.before, 0.0, 0, False

    def load(self, scales: Sequence[float]) -> None:
        """The `scales` of a checkpoint."""
        for tensor, scale in zip(self._tensors, scales, strict=True):
            tensor.scale = scale

    def _touched(self, start: int, end: int) -> Iterator[tuple[_Tensor, tuple[int, int]]]:
        """The tensors that have some of these elements, and where they lie."""
        at = max(bisect_right(self._starts, start) - 1, 0)
        while at < len(self._places) and self._places[at][0] < end:
            if start < self._places[at][1]:
                yield self._tensors[at], self._places[at]
            at += 1

    def _learn(self) -> None:
        """From the tensors whose correction is whole."""
        products = torch.stack([product for _, product in self._unread]).tolist() if self._unread else ()
        for (tensor, _), product in zip(self._unread, products, strict=True):
            tensor.along += product
        self._unread = []
        for tensor, (first, last) in zip(self._tensors, self._places, strict=True):
            if tensor.elements >= last - first and not tensor.learned:
                tensor.learned = True
                _learn(tensor)


def _learn(tensor: _Tensor) -> None:
    if not math.isfinite(tensor.along):
        return  # NaN would stay for ever
    least = tensor.offered / LARGEST_SCALE**2
    left = min(max(tensor.offered + tensor.along, least), tensor.offered)
    seen = math.sqrt(tensor.offered / left) if left > 0 else 1.0
    tensor.scale += (seen - tensor.scale) / 2


def _owed(scale: float) -> float:
    """The share of M that is owed."""
    return 1 - 1 / scale
