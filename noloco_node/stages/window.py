"""How many micro-batches the first stage has under way at once: found by trying, as what hides the way to the other
stages and back depends on links and machines.

One more is tried where the stage had to wait for answers although all that may be under way were; it stays where more
micro-batches came through than before, else it is tried again after a while. Each lost micro-batch takes one away: a
full queue elsewhere loses them. A pure state machine; time is an argument.
"""

MOST = 16
"""Each holds its inputs here and its activations at the next stage, and is a step of staleness more."""
TRIAL_S = 4.0
"""How long micro-batches are counted before a number is judged."""
GAIN = 1.03
"""By so much more must come through."""
CALM_TRIALS = 30
"""Trials until a number that was not better is tried again."""


class Window:
    def __init__(self, start: int, fixed: bool = False) -> None:
        self.size = start
        self._fixed = fixed
        self._since: float | None = None
        self._through = 0
        self._waited = False
        self._rate = 0.0
        """Of the number before the one that is tried."""
        self._trying = False
        self._calm = 0

    def waited(self) -> None:
        """The stage had nothing to do, with all that may be under way."""
        self._waited = True

    def lost(self) -> None:
        if not self._fixed and self.size > 1:
            self.size -= 1
            self._trying, self._since = False, None

    def passed(self, now: float) -> None:
        """A micro-batch has come through."""
        if self._fixed:
            return
        if self._since is None:
            self._since, self._through, self._waited = now, 0, False
            return
        self._through += 1
        if now - self._since >= TRIAL_S and self._through > 2 * self.size:
            self._judge(self._through / (now - self._since))
            self._since = None

    def _judge(self, rate: float) -> None:
        self._calm = max(0, self._calm - 1)
        if self._trying and rate < GAIN * self._rate:
            self.size -= 1
            self._trying, self._calm = False, CALM_TRIALS
        elif self._waited and self.size < MOST and not self._calm:
            self.size += 1
            self._trying, self._rate = True, rate
        else:
            self._trying = False
