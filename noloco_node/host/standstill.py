"""Notices that this process stood still: stopped by a signal, or with its whole machine, as a laptop that sleeps."""

import time
from collections.abc import Callable

LOOK_S, LONG_S = 1.0, 60.0
"""How often to look, and how long a standstill must be to count: as long as a presence record lives, so that whatever
was known of others is out of date. Nothing holds up the event loop for so long."""


def clock() -> float:
    """In seconds, which nobody sets. A machine's sleep counts, too: for `time.monotonic` it does not, on most."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Standstill:
    def __init__(self, clock: Callable[[], float] = clock) -> None:
        self._clock = clock
        self._looked_at = clock()

    def is_over(self) -> bool:
        """Whether this process stood still since the last call. To be called every LOOK_S."""
        before, self._looked_at = self._looked_at, self._clock()
        return self._looked_at - before > LONG_S
