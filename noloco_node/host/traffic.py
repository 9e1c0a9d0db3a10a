"""The one account of what swaps and state transfers send and take: held at the volunteer's rates, counted by the day.

All of a node's streams share it. Who sends waits *before* a message goes; who reads waits before it asks for the *next*
message, so that the sender is held by flow control and by nothing else. Presence, a few kB a minute, is not
counted. It knows no frames and no deadlines.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from noloco_node.host.limits import TokenBucket, Used

SMALL_BYTES = 1024
"""Acknowledgements and signs of life are paid for, but wait for nothing: a partner's deadlines hang on them."""


class Pace(Protocol):
    """What a stream asks of it."""

    async def sending(self, size_bytes: int) -> None:
        """Returns when a message of this size may go."""

    async def taking(self) -> None:
        """Returns when a message may be taken."""

    def took(self, size_bytes: int) -> None: ...


def today() -> str:
    """The day by the local clock, which is the one that a quota is meant by."""
    return time.strftime("%Y-%m-%d")


class Traffic:
    def __init__(
        self,
        upload_bytes_s: float | None = None,
        download_bytes_s: float | None = None,
        used: Used | None = None,
        day: Callable[[], str] = today,
    ) -> None:
        self._up = upload_bytes_s and TokenBucket(upload_bytes_s)
        self._down = download_bytes_s and TokenBucket(download_bytes_s)
        self._used = used or Used()
        self._day = day

    @property
    def used(self) -> Used:
        """Today's."""
        return self._used.plus(0, 0, self._day())

    async def sending(self, size_bytes: int) -> None:
        self._used = self._used.plus(size_bytes, 0, self._day())
        if self._up:
            now = asyncio.get_running_loop().time()
            self._up.take(size_bytes, now)
            if size_bytes > SMALL_BYTES:
                await _sleep(self._up.wait_s(now))

    async def taking(self) -> None:
        if self._down:
            await _sleep(self._down.wait_s(asyncio.get_running_loop().time()))

    def took(self, size_bytes: int) -> None:
        self._used = self._used.plus(0, size_bytes, self._day())
        if self._down:
            self._down.take(size_bytes, asyncio.get_running_loop().time())


async def _sleep(wait_s: float) -> None:
    if wait_s > 0:
        await asyncio.sleep(wait_s)
