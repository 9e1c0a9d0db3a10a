"""Keeps a small duty going: do it, wait, do it again; a failure of the outside world is logged and the wait grows.

What may fail is named by the caller; anything else is a bug and ends the task group that holds the duty.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MAX_BACKOFF = 8
"""A duty that keeps failing is still tried at this many times its period."""


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
        await asyncio.sleep(period_s() * backoff)
