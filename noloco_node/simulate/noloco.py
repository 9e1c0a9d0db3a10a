"""NoLoCo with many replicas, by the functions that a node uses: core/outer.py for the steps, core/codecs between two
partners. `algorithm` makes any algorithm from a Choice.

What can be tried beyond one plain swap a phase:

- `delay`: a swap takes that many inner steps from its boundary on. Its correction is applied as it arrives, slice by
  slice, in an order that the exchange draws, as a node applies fragments. If some of it is still to come at the next
  boundary, that round is solo and makes no outer step: the phase goes on. (A node takes its local step there; without
  it three nodes beside one that holds swaps ended 6 to 9% higher.)
- `swaps`: several partners in a phase, one after the other; the second gets u + c, the result of the first swap. Each
  needs the link for `delay` steps, so they are applied one after the other.
- Who was a partner in the last ⌈log2 N⌉ swaps is not drawn again where others are left: replicas mix faster, most where
  they read different text.
- `keep_norm`: Δ gets the length back that averaging takes from it (core/length_correction.py).
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from noloco_node.core import outer as core
from noloco_node.core.bounds import LONGEST, PHASES
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, CodecStats, Conversation, carry, hints, scaled
from noloco_node.core.fragments import Cut, order
from noloco_node.core.length_correction import LengthCorrection
from noloco_node.core.partners import no_repeat
from noloco_node.errors import NonFinite, PeerFault
from noloco_node.simulate.attacks import Attackers
from noloco_node.simulate.baselines import Algorithm, Outer, baseline
from noloco_node.simulate.defences import guards
from noloco_node.simulate.settings import Choice, Settings

Evaluate = Callable[[Tensor], float]
"""The held-out loss of one replica's weights."""


def algorithm(
    choice: Choice,
    settings: Settings,
    layout: Mapping[str, torch.Size],
    evaluate: Evaluate | None = None,
    stage: int = 0,
) -> Algorithm:
    """`layout`: the shapes of a replica's tensors, in the order of its flat vector. `evaluate`: a small held-out loss;
    without it nothing is taken back. `stage`: each draws partners of its own."""
    width = element_bytes(settings.codec)
    chance = random.Random(f"partners {settings.seed}" + (f" of stage {stage}" if stage else ""))
    if choice.name != "noloco":
        return baseline(choice, settings, width, chance)
    sizes = [size.numel() for size in layout.values()]
    return NoLoCo(choice, settings, sizes, chance, evaluate)


@dataclass(slots=True, eq=False)
class _Pending:
    """The swaps of all pairs that began at one moment, until their last slice is there."""

    began: int
    """Inner steps after the boundary."""
    due: int
    """The same, of the last slice."""
    c: Tensor
    """A row a replica."""
    added: Tensor
    """What was applied of it, with the length that was owed."""
    exchanges: dict[int, bytes] = field(default_factory=dict)
    """By row, of those that get a correction."""
    scale: dict[int, float] = field(default_factory=dict)
    """By row: what c was multiplied by."""
    partner: dict[int, int] = field(default_factory=dict)
    slices: int = 0
    """How many have been applied."""
    boundaries: int = 0
    """How many have passed since."""

    def arrived(self, step: int, of: int) -> int:
        """How many slices are there, so many inner steps after the boundary."""
        return of if step >= self.due else max(0, of * (step - self.began) // (self.due - self.began))


class NoLoCo(Algorithm):
    def __init__(
        self,
        choice: Choice,
        settings: Settings,
        sizes: Sequence[int],
        chance: random.Random,
        evaluate: Evaluate | None = None,
    ) -> None:
        super().__init__()
        self._hyper = core.OuterSettings(choice.alpha, choice.beta, choice.gamma)
        self._swaps = choice.swaps
        self._steps = choice.inner_steps or settings.inner_steps
        self._delay = settings.delay(self._steps)
        self._slices = Cut(sum(sizes), -(-sum(sizes) // max(1, self._delay)))
        """Each arrives in one inner step."""
        self._chance = chance
        self._evaluate = evaluate if settings.defences else None
        self._codecs = [codec(settings.codec) for _ in range(settings.replicas)]
        self._norms = [LengthCorrection(sizes) for _ in range(settings.replicas)] if choice.keep_norm else []
        self._attackers = Attackers(settings, sizes)
        self._guards = guards(settings, sum(sizes))
        self._movements: list[Tensor] = []  # of the last phase: a codec guesses its ranges from them
        self._lengths = [deque[float](maxlen=PHASES) for _ in range(settings.replicas)]
        self._pending: list[_Pending] = []
        self._lately = deque[frozenset[frozenset[int]]](maxlen=max(1, no_repeat(settings.replicas)))
        """Who met in the last swaps."""

    def boundary(self, outer: Outer) -> None:
        if not self._movements:
            self._evaluate_each(outer.phi, untrained=True)
        for pending in self._pending:
            pending.boundaries += 1
        if not self._pending:
            u = self._offered(outer)
            self._local_steps(outer)
            self._swap_pairs(u)
        self._evaluate_each(outer.theta)
        self._apply_due(outer, 0)

    def _evaluate_each(self, weights: Tensor, *, untrained: bool = False) -> None:
        for row, guard in self._guards.items():
            if self._evaluate:
                guard.course.passed(self._evaluate(weights.detach()[row]), untrained=untrained)

    def between(self, outer: Outer, step: int) -> None:
        self._apply_due(outer, step)

    def finish(self, outer: Outer) -> None:
        for pending in list(self._pending):
            self._apply(outer, pending, pending.due)

    def _offered(self, outer: Outer) -> Tensor:
        u = torch.empty_like(outer.theta)
        if not self._norms:
            core.snapshot(outer.theta, outer.phi, self._hyper, u)
        for norms, theta, phi, offered in zip(self._norms, outer.theta.detach(), outer.phi, u.detach(), strict=False):
            norms.offer(theta, phi, self._hyper, offered)
        return u

    def _local_steps(self, outer: Outer) -> None:
        self._movements = []
        for row, of_one in enumerate(zip(outer.theta.detach(), outer.phi, outer.delta, strict=True)):
            moved = core.BlockMovement(*of_one[:2], BLOCK)
            core.local_step(*of_one, self._hyper, moved)
            self._movements.append(hints(moved.peaks.cpu()))
            self._lengths[row].append(float(moved.squares.sum()) ** 0.5)
            if row in self._guards:
                self._guards[row].boundary(moved.peaks, moved.squares)

    def _swap_pairs(self, u: Tensor) -> None:
        self.stats = CodecStats()
        met: frozenset[frozenset[int]] = frozenset()
        u, start = u.cpu(), u.device
        for swap in range(1, self._swaps + 1):
            pairs = self._attackers.pairs(self._chance, met.union(*self._lately), self._guards)
            self._lately.append(frozenset(frozenset(pair) for pair in pairs))
            met |= self._lately[-1]
            ends = (swap - 1) * self._delay, swap * self._delay
            pending = _Pending(*ends, torch.zeros_like(u), torch.zeros_like(u, device=start))
            for i, j in pairs:
                self._swap(u, i, j, pending)
            u = u + pending.c
            pending.c = pending.c.to(start)
            self._pending.append(pending)

    def _swap(self, u: Tensor, i: int, j: int, pending: "_Pending") -> None:
        """Into `pending`."""
        sides = ((i, j), (j, i))
        exchange = self._chance.randbytes(16)
        for row, partner in sides:
            if row in self._attackers:
                pending.c[row], pending.exchanges[row] = core.correction(u[row], u[partner]), exchange
        mine, theirs = (self._converse(u, *side, exchange) for side in sides)
        try:
            c_mine, c_theirs = carry(mine, theirs)
            allowed = [self._allowed(row, c, u[row]) for (row, _), c in zip(sides, (c_mine, c_theirs), strict=True)]
        except (PeerFault, NonFinite) as fault:  # one of them gave up: a solo round for both, as in a node
            self.failed += 1
            self._refuse(sides, fault)
            return
        both = min(allowed)
        self.scaled += both < 1
        for side, conversation, c, own in zip(sides, (mine, theirs), (c_mine, c_theirs), allowed, strict=True):
            row, partner = side
            if own == 1:  # else it was not what is usual
                conversation.learn()
            if row not in self._attackers:
                pending.c[row], pending.exchanges[row] = scaled(c, both), exchange
                pending.scale[row], pending.partner[row] = both, partner
            if row in self._guards:
                self._guards[row].swapped(partner)
        both_bytes = mine.stats.sent_bytes + theirs.stats.sent_bytes
        self.sent += both_bytes / u.numel()  # `u` has all replicas: the mean of one
        apart = u[j] - u[i]
        stats = replace(mine.stats, difference=float(apart.norm()) ** 2, error=float((2 * c_mine - apart).norm()) ** 2)
        self.stats.add(stats)

    def _refuse(self, sides: Iterable[tuple[int, int]], fault: Exception) -> None:
        for row, partner in sides:
            if row in self._guards and isinstance(fault, PeerFault):
                self._guards[row].refused(partner, fault)
                if fault.reason == "diverged":
                    self._codecs[row].forget()

    def _converse(self, u: Tensor, row: int, partner: int, exchange: bytes) -> Conversation:
        reach = LONGEST * max(self._lengths[partner])
        offered = self._attackers.offered(u, row, partner, reach)
        conversation = self._codecs[row].converse(offered, 0, exchange, self._movements[row])
        return self._attackers.converse(conversation) if row in self._attackers else conversation

    def _allowed(self, row: int, c: Tensor, u: Tensor) -> float:
        return self._guards[row].scale(c, u) if row in self._guards else 1.0

    def _apply_due(self, outer: Outer, step: int) -> None:
        for pending in list(self._pending):
            self._apply(outer, pending, step + pending.boundaries * self._steps)

    def _apply(self, outer: Outer, pending: "_Pending", step: int) -> None:
        """What is there by now."""
        count = self._slices.count
        before, pending.slices = pending.slices, pending.arrived(step, count)
        for row, exchange in pending.exchanges.items():
            for index in order(count, exchange)[before : pending.slices]:
                self._correct(outer, row, index, pending)
        if pending.slices == count:
            self._pending.remove(pending)
            for row, partner in pending.partner.items():
                self._judge(outer, row, partner, pending)

    def _correct(self, outer: Outer, row: int, index: int, pending: "_Pending") -> None:
        start, end = self._slices.bounds(index)
        c = pending.c[row, start:end]
        theta, phi, delta = (matrix[row, start:end] for matrix in (outer.theta.detach(), outer.phi, outer.delta))
        with self._norms[row].completed(start, c) if self._norms else nullcontext(()) as owed:
            core.correct(theta, phi, delta, c, self._hyper, 0, *owed)
        pending.added[row, start:end] = sum(owed, c)

    def _judge(self, outer: Outer, row: int, partner: int, pending: "_Pending") -> None:
        """As training/thread.py does it, when a swap has ended: what made the replica worse is taken back."""
        evaluate, guard = self._evaluate, self._guards.get(row)
        if evaluate is None or guard is None:
            return
        theta, c = outer.theta.detach()[row], pending.c[row]
        apart = 2 / max(self._hyper.beta, self._hyper.gamma) / pending.scale[row]
        losses, grows = (evaluate(theta - c), evaluate(theta)), core.carried_on(self._hyper)
        if guard.judge(partner, losses, lambda: evaluate(theta + (apart - 1) * c), grows):
            core.correct(theta, outer.phi[row], outer.delta[row], -pending.added[row], self._hyper)
            if self._norms:
                self._norms[row].take_back(0, len(c))
            self.taken_back += 1
            self.taken_back_from_honest += partner not in self._attackers


def element_bytes(name: str) -> float:
    """Bytes of one element in this codec, found by coding a fragment so long that its header hardly counts.

    core/codecs/by_name.py codes another fragment and so finds 2% less for lattice:4. The tables in simulate/README.md
    were made with this one."""
    sample = torch.linspace(-1, 1, 1 << 18)
    mine, theirs = (codec(name).converse(sample, 0, bytes(16)) for _ in range(2))
    carry(mine, theirs)
    return (mine.stats.sent_bytes + theirs.stats.sent_bytes) / 2 / sample.numel()
