"""The algorithms that NoLoCo is compared with. Each works on matrices (R, P), a row a replica.

    local     replicas never communicate: the lower bound
    ddp       gradients averaged at each step, one model: the upper bound
    fedavg    after every phase all take the mean of all weights
    diloco    after every phase one Nesterov step along the mean of all Δ (arXiv 2311.08105)
    streaming the same fragment by fragment, while training goes on (Streaming DiLoCo, arXiv 2501.18512)
    sparta    after every inner step all take the mean of a small random share of the weights (SPARTA, EXO Labs)
    gasloc    pairs average what DiLoCo's step has without momentum, then momentum is added (GASLoC, arXiv 2606.11081)
    noloco-paper   NoLoCo's outer step as the paper writes it (arXiv 2506.10911), with both Δ and φ of the partner

Bytes are counted as if vectors were sent in the width of the codec without loss: all-reduce as a ring,
2 (N − 1)/N elements a parameter. Only `streaming` knows that the network takes time; the others get a mean at once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from noloco_node.core.codecs.codec import CodecStats
from noloco_node.simulate.settings import Choice, Settings


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

    def columns(self, part: slice) -> "Outer":
        """Of all replicas, as views."""
        return Outer(self.theta[:, part], self.phi[:, part], self.delta[:, part])


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

    def _mean(self, rows: Tensor, share: float = 1.0) -> Tensor:
        """`share`: how much of the whole vector these are."""
        replicas = len(rows)
        self.sent += 2 * (replicas - 1) / replicas * self._width * share
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
        self._step(outer, self._mean(outer.theta - outer.phi))

    def _step(self, outer: Outer, moved: Tensor, own: float = 0.0) -> None:
        """`moved`: the negative of the outer gradient. `own`: how much of its own weights a replica keeps."""
        outer.delta.mul_(self._alpha).add_(moved)
        outer.phi.add_(moved, alpha=self._beta).add_(outer.delta, alpha=self._alpha * self._beta)
        outer.theta.lerp_(outer.phi, 1 - own)


class Streaming(DiLoCo):
    """Once a phase each fragment is sent, and lands `delay` steps later, when k/K of the phase are over. The fragments
    are neighbouring stretches of the vector. There is no boundary; the last steps of a run are merged by nobody, as a
    comparison evaluates the mean of all replicas anyway."""

    def __init__(self, choice: Choice, steps: int, delay: int, width: float) -> None:
        super().__init__(choice.alpha, choice.beta, width)
        self._fragments, self._own, self._steps, self._delay = choice.fragments, choice.own, steps, delay
        self._done = 0  # inner steps
        self._on_the_way: list[tuple[int, slice, Tensor]] = []  # when it lands, what it is, and its mean Δ

    def boundary(self, outer: Outer) -> None:
        pass

    def between(self, outer: Outer, step: int) -> None:
        self._done += 1
        size = outer.theta.shape[1]
        cuts = pairwise(k * size // self._fragments for k in range(self._fragments + 1))
        for k, part in enumerate((slice(*cut) for cut in cuts), start=1):
            if (self._done + self._delay - k * self._steps // self._fragments) % self._steps == 0:
                moved = self._mean((outer.theta - outer.phi)[:, part], (part.stop - part.start) / size)
                self._on_the_way.append((self._done + self._delay, part, moved))
        self._land(outer, self._done)

    def finish(self, outer: Outer) -> None:
        self._land(outer, self._done + self._delay)

    def _land(self, outer: Outer, now: int) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, part, moved = self._on_the_way.pop(0)
            self._step(outer.columns(part), moved, self._own)


class Sparta(_AllReduce):
    """Which weights is drawn from a seed that all have, so their numbers are not sent."""

    def __init__(self, share: float, width: float, seed: int) -> None:
        super().__init__(width)
        self._share, self._chance = share, torch.Generator().manual_seed(seed)

    def between(self, outer: Outer, step: int) -> None:
        size = outer.theta.shape[1]
        drawn = (torch.rand(size, generator=self._chance) < self._share).nonzero().flatten().to(outer.theta.device)
        outer.theta[:, drawn] = self._mean(outer.theta[:, drawn], len(drawn) / size)


class _Pairs(Algorithm):
    """Partners wait for each other."""

    vectors = 1
    """That each of them sends."""

    def __init__(self, alpha: float, beta: float, gamma: float, width: float, chance: random.Random) -> None:
        super().__init__()
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._width, self._chance = width, chance

    def _partners(self, replicas: int) -> list[int]:
        self.sent += self.vectors * self._width
        return partners(matching(replicas, self._chance), replicas)


class PaperNoLoCo(_Pairs):
    """Both Δ and φ are sent. The tests compare the split form with it."""

    vectors = 2

    def boundary(self, outer: Outer) -> None:
        partner = self._partners(len(outer.theta))
        moved = outer.theta - outer.phi
        pull = (moved + moved[partner]) * (self._beta / 2) - (outer.phi - outer.phi[partner]) * (self._gamma / 2)
        outer.delta.mul_(self._alpha).add_(pull)
        outer.phi.add_(outer.delta)
        outer.theta.copy_(outer.phi)


class Gasloc(_Pairs):
    """With z = φ + β Δ the paper has φ ← z − γ (z − z_j)/2 + α (z − z'), z' being z a phase ago, or φ in the first one.
    δ is what φ has beyond z, so z − z' = δ + β Δ. Where all have the same weights this is DiLoCo."""

    def boundary(self, outer: Outer) -> None:
        partner = self._partners(len(outer.theta))
        moved = (outer.theta - outer.phi) * self._beta
        z = outer.phi + moved
        outer.delta.add_(moved).mul_(self._alpha).sub_(z - z[partner], alpha=self._gamma / 2)
        outer.phi.copy_(z + outer.delta)
        outer.theta.copy_(outer.phi)


def baseline(choice: Choice, settings: Settings, width: float, chance: random.Random) -> Algorithm:
    """All but `noloco`. `width`: bytes of an element on the wire."""
    steps = choice.inner_steps or settings.inner_steps
    pairs = choice.alpha, choice.beta, choice.gamma, width, chance
    made: dict[str, Callable[[], Algorithm]] = {
        "ddp": lambda: Ddp(width),
        "fedavg": lambda: FedAvg(width),
        "diloco": lambda: DiLoCo(choice.alpha, choice.beta, width),
        "streaming": lambda: Streaming(choice, steps, settings.delay(steps), width),
        "sparta": lambda: Sparta(choice.share, width, settings.seed),
        "noloco-paper": lambda: PaperNoLoCo(*pairs),
        "gasloc": lambda: Gasloc(*pairs),
    }
    return made.get(choice.name, Algorithm)()


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
