"""NoLoCo with many replicas, by the functions that a node uses: core/outer.py for the steps, core/codecs between two
partners. `algorithm` makes any algorithm from a Choice.

What can be tried beyond one plain swap a phase:

- `delay`: a correction is applied that many inner steps after its boundary. If one is still pending at the next
  boundary, that round is solo, as in a node.
- `swaps`: several partners in a phase, one after the other; the second gets u + c, the result of the first swap. Each
  needs the link for `delay` steps, so they are applied one after the other.
- `keep_norm`: Δ gets the length back that averaging takes from it (core/length_correction.py).
- `deferred`: the outer step is taken only when all corrections are there, the plain way to train on meanwhile.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noloco_node.core import outer as core
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, CodecStats, carry
from noloco_node.core.length_correction import LengthCorrection
from noloco_node.errors import PeerFault
from noloco_node.simulate.baselines import Algorithm, Ddp, DiLoCo, FedAvg, Outer, PaperNoLoCo, matching
from noloco_node.simulate.settings import Choice, Settings


def algorithm(choice: Choice, settings: Settings, layout: Mapping[str, torch.Size]) -> Algorithm:
    """`layout`: the shapes of a replica's tensors, in the order of its flat vector."""
    width = element_bytes(settings.codec)
    chance = random.Random(f"partners {settings.seed}")
    match choice.name:
        case "ddp":
            return Ddp(width)
        case "fedavg":
            return FedAvg(width)
        case "diloco":
            return DiLoCo(choice.alpha, choice.beta, width)
        case "noloco-paper":
            return PaperNoLoCo(choice.alpha, choice.beta, choice.gamma, width, chance)
        case "noloco":
            sizes = [size.numel() for size in layout.values()]
            return (Deferred if settings.deferred else NoLoCo)(choice, settings, sizes, chance)
    return Algorithm()


@dataclass(slots=True, eq=False)
class _Pending:
    due: int
    """Inner steps after its boundary."""
    c: Tensor
    late: int = 0
    """Boundaries since then."""


class NoLoCo(Algorithm):
    def __init__(self, choice: Choice, settings: Settings, sizes: Sequence[int], chance: random.Random) -> None:
        super().__init__()
        self._hyper = core.OuterSettings(choice.alpha, choice.beta, choice.gamma)
        self._swaps = choice.swaps
        self._steps = choice.inner_steps or settings.inner_steps
        self._delay = settings.delay(self._steps)
        self._chance = chance
        self._codecs = [codec(settings.codec) for _ in range(settings.replicas)]
        self._norms = [LengthCorrection(sizes) for _ in range(settings.replicas)] if choice.keep_norm else []
        self._movements: list[Tensor] = []  # of the last phase: a codec guesses its ranges from them
        self._pending: list[_Pending] = []

    def boundary(self, outer: Outer) -> None:
        for pending in self._pending:
            pending.late += 1
        if not self._pending:  # otherwise the link is busy: a solo round
            self._swap_pairs(outer)
        core.local_step(outer.theta, outer.phi, outer.delta, self._hyper)
        self._apply_due(outer, 0)

    def between(self, outer: Outer, step: int) -> None:
        self._apply_due(outer, step)

    def finish(self, outer: Outer) -> None:
        self._correct(outer, self._pending)

    def _swap_pairs(self, outer: Outer) -> None:
        self.stats = CodecStats()
        rows = zip(outer.theta, outer.phi, strict=True)
        self._movements = [core.movement(theta, phi, self._hyper, BLOCK)[0] for theta, phi in rows]
        u = torch.empty_like(outer.theta)
        core.snapshot(outer.theta, outer.phi, self._hyper, u)
        for norms, theta, phi, offered in zip(self._norms, outer.theta.detach(), outer.phi, u.detach(), strict=False):
            norms.offer(theta, phi, self._hyper.beta, offered)
        met: frozenset[frozenset[int]] = frozenset()
        u, start = u.cpu(), u.device
        for swap in range(1, self._swaps + 1):
            pairs = matching(len(u), self._chance, met)
            met |= {frozenset(pair) for pair in pairs}
            c = torch.zeros_like(u)
            for i, j in pairs:
                c[i], c[j] = self._swap(u, i, j)
            u = u + c
            self._pending.append(_Pending(swap * self._delay, c.to(start)))

    def _swap(self, u: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        exchange = self._chance.randbytes(16)
        mine, theirs = (self._codecs[k].converse(u[k], 0, exchange, self._movements[k]) for k in (i, j))
        try:
            c_mine, c_theirs = carry(mine, theirs)
        except PeerFault:  # the codec gave up: a solo round for both, as in a node
            self.failed += 1
            return torch.zeros_like(u[i]), torch.zeros_like(u[j])
        both_bytes = mine.stats.sent_bytes + theirs.stats.sent_bytes
        self.sent += both_bytes / u.numel()  # `u` has all replicas: the mean of one
        apart = u[j] - u[i]
        stats = replace(mine.stats, difference=float(apart.norm()) ** 2, error=float((2 * c_mine - apart).norm()) ** 2)
        self.stats.add(stats)
        return c_mine, c_theirs

    def _apply_due(self, outer: Outer, step: int) -> None:
        self._correct(outer, [each for each in self._pending if each.due <= step + each.late * self._steps])

    def _correct(self, outer: Outer, due: Sequence[_Pending]) -> None:
        for pending in due:
            for norms, c in zip(self._norms, pending.c, strict=False):
                if c.any():  # otherwise it had no partner
                    c.copy_(norms.complete(0, c))
            core.correct(outer.theta, outer.phi, outer.delta, pending.c, self._hyper, pending.late)
        self._pending = [pending for pending in self._pending if pending not in due]


class Deferred(NoLoCo):
    """Training goes on from θ without an outer step. When the last correction is there, φ takes the outer step of that
    boundary, and θ moves by what the step would have moved it then. A phase that ends meanwhile has no outer step."""

    def boundary(self, outer: Outer) -> None:
        for pending in self._pending:
            pending.late += 1
        if not self._pending:
            self._left = outer.theta.detach().clone()
            self._then = Outer(self._left.clone(), outer.phi, outer.delta)  # its θ alone is a copy
            self._swap_pairs(self._then)
        self._apply_due(outer, 0)

    def finish(self, outer: Outer) -> None:
        if self._pending:
            self._step(outer)

    def _apply_due(self, outer: Outer, step: int) -> None:
        if self._pending and all(pending.due <= step + pending.late * self._steps for pending in self._pending):
            self._step(outer)

    def _step(self, outer: Outer) -> None:
        then = self._then
        core.local_step(then.theta, then.phi, then.delta, self._hyper)
        for pending in self._pending:
            pending.late = 0
        self._correct(then, self._pending)
        outer.theta.detach().add_(then.theta - self._left)


def element_bytes(name: str) -> float:
    """Bytes of one element in this codec, found by coding a fragment so long that its header hardly counts."""
    sample = torch.linspace(-1, 1, 1 << 18)
    mine, theirs = (codec(name).converse(sample, 0, bytes(16)) for _ in range(2))
    carry(mine, theirs)
    return (mine.stats.sent_bytes + theirs.stats.sent_bytes) / 2 / sample.numel()
