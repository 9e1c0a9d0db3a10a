"""A clock that a test moves on, so that a deadline is over when the test says so, and not when the machine stood still.

Timers of asyncio are due by it, too. What threads and gRPC's C code wait for is not: they have clocks of their own.
"""

import time

import pytest


class MovedClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, frozen: bool = False) -> None:
        """`frozen`: it goes only where it is moved."""
        self._ahead_s = 0.0
        for name in ("time", "monotonic"):
            real = getattr(time, name)
            began = real()

            def now(real=real, began=began) -> float:  # type: ignore[no-untyped-def]
                return (began if frozen else real()) + self._ahead_s

            monkeypatch.setattr(time, name, now)

    def moves(self, seconds: float) -> None:
        self._ahead_s += seconds
