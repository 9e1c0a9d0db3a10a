"""Runs a function again and again; after an expected failure it is logged and the wait grows.

The caller names the exceptions that are expected; any other is a bug and ends the task group.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MAX_BACKOFF = 8
"""The longest wait after failures, in periods."""
LOOK_S = 1.0
"""How soon a period that has become shorter counts."""


async def every(
    period_s: Callable[[], float], duty: Callable[[], Awaitable[None]], survives: tuple[type[Exception], ...]
) -> None:
    """Run `duty` for ever, `period_s()` apart; failures in `survives` double the wait up to MAX_BACKOFF times."""
    backoff = 1
    while True:
        try:
            await duty()
            backoff = 1
        except survives as error:
            log.debug("%s failed, next try in %g s: %r", duty.__qualname__, period_s() * backoff, error)
            backoff = min(2 * backoff, MAX_BACKOFF)
        waited_s = 0.0
        while (left_s := period_s() * backoff - waited_s) > 0:
            await asyncio.sleep(min(left_s, LOOK_S))
            waited_s += LOOK_S
