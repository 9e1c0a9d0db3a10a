"""The traffic of swaps and state transfers: limited to the volunteer's rates, and counted by the day.

All streams of a node share it. A sender waits *before* a message; a receiver waits before it asks for the *next*
message, and flow control slows down the other side. Presence records, a few kB a minute, are not counted. Knows no
frames and no deadlines.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.host.limits import TokenBucket, Used

SMALL_BYTES = 1024
"""Acknowledgements and keep-alives are counted, but wait for nothing: a partner's deadlines depend on them."""
_MAX_FILE_BYTES = 1024
_MOST_BYTES = 1 << 60
"""Of a day: no network of today carries more."""
_LOST = "today's traffic count restarts at 0"


def today() -> str:
    """The day in local time, because a daily quota counts from local midnight."""
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
        """Today's traffic."""
        return self._used.plus(0, 0, self._day())

    async def sending(self, size_bytes: int) -> None:
        self._used = self._used.plus(size_bytes, 0, self._day())
        if self._up:
            now = asyncio.get_running_loop().time()
            self._up.take(size_bytes, now)
            if size_bytes > SMALL_BYTES:
                await _sleep(self._up.wait_s(now))

    async def receiving(self) -> None:
        if self._down:
            await _sleep(self._down.wait_s(asyncio.get_running_loop().time()))

    def received(self, size_bytes: int) -> None:
        self._used = self._used.plus(0, size_bytes, self._day())
        if self._down:
            self._down.take(size_bytes, asyncio.get_running_loop().time())


async def _sleep(wait_s: float) -> None:
    if wait_s > 0:
        await asyncio.sleep(wait_s)


class DayTotals:
    """Today's traffic, kept over restarts in a file of the home. A damaged file counts as no traffic: sending a little
    too much that day is better than not starting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = Used()

    def read(self) -> Used:
        found = atomic_files.read_json_or_set_aside(self._path, _checked, _MAX_FILE_BYTES, _LOST)
        self._written = found or Used()
        return self._written

    def write(self, used: Used) -> None:
        """Raises DiskFull, UsageError."""
        if used == self._written:
            return
        document = {"day": used.day, "sent": used.sent, "received": used.received}
        atomic_files.write(self._path, json.dumps(document) + "\n")
        self._written = used


def _checked(found: object) -> Used:
    match found:
        case {"day": str(day), "sent": int(sent), "received": int(received)} if (
            0 <= sent <= _MOST_BYTES and 0 <= received <= _MOST_BYTES and not isinstance(sent or received, bool)
        ):
            return Used(day, sent, received)
    raise ValueError("it is not a day's traffic")
