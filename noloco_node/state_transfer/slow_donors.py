"""Whether to leave a donor that sends slowly for another one.

A chunk each half minute would else be progress for days. But where this node's own link is slow, all donors are, and
what came of one donor's version is worth nothing with another's. So a donor whose rest takes long is left

- for one that is known, if all of the state would take half as long there as the rest takes here;
- for one that is not known, as long as the rest takes longer than what is here took, and seldom: after a minute at slow
  donors, then after 4, 16, 64 minutes. So a crowd of slow donors costs an hour before the fourth other one is tried,
  and a slow link a part of what it takes anyway.

Pure: the time is an argument.
"""

from collections.abc import Collection

PACE_S, PACE_SHARE = 60.0, 1 / 10
"""A donor's rate is that of the last minute, or of the last tenth of its time where that is longer: a link that is slow
for a moment throws no hours away."""
LONG_S = 1800.0
"""A rest that takes less is waited for."""
TRIALS_GROW = 4


class SlowDonors:
    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        """Of those that were slow: bytes a second, as they were last."""
        self._slow_s = 0.0
        self._trial_s = PACE_S
        """After so long at slow donors another one is tried."""
        self._donor, self._others = "", frozenset[str]()
        self._began: float | None = None
        self._since = 0.0
        self._before = 0
        self.better: str | None = None
        """For which one the last donor was left; None: for one that is not known."""

    def begin(self, donor: str, others: Collection[str]) -> None:
        """To take the state of this donor; `others` may be asked instead."""
        self._donor, self._others, self._began = donor, frozenset(others), None

    def leaves(self, done_bytes: int, total_bytes: int, now: float) -> bool:
        """Something came."""
        if self._began is None:
            self._began, self._since, self._before = now, now, done_bytes
        lasted_s, paced_s = now - self._began, now - self._since
        if paced_s < max(PACE_S, PACE_SHARE * lasted_s):
            return False
        rate = max((done_bytes - self._before) / paced_s, 1e-9)
        self._since, self._before = now, done_bytes
        rest_s = (total_bytes - done_bytes) / rate
        if rest_s <= LONG_S:
            return False
        self._rates[self._donor] = rate
        self._slow_s += paced_s
        known = {other: self._rates[other] for other in self._others if other in self._rates}
        self.better = max(known, key=known.__getitem__, default=None)
        if self.better and 2 * total_bytes / known[self.better] < rest_s:
            return True
        self.better = None
        if self._slow_s < self._trial_s or rest_s < lasted_s or len(known) == len(self._others):
            return False
        self._trial_s = TRIALS_GROW * self._slow_s
        return True

    def failed(self, donor: str) -> None:
        """It did not send its state: what it had sent before says nothing any more."""
        self._rates.pop(donor, None)
        self.better = None if self.better == donor else self.better
