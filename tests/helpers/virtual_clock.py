"""An event loop whose time is simulated: when nothing is ready, its clock jumps to the next timer.

Thousands of simulated seconds pass in milliseconds, and the order of events depends on nothing but the program: no wall
clock is read. The condition: everything in the program waits by the loop (`asyncio.sleep`, `loop.call_at`, futures).
Real sockets and threads may be used, but the simulated clock does not wait for them while a timer is pending.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from patience import PATIENCE

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_S = 20_000.0
"""Simulated seconds of a test: one whose end never comes fails then."""
_STALL_S = 60.0 * PATIENCE
"""Real seconds without a timer or an event: longer than any work in a thread that a simulation waits for."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Threads end in real time: the limit that Python sets from 3.12 on would be over at once."""
        await super().shutdown_default_executor()

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """asyncio asks its selector to wait until the next timer is due; this one lets the clock jump there instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return self._wait_for_threads()
        if timeout <= 0:
            return []  # callbacks are ready: they run first, and an event that waits is found in the next pass
        events = super().select(0)
        if not events:
            self._loop.advance(timeout)
        return events

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(_STALL_S)
        if not events:
            raise RuntimeError("the simulation is stuck: every task waits for something that nothing will ever do")
        return events


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in simulated time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test in simulated time; its fixtures are in real time. It waits for no thread, as its own limit is a timer that
    is always pending. What it leaves under way ends with its event loop."""

    @wraps(test)
    def run(*given: P.args, **named: P.kwargs) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(_LONGEST_S):
                await test(*given, **named)

        run_virtual(in_time())

    return run
