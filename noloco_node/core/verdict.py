"""Whether a swap did harm: by what this replica itself measures with and without the correction, once it landed.

A training loss that stays finite proves nothing: after u' = -u it sits at that of a uniform guess. Two losses are
compared: on held-out data, which an attacker knows too, and on the replica's own next batch, which nobody else needs to
know; that one counts as far as it is above the held-out one and rises by more: who sees few classes has hardly any loss
on its own, and a little more is many times that. (Not on its last batch, which it has just been trained on.)
*(Simulated, eight replicas that see other classes of images: 27 of 478 swaps are taken back, and the averaged model's
loss is 0.05, as without verdicts; where all of the own loss counted, 284 of 326 and 0.66.)*

What the own batch shows and the held-out data do not is compared with the last swaps with others (`_Hidden`): where all
see the same data a few per cent are a lot, where each sees its own, a tenth is nothing. *(Three real nodes beside one
that harms so: a training loss of 0.32 to 0.40, without the comparison 0.89, unattacked 0.28. Simulated, eight replicas
that see other classes of images, Dirichlet 0.1 and 0.3, three seeds each: 0.7% less to 2% more loss than without it.)*

What is usual follows from the replica's own course, `Course`: a swap may cost what a phase gains, whatever the partner
says of its round (an attacker says what allows it most). What counts is what a correction comes to in the end: momentum
carries it on, to 1 / (1 - α) of what has landed (core/outer.py, `carried_on`). *(With α 0.3 and without that, a partner
that drew back to the first weights raised the loss by 15%. Of honest swaps half cost less than 0.25 of a gain, the most
1.0; 2u, as long as the bounds let it be, cost 0.7 to 1.6.)*

- A correction that raises a loss beyond that is taken back, unless what the partner sent is as good as we are: two
  halves of a swarm that trained apart for 12 phases first became 4 to 6% worse together, since only the way between was
  worse. A liar may send such a vector too; each partner has an allowance for it (core/standing.py).
- Only a vector that is worse than this replica ever was in its course is a lie: who trains more slowly is honest. But a
  partner whose swaps, one after the other, cost more than half of what a phase gains is left out for a while, liar or
  not: the sum of their `excess` is counted (core/standing.py).
- A vector that is worse than the weights that the run began with is no slow replica's: its swap may not cost what a
  phase gains. *(The first phases of a language model gain 44, 29 and 13% of the loss: -u raised it by 6 and by 19%
  there, and stayed.)*

Shares say little where a loss passes zero, or ends close to a zero that means nothing, as a density's: a task adds a
constant there. *(Two replicas of a Gaussian likelihood, from 0.57 to -0.68: in 37 rounds of 80 the partner was left
out; with 3 added to the loss in none. Shares of the range of the losses so far: one huge loss at the start, as of a
variance that begins too small, makes them a licence to harm.)* Larger allowances at a task's noise, where late swaps
keep honest pairs apart, were tried: attacks cost more, and no loss was better.

Measured at once, before the training has adapted to the correction: after one phase of training on top of -u, to take
it back made the loss worse, 2.97 to 3.72.

A swap that lasts over boundaries is also measured before each one by which a third more of it has landed (`PART`), and
at its end as a whole: a partner that sent most of it at once, and held its end, had trained its harm in by then.
*(Three real nodes at the run's noise, 3 to 4 phases held: 8 of 27 such swaps were taken back, and the loss ended at
0.157 where unattacked nodes had 0.013; with this 12 of 12, and 0.021. Honest nodes with late swaps lose nothing by it.
At each boundary, however little has landed: they were apart in 192 instead of 86 of 720 rounds.)*
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

TOLERANCE = 0.011
"""A relative rise of the held-out loss that is usual in an honest swap."""
OWN_TOLERANCE, OWN_USUAL = 0.28, 0.11
"""What a swap may raise the loss of the own batch by, beyond what the held-out data show: at most, and swap after swap.
Honest ones raise it by up to 0.21 where each replica has data that no other has."""
OWN_TOLERANCE_LEAST, OWN_USUAL_LEAST = 0.03, 0.005
"""The same where swaps with others hardly differ."""
COMPARED, ENOUGH = 64, 3
"""Swaps that are remembered; and how many of them must have been with others, and measured."""
LEAST_GAIN = 0.002
"""Of a phase, where a run gains nothing any more: what is usual is not exactly 0."""
USUAL, COUNTED = 1.1, 0.55
"""Gains of a phase that a swap may cost; and beyond how many it is counted against the partner."""
SOMEBODY = frozenset({""})
"""A partner of whom it is not known who it is."""
REMEMBERED = 8
"""Phases from which the usual gain is known."""
PART = 1 / 3
"""Of the model: a swap of which so much more has landed is judged before the next boundary too."""
WORST = 256
"""Losses of the course: a partner that is worse than all of them has not just trained less."""


@dataclass(frozen=True, slots=True)
class Losses:
    held_out: float
    own: float = -math.inf
    """Of the batch that is trained next, where it was measured."""

    @property
    def own_counts(self) -> bool:
        """Whether the own one is above the held-out one. Where it is not, with a swap (39 of 50 in `bench train`), it
        need not be measured without the swap: its rise could only be smaller than the held-out loss's, and hides
        nothing."""
        return self.own > self.held_out

    @property
    def seen(self) -> float:
        """The own one, as far as the held-out one does not hide it."""
        return max(self.own, self.held_out)


@dataclass(frozen=True, slots=True)
class Trial:
    """Losses on held-out data, the same data for all."""

    own: float
    """Of the weights that the replica has."""
    theirs: float
    """Of a peer's slow weights."""
    later: float
    """Of those, and what the peer's momentum adds at the next boundary."""
    added: float
    """How much that is, relative to the norm of the peer's slow weights: early in a run a loss says little."""
    new: float
    """Of the weights that the run began with."""


@dataclass(frozen=True, slots=True)
class Verdict:
    excess: float
    """How much more the held-out loss rose, relatively, than may come swap after swap. Negative where the swap was
    good."""
    harmful: bool = False
    """To be taken back."""
    a_lie: bool = False
    """It is harmful, and the partner is to blame."""
    own_excess: float = 0.0
    """As `excess`, of what only the own batch shows."""


class _Hidden:
    """By how much more swaps raised the own batch's loss than the held-out data show.

    The middle of the swaps with others is usual. Chance is twice as far as these are from the middle, or as far as the
    lower end of all swaps if that is more. Liars move the middle only if half of those swaps are theirs, the distance
    if half of the measured ones are, and the lower end by swaps that are better on data that they do not know. What may
    come often grows with the square of chance: so the sum of honest swaps seldom passes the allowance of
    core/standing.py.
    """

    def __init__(self) -> None:
        self._rises: deque[tuple[frozenset[str], float, bool]] = deque(maxlen=COMPARED)

    def saw(self, source: frozenset[str], rise: float, *, measured: bool) -> None:
        """`measured`: not below the held-out loss, where it is not known."""
        self._rises.append((source, rise, measured))

    def allowed(self, source: frozenset[str]) -> tuple[float, float]:
        """What may come from there swap after swap, and once."""
        others = [(rise, measured) for whose, rise, measured in self._rises if not whose & source]
        if sum(measured for _, measured in others) < ENOUGH:
            return OWN_USUAL, OWN_TOLERANCE
        middle = median_low(rise for rise, _ in others)
        away = median_low(abs(rise - middle) for rise, measured in others if measured)
        lowest = sorted(rise for _, rise, measured in self._rises if measured)
        chance = max(2 * away, middle - lowest[len(lowest) // 10])
        usual = max(0.0, middle)
        often, once = max(OWN_USUAL_LEAST, 12 * chance**2), max(OWN_TOLERANCE_LEAST, 3 * chance)
        return min(OWN_USUAL, usual + often), min(OWN_TOLERANCE, usual + once)


class Course:
    """The held-out losses of one replica, boundary by boundary, and what its swaps did."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WORST)
        self._hidden = _Hidden()
        self._untrained = math.inf
        """The loss of the weights that the run began with, where this replica was there then."""

    def passed(self, loss: float, *, untrained: bool = False) -> None:
        """`untrained`: nobody has trained these weights yet."""
        if math.isfinite(loss):
            self._losses.append(loss)
            self._untrained = loss if untrained else self._untrained

    def restart(self) -> None:
        """The weights became others."""
        self._losses.clear()
        self._hidden = _Hidden()

    @property
    def gain(self) -> float:
        """What a phase usually gains, as a share of the loss, which may be below zero."""
        lately = list(self._losses)[-REMEMBERED - 1 :]
        gains = [(before - after) / abs(before) for before, after in pairwise(lately) if before]
        return max(0.0, median(gains)) if gains else 0.0

    @property
    def worst(self) -> float:
        return max(self._losses, default=math.inf)

    def judge(  # noqa: PLR0913
        self,
        without: Losses,
        with_it: Losses,
        partner: Callable[[], Losses],
        grows: float = 1.0,
        source: frozenset[str] = SOMEBODY,
        *,
        over: bool = True,
    ) -> Verdict:
        """`partner`: the losses of what it sent, asked for only where they decide. `grows`: times what has landed of
        the correction that it comes to in the end. `source`: who the partner is, and where. `over`: whether nothing
        more of it lands: then others are compared with it."""
        held_out, hidden = (grows * rise for rise in _rises(without, with_it))
        often, once = self._hidden.allowed(source)
        harmful = a_lie = False
        if not (held_out <= TOLERANCE and hidden <= once):
            theirs = partner()
            is_usual = held_out <= max(TOLERANCE, USUAL * self.gain) and hidden <= once
            if not (is_usual and theirs.held_out <= self._untrained):
                as_good = _worse(without, theirs, once) < _worse(without, with_it, once)
                harmful = not (as_good and math.isfinite(held_out + hidden))
                a_lie = harmful and not theirs.held_out <= max(self.worst, without.held_out)
        if over and math.isfinite(hidden) and not a_lie:
            self._hidden.saw(source, hidden, measured=with_it.own_counts)
        excess = held_out - max(LEAST_GAIN, COUNTED * self.gain)
        return Verdict(excess, harmful, a_lie, hidden - often)


def _worse(before: Losses, after: Losses, once: float) -> float:
    held_out, hidden = _rises(before, after)
    return max(held_out, hidden - once)


def _rises(before: Losses, after: Losses) -> tuple[float, float]:
    """Of the held-out loss; and of the own one, as far as that does not show it: it is further up, or down."""
    held_out, own = _relative(before.held_out, after.held_out), _relative(before.seen, after.seen)
    return held_out, own - median((0.0, own, held_out))


def _relative(before: float, after: float) -> float:
    if not math.isfinite(before):
        return 0.0  # there was nothing to spoil
    return (after - before) / max(abs(before), 1e-9) if math.isfinite(after) else math.inf
