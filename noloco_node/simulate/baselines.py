"""The algorithms that NoLoCo is compared with. Each works on matrices (R, P), a row a replica.

    local     replicas never communicate: the lower bound
    ddp       gradients averaged at each step, one model: the upper bound
    fedavg    after every phase all take the mean of all weights
    diloco    after every phase one Nesterov step along the mean of all Δ (arXiv 2311.08105)
    noloco-paper   NoLoCo's outer step as the paper writes it (arXiv 2506.10911), with both Δ and φ of the partner

Bytes are counted as if vectors were sent in the width of the codec without loss: all-reduce as a ring,
2 (N − 1)/N elements a parameter. None of these waits for the network or loses anything to the codec.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.core.codecs.codec import CodecStats


@dataclass(slots=True)
class Outer:
    """The outer state of all replicas, (R, P) each."""

    theta: Tensor
    """Fast weights, which the inner optimizer moves."""
    phi: Tensor
    """Slow weights."""
    delta: Tensor
    """Outer momentum."""

    @classmethod
    def start(cls, theta: Tensor) -> "Outer":
        return cls(theta, theta.clone(), torch.zeros_like(theta))


class Algorithm:
    """What happens between replicas: nothing, by itself. Everything else is the same for all algorithms."""

    def __init__(self) -> None:
        self.sent = 0.0
        """Bytes for each parameter that a replica has sent so far."""
        self.failed = 0
        """Swaps that both sides gave up."""
        self.scaled = 0
        """Swaps that a bound made smaller."""
        self.taken_back = 0
        """Corrections that honest replicas took back,"""
        self.taken_back_from_honest = 0
        """and how many of them came from honest partners."""
        self.stats = CodecStats()
        """Of the swaps since the last boundary, with the true error."""

    def gradients(self, gradients: Tensor) -> None:
        """Called after each backward pass, before clipping and the inner step; works in place."""

    def boundary(self, outer: Outer) -> None:
        """Called after each inner phase."""

    def between(self, outer: Outer, step: int) -> None:
        """Called between two inner steps; `step` is their number since the last boundary, 1 or more."""

    def finish(self, outer: Outer) -> None:
        """Called after the last boundary: pending corrections are applied."""


class _AllReduce(Algorithm):
    def __init__(self, width: float) -> None:
        super().__init__()
        self._width = width  # bytes of an element on the wire

    def _mean(self, rows: Tensor) -> Tensor:
        replicas = len(rows)
        self.sent += 2 * (replicas - 1) / replicas * self._width
        return rows.mean(dim=0)


class Ddp(_AllReduce):
    def gradients(self, gradients: Tensor) -> None:
        gradients.copy_(self._mean(gradients).expand_as(gradients))


class FedAvg(_AllReduce):
    def boundary(self, outer: Outer) -> None:
        outer.theta.copy_(self._mean(outer.theta).expand_as(outer.theta))


class DiLoCo(_AllReduce):
    """φ is the same in all replicas; δ is Nesterov's velocity over the mean of all Δ."""

    def __init__(self, alpha: float, beta: float, width: float) -> None:
        super().__init__(width)
        self._alpha, self._beta = alpha, beta

    def boundary(self, outer: Outer) -> None:
        moved = self._mean(outer.theta - outer.phi)  # the negative of the outer gradient
        outer.delta.mul_(self._alpha).add_(moved)
        outer.phi.add_(moved, alpha=self._beta).add_(outer.delta, alpha=self._alpha * self._beta)
        outer.theta.copy_(outer.phi)


class PaperNoLoCo(Algorithm):
    """Partners send two vectors and wait for each other. The tests compare the split form with it."""

    def __init__(self, alpha: float, beta: float, gamma: float, width: float, chance: random.Random) -> None:
        super().__init__()
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._width, self._chance = width, chance

    def boundary(self, outer: Outer) -> None:
        partner = partners(matching(len(outer.theta), self._chance), len(outer.theta))
        moved = outer.theta - outer.phi
        pull = (moved + moved[partner]) * (self._beta / 2) - (outer.phi - outer.phi[partner]) * (self._gamma / 2)
        outer.delta.mul_(self._alpha).add_(pull)
        outer.phi.add_(outer.delta)
        outer.theta.copy_(outer.phi)
        self.sent += 2 * self._width


Pairs = Sequence[tuple[int, int]]


def matching(replicas: int, chance: random.Random, met: frozenset[frozenset[int]] = frozenset()) -> Pairs:
    """Random pairs of all replicas (one is left over if they are odd), without the pairs in `met` where possible."""
    pairs: list[tuple[int, int]] = []
    for _ in range(100):  # while each has had few partners, about one draw in e has no repeated pair
        order = chance.sample(range(replicas), replicas)
        pairs = list(zip(order[::2], order[1::2], strict=False))
        if not any(frozenset(pair) in met for pair in pairs):
            break
    return pairs


def partners(pairs: Pairs, replicas: int) -> list[int]:
    """The partner of each replica; its own number where it has none."""
    of = list(range(replicas))
    for i, j in pairs:
        of[i], of[j] = j, i
    return of
