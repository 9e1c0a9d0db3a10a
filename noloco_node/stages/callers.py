"""Which micro-batches of the stage before this stage learns from: of each caller only so many, and none that are much
worse than the others' are.

A caller sends activations and targets of its own choice. Honest ones have different data, but their losses fall
together; wrong targets, or activations that say nothing, cost twice as much as soon as anything was learned. And nobody
needs more of a stage's tokens than the others: what a caller sends beyond its share is answered, so that it loses
nothing, but not learned from. With fewer than three callers it cannot be told who is the odd one.

A stage in the middle sends on in its own name, and the next one counts the losses against it. One micro-batch counts
there as SINGLE times the others' at most, so this stage is WORSE than they are where a third of what it sends on is
wrong. So it sends on nothing of a caller that it does not believe, and of one that it does not know yet only TRIED of
what the others get, beside the first few: who hangs up before its loss is known stays unknown. Pure: time is an
argument.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf, sqrt
from statistics import fmean, median, median_high
from typing import Generic, TypeVar

from noloco_node.base.latest import remember

WORSE = 1.25
"""Times the others' loss, over a caller's last REMEMBERED micro-batches. *(Replicas whose data no other has: 1.19.)*"""
SINGLE = 1.75
"""... and in any single micro-batch. *(Honest ones of 64 tokens: 1.25.)*"""
REMEMBERED, LEAST = 32, 4
"""Losses of a caller, and from how many on they say something."""
SHARE = 1.2
"""Times what the others get that a caller gets while they call, as of swaps (core/standing.py)."""
COUNTED, SHARED_S = 384, 60.0
"""Micro-batches over which shares are taken, and for how long: who is alone then may have all."""
GONE_S = 15.0
"""Who has not called for so long has no part of what is shared now: it may have left. An evaluation takes 10 s."""
HEARD_S = 120.0
"""Who has not called for so long is no measure for the others; and a stage in the middle tries it again."""
TRIED = 0.5
"""Of what the others get, for a caller that a stage in the middle does not know yet: a fifth, beside two others."""
MOST_CALLERS = 256
"""Remembered. The least recently heard are forgotten first."""

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, in the order in which it would be done if all callers were worked for at once, each as much: who
    sends more, or larger ones, waits longer, and nobody else does. Who comes back after a pause, or is new, begins
    where the others are. (Self-clocked fair queueing: Golestani, INFOCOM 1994.)"""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, T]] = []
        self._order = count()
        self._done = 0
        """How much had been done for each caller, if all had been worked for at once."""
        self._due: dict[str, int] = {}
        """Of those of whom something waits: when the last of it will be done, by the same measure."""

    def put(self, caller: str, item: T, work: int) -> None:
        self._due[caller] = due = max(self._due.get(caller, 0), self._done) + work
        heappush(self._waiting, (due, next(self._order), item))

    def next(self) -> T | None:
        if not self._waiting:
            return None
        self._done, _, item = heappop(self._waiting)
        self._due = {caller: due for caller, due in self._due.items() if due > self._done}
        return item


@dataclass(slots=True)
class _Caller:
    heard_at: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    mean: float = 0.0
    middle: float = inf
    """Of its losses, once it is known."""

    @property
    def is_known(self) -> bool:
        return len(self.losses) >= LEAST

    def note(self, loss: float) -> None:
        self.losses.append(loss)
        if self.is_known:
            self.mean, self.middle = fmean(self.losses), median(self.losses)


class Callers:
    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}
        self._counted: deque[tuple[float, str, int]] = deque(maxlen=COUNTED)
        """Of what was learned from: when, from whom, how many tokens."""
        self._passed_on: deque[tuple[float, str, int]] = deque(maxlen=COUNTED)
        """Of a stage in the middle: when, from whom, how many examples."""

    def counts(self, caller: str, loss: float, tokens: int, now: float) -> bool:
        """Whether to learn from a micro-batch. `loss`: of a token."""
        if self._is_worse(caller, loss, now) or not self._within_share(caller, tokens, now):
            return False
        self._counted.append((now, caller, tokens))
        return True

    def heard(self) -> dict[str, float]:
        """When each called last."""
        return {caller: each.heard_at for caller, each in self._callers.items()}

    def not_believed(self, now: float) -> list[str]:
        """Whose micro-batches are much worse than the others'."""
        known = self._known(now)
        middles = sorted(each.middle for each in known.values())
        at = (len(middles) - 1) // 2  # of the middle without one of them
        if at < 1:
            return []
        return sorted(
            caller for caller, each in known.items() if each.mean > WORSE * middles[at + (each.middle <= middles[at])]
        )

    def passes_on(self, caller: str, examples: int, evaluates: bool, now: float) -> bool:
        """Whether a stage in the middle sends a micro-batch to the next one."""
        found = self._callers.get(caller)
        if found and found.heard_at < now - HEARD_S:
            found = self._callers[caller] = _Caller(found.heard_at)
        if found and found.mean > WORSE * self._others(caller, now):
            return False
        if evaluates:
            return True
        known, taken = self._known(now), _taken(self._passed_on, now)
        usual = median_high([size for _, _, size in self._passed_on] or [examples])
        is_tried = not (found and found.is_known) and len(known) > 1
        if is_tried and taken[caller] >= LEAST * usual + TRIED * median(taken[each] for each in known):
            return False
        # the next stage counts losses of micro-batches, however small they are
        self._passed_on.append((now, caller, max(examples, usual)))
        return True

    def _is_worse(self, caller: str, loss: float, now: float) -> bool:
        others = self._others(caller, now)
        found = self._callers.get(caller) or _Caller()
        remember(self._callers, caller, found, MOST_CALLERS)
        found.note(min(loss, SINGLE * others))
        found.heard_at = now
        return loss > SINGLE * others or found.mean > WORSE * others

    def _others(self, caller: str, now: float) -> float:
        """What a token costs with the others: a few that are far lower or higher do not change it."""
        middles = [each.middle for other, each in self._known(now).items() if other != caller]
        return median_high(middles) if len(middles) > 1 else inf

    def _known(self, now: float) -> dict[str, _Caller]:
        """Of those who called lately."""
        since = now - HEARD_S
        return {caller: each for caller, each in self._callers.items() if each.is_known and each.heard_at >= since}

    def _within_share(self, caller: str, tokens: int, now: float) -> bool:
        taken = _taken(self._counted, now)
        taken[caller] += tokens
        usual = min(tokens, median_high([size for _, _, size in self._counted] or [tokens]))
        spare = usual * max(LEAST, sqrt(len(self._counted)) / 2)  # chance brings one more often than another
        here = [other for other, each in self._callers.items() if each.heard_at >= now - GONE_S and other != caller]
        others = [taken[other] for other in here if taken[other]]
        return not others or taken[caller] <= SHARE * median_high(others) + spare


def _taken(latest: deque[tuple[float, str, int]], now: float) -> Counter[str]:
    """What each got in the last SHARED_S; older entries are dropped."""
    while latest and latest[0][0] < now - SHARED_S:
        latest.popleft()
    taken = Counter[str]()
    for _, each, size in latest:
        taken[each] += size
    return taken
