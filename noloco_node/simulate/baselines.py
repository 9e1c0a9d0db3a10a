"""What NoLoCo is measured against, each in a few lines on one interface: matrices (R, P), a row a replica.

    local     nobody ever talks: the bound below
    ddp       gradients averaged at each step, one model: the bound above
    fedavg    every phase all take the mean of all weights
    diloco    every phase one Nesterov step along the mean of all Δ (arXiv 2311.08105)
    noloco-paper   NoLoCo's outer step as the paper writes it (arXiv 2506.10911), with both Δ and φ of the partner

Bytes are counted as if each sent its vectors in the width of the codec at no loss: all-reduce as a ring,
2 (N − 1)/N elements a parameter. No rival waits for the network or loses a bit to it here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from noloco_node.core.codec import CodecStats


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


class Algorithm(Protocol):
    """What happens between replicas; everything else is the same for all."""

    sent: float
    """Bytes for each parameter that a replica has sent so far."""
    failed: int
    """Swaps that both sides had to give up."""
    stats: CodecStats
    """Of the swaps since the latest boundary, with the true error."""

    def gradients(self, gradients: Tensor) -> None:
        """After each backward pass, before clipping and the inner step; in place."""
        ...

    def boundary(self, outer: Outer) -> None:
        """After each inner phase."""
        ...

    def between(self, outer: Outer, step: int) -> None:
        """Between two inner steps; `step` of them were taken since the last boundary, at least one."""
        ...

    def finish(self, outer: Outer) -> None:
        """After the last boundary: what is still on its way lands."""
        ...


class Local:
    """Also the base of the others: does nothing."""

    def __init__(self) -> None:
        self.sent = 0.0
        self.failed = 0
        self.stats = CodecStats()

    def gradients(self, gradients: Tensor) -> None:
        pass

    def boundary(self, outer: Outer) -> None:
        pass

    def between(self, outer: Outer, step: int) -> None:
        pass

    def finish(self, outer: Outer) -> None:
        pass


class _AllReduce(Local):
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
    """φ starts equal everywhere and stays so; δ is Nesterov's velocity over the mean of all Δ."""

    def __init__(self, alpha: float, beta: float, width: float) -> None:
        super().__init__(width)
        self._alpha, self._beta = alpha, beta

    def boundary(self, outer: Outer) -> None:
        moved = self._mean(outer.theta - outer.phi)  # the negative of the outer gradient
        outer.delta.mul_(self._alpha).add_(moved)
        outer.phi.add_(moved, alpha=self._beta).add_(outer.delta, alpha=self._alpha * self._beta)
        outer.theta.copy_(outer.phi)


class PaperNoLoCo(Local):
    """Two vectors cross the wire, everybody waits for the partner. Kept as what the split form is tested against."""

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
    """Everybody in a random pair, but one when they are odd; nobody twice with whom it `met` where that can be had."""
    pairs: list[tuple[int, int]] = []
    for _ in range(100):  # a draw without old pairs succeeds about once in e tries while few have been met
        order = chance.sample(range(replicas), replicas)
        pairs = list(zip(order[::2], order[1::2], strict=False))
        if not any(frozenset(pair) in met for pair in pairs):
            break
    return pairs


def partners(pairs: Pairs, replicas: int) -> list[int]:
    """The partner of each; who has none is its own."""
    of = list(range(replicas))
    for i, j in pairs:
        of[i], of[j] = j, i
    return of
