"""NoLoCo among many replicas, with the very functions of the daemon: core/outer.py for the steps, core/codec.py between
two partners. And the one place that makes an algorithm from a Choice.

What may be tried beyond one plain swap a phase:

- `delay`: a correction lands that many inner steps after its boundary. While one is on its way over a boundary no
  other is made: that round is solo, as in the daemon.
- `swaps`: several partners in a phase, one after the other; the second hears u + c, what the first swap left. Each
  needs the link for `delay` steps, so they land one after the other.
- `keep_norm`: the mean of two nearly orthogonal Δ is shorter than either, by up to a factor 1/sqrt 2 (arXiv
  2604.21428). Each replica learns from its past swaps, a tensor at a time, by how much, and scales its next β Δ. Both
  still take the difference of the same two vectors, so corrections stay opposite.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from noloco_node.core import codec as codecs
from noloco_node.core import outer as core
from noloco_node.errors import PeerFault, UsageError
from noloco_node.simulate.rivals import Algorithm, Ddp, DiLoCo, FedAvg, Local, Outer, PaperNoLoCo, matching
from noloco_node.simulate.settings import Choice, Settings

LARGEST_SCALE = 1.5
"""Two orthogonal vectors of one length lose a factor sqrt 2; what a swap seems to lose beyond that is noise."""
_REMEMBERED = 0.5


def algorithm(choice: Choice, settings: Settings, layout: Mapping[str, torch.Size]) -> Algorithm:
    """`layout`: the shapes of a replica's tensors, in the order in which they lie in its flat vector."""
    try:
        width = element_bytes(settings.codec)
    except ValueError as error:
        raise UsageError(str(error)) from None
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
            return NoLoCo(choice, settings, [size.numel() for size in layout.values()], chance)
    return Local()


@dataclass(slots=True, eq=False)
class _Pending:
    due: int
    """Inner steps after the boundary that opened it."""
    c: Tensor
    late: int = 0
    """Boundaries since then."""


class NoLoCo(Local):
    def __init__(self, choice: Choice, settings: Settings, sizes: Sequence[int], chance: random.Random) -> None:
        super().__init__()
        self._hyper = core.Hyper(choice.alpha, choice.beta, choice.gamma)
        self._swaps = choice.swaps
        self._steps = choice.inner_steps or settings.inner_steps
        self._delay = settings.delay(self._steps)
        self._chance = chance
        self._codecs = [codecs.codec(settings.codec) for _ in range(settings.replicas)]
        self._norms = _Norms(choice.keep_norm, settings.replicas, sizes) if choice.keep_norm else None
        self._movements: list[Tensor] = []  # of the latest phase: what a codec guesses its ranges from
        self._pending: list[_Pending] = []

    def boundary(self, outer: Outer) -> None:
        for pending in self._pending:
            pending.late += 1
        rows = zip(outer.theta, outer.phi, strict=True)
        self._movements = [core.movement(theta, phi, self._hyper, codecs.BLOCK) for theta, phi in rows]
        u = torch.empty_like(outer.theta)
        moved = self._local_step(outer, u)
        if not self._pending:  # else the link is busy: solo
            self._meet(u, moved)
        self._land(outer, 0)

    def between(self, outer: Outer, step: int) -> None:
        self._land(outer, step)

    def finish(self, outer: Outer) -> None:
        for pending in self._pending:
            core.correct(outer.theta, outer.phi, outer.delta, pending.c, self._hyper, pending.late)
        self._pending = []

    def _local_step(self, outer: Outer, u: Tensor) -> Tensor | None:
        """Fills u, steps; gives β Δ back where norms are kept."""
        if self._norms is None:
            core.snapshot(outer.theta, outer.phi, self._hyper, u)
            core.local_step(outer.theta, outer.phi, outer.delta, self._hyper)
            return None
        moved = torch.empty_like(u)
        for row, part, scale in self._norms.slices():
            theta, phi, delta = (rows[row, part] for rows in (outer.theta, outer.phi, outer.delta))
            hyper = replace(self._hyper, beta=self._hyper.beta * scale)
            core.snapshot(theta, phi, hyper, u[row, part])
            torch.sub(u[row, part], phi, alpha=self._hyper.gamma, out=moved[row, part])
            core.local_step(theta, phi, delta, hyper)
        return moved

    def _meet(self, u: Tensor, moved: Tensor | None) -> None:
        met: frozenset[frozenset[int]] = frozenset()
        u, start = u.cpu(), u.device
        for swap in range(1, self._swaps + 1):
            pairs = matching(len(u), self._chance, met)
            met |= {frozenset(pair) for pair in pairs}
            c = torch.zeros_like(u)
            for i, j in pairs:
                c[i], c[j] = self._swap(u, i, j)
            if self._norms is not None and moved is not None and swap == 1:
                self._norms.learn(moved.cpu(), c, pairs)
            u = u + c
            self._pending.append(_Pending(swap * self._delay, c.to(start)))

    def _swap(self, u: Tensor, i: int, j: int) -> tuple[Tensor, Tensor]:
        exchange = self._chance.randbytes(16)
        mine, theirs = (self._codecs[k].converse(u[k], 0, exchange, self._movements[k]) for k in (i, j))
        try:
            c_mine, c_theirs, sent = converse(mine, theirs)
        except PeerFault:  # the codec gave up: for both the round ends without a partner, as in the daemon
            self.failed += 1
            return torch.zeros_like(u[i]), torch.zeros_like(u[j])
        self.sent += sent / u.numel()  # both ends' bytes, shared by all replicas
        return c_mine, c_theirs

    def _land(self, outer: Outer, step: int) -> None:
        landed = [pending for pending in self._pending if pending.due <= step + pending.late * self._steps]
        for pending in landed:
            core.correct(outer.theta, outer.phi, outer.delta, pending.c, self._hyper, pending.late)
        self._pending = [pending for pending in self._pending if pending not in landed]


class _Norms:
    """By how much each replica's swaps shortened its β Δ, tensor by tensor: a running mean of what was seen."""

    def __init__(self, share: float, replicas: int, sizes: Sequence[int]) -> None:
        self._share = share
        self._parts = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
        self._scales = [[1.0] * len(sizes) for _ in range(replicas)]

    def slices(self) -> list[tuple[int, slice, float]]:
        return [
            (row, part, 1 + self._share * (scale - 1))
            for row, scales in enumerate(self._scales)
            for part, scale in zip(self._parts, scales, strict=True)
        ]

    def learn(self, moved: Tensor, c: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """The mean of both β Δ is one's own + c, the partner's is one's own + 2 c (φ's own differences counted in)."""
        for row in (row for pair in pairs for row in pair):
            for index, part in enumerate(self._parts):
                own, step = moved[row, part], c[row, part]
                mean = float((own + step).norm())
                kept = float(own.norm() + (own + 2 * step).norm()) / 2
                seen = min(max(kept / mean, 1.0), LARGEST_SCALE) if mean > 0 else 1.0
                scales = self._scales[row]
                scales[index] += (1 - _REMEMBERED) * (seen - scales[index])


def converse(mine: codecs.Conversation, theirs: codecs.Conversation) -> tuple[Tensor, Tensor, int]:
    """Carries payloads between two ends until both know their correction; also the bytes of both ends."""
    say, answer = mine.open(), theirs.open()
    sent = len(say) + len(answer)
    while True:
        heard, theirs_heard = mine.hear(answer), theirs.hear(say)
        if heard.say is not None and theirs_heard.say is not None:
            say, answer = heard.say, theirs_heard.say
            sent += len(say) + len(answer)
        elif heard.correction is not None and theirs_heard.correction is not None:
            return heard.correction, theirs_heard.correction, sent
        else:
            raise RuntimeError("the two ends of a conversation do not agree how many turns it has")


def element_bytes(name: str) -> float:
    """Bytes of one element in this codec, found by coding some."""
    sample = torch.linspace(-1, 1, 4096)
    mine, theirs = (codecs.codec(name).converse(sample, 0, bytes(16)) for _ in range(2))
    _, _, sent = converse(mine, theirs)
    return sent / 2 / sample.numel()
