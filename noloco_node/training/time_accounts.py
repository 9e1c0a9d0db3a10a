"""Where the training thread's time goes: every second between start and stop to exactly one account.

What is done within something else (a correction that is added while the thread waits) counts for itself alone, so the
accounts add up to the time that has passed. Knows no torch: on a GPU, what is still running when a call returns counts
for whatever waits for it, which is the next step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ACCOUNTS = ("step", "data", "boundary", "apply", "evaluate", "sample", "checkpoint", "waiting", "paused", "other")
"""`step`: forward, backward and AdamW; `data`: reading a batch, and waiting for it; `sample`: the sample text;
`checkpoint`: copying the state, for a joining node too; `waiting`: for a partner, with blocking overlap, or for memory
of the GPU; `paused`: by the volunteer."""
STALL = ("boundary", "apply")
"""The training time that a round takes."""


class TimeAccounts:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = dict.fromkeys(ACCOUNTS, 0.0)
        self._account = "other"
        self._since = 0.0
        self._running = False

    def start(self) -> None:
        self._running, self._since = True, self._clock()

    def stop(self) -> None:
        self._settle()
        self._running = False

    @contextmanager
    def on(self, account: str) -> Iterator[None]:
        before = self._turn_to(account)
        try:
            yield
        finally:
            self._turn_to(before)

    def so_far(self) -> dict[str, float]:
        self._settle()
        return dict(self._spent_s)

    def stall_s(self) -> float:
        return sum(self._spent_s[account] for account in STALL)

    def _turn_to(self, account: str) -> str:
        self._settle()
        before, self._account = self._account, account
        return before

    def _settle(self) -> None:
        now = self._clock()
        if self._running:
            self._spent_s[self._account] += now - self._since
        self._since = now
