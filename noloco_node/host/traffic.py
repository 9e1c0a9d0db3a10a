"""The traffic of swaps, state transfers and answers to look-ups: limited, and counted by the day.

All streams of a node share it. A sender waits *before* a message; a receiver waits before it asks for the *next*
message, and flow control slows down the other side. An answer to a look-up, whoever asks, waits for nothing: where
there were too many it is not given. What this node's own look-ups bring is not counted. Knows no frames and no
deadlines.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.latest import remember
from noloco_node.host.limits import TokenBucket, Used

SMALL_BYTES = 1024
"""Acknowledgements and keep-alives are counted, but wait for nothing: a partner's deadlines depend on them."""
PLACE_BYTES_S, SAVED_S = 128_000, 30.0
"""Of answers to look-ups, to all callers at one place (base/places.py): what 40 nodes there take that can ask this node
alone. Of 60 four answers in ten have no records, of 100 six; they still know most of each other (simulated). After a
pause as much as for so long: where many nodes start at once."""
SMALL_LATE_S = 10.0
"""A small answer is given though there were too many, up to so much: else ten places, asking for what is nowhere, had
twice what a volunteer with 64 kB/s allows, and a swap afterwards waited for as long as they had asked."""
MAX_PLACES = 4096
"""Remembered, those answered last."""
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
        answers_bytes_s: float | None = None,
    ) -> None:
        self._up = upload_bytes_s and TokenBucket(upload_bytes_s)
        self._down = download_bytes_s and TokenBucket(download_bytes_s)
        self._used = used or Used()
        self._day = day
        self._answers = answers_bytes_s and TokenBucket(answers_bytes_s, SAVED_S)
        self._to_places: dict[str, TokenBucket] = {}
        self._gives = asyncio.Lock()

    @property
    def used(self) -> Used:
        return self._used.plus(0, 0, self._day())

    async def sending(self, size_bytes: int) -> None:
        self._sent(size_bytes)
        if self._up and size_bytes > SMALL_BYTES:
            try:
                await _sleep(self._up.wait_s(asyncio.get_running_loop().time()))
            except asyncio.CancelledError:
                self._sent(-size_bytes)  # it is not: else who asks and hangs up, again and again, has all others wait
                raise

    async def giving(self, size_bytes: int) -> None:
        """The same, of what newcomers are given: one after the other. So a swap has every second turn, however many
        they are; beside twelve downloads it had a twenty-fifth of the upload."""
        async with self._gives:
            await self.sending(size_bytes)

    def may_answer(self, size_bytes: int, place: str) -> bool:
        """Whether an answer to a look-up may go to a caller at this place; then it is counted."""
        now = asyncio.get_running_loop().time()
        of_place = self._to_places.get(place) or TokenBucket(PLACE_BYTES_S, SAVED_S)
        buckets = [of_place, *([self._answers] if self._answers else [])]
        if any(bucket.wait_s(now) > (SMALL_LATE_S if size_bytes <= SMALL_BYTES else 0.0) for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.take(size_bytes, now)
        remember(self._to_places, place, of_place, MAX_PLACES)
        self._sent(size_bytes)
        return True

    async def receiving(self) -> None:
        if self._down:
            await _sleep(self._down.wait_s(asyncio.get_running_loop().time()))

    def _sent(self, size_bytes: int) -> None:
        self._used = self._used.plus(size_bytes, 0, self._day())
        if self._up:
            self._up.take(size_bytes, asyncio.get_running_loop().time())

    def received(self, size_bytes: int) -> None:
        self._used = self._used.plus(0, size_bytes, self._day())
        if self._down:
            self._down.take(size_bytes, asyncio.get_running_loop().time())


async def _sleep(wait_s: float) -> None:
    if wait_s > 0:
        await asyncio.sleep(wait_s)


def read_day(path: Path) -> Used:
    """Today's traffic, kept over restarts in a file of the home. A damaged file counts as no traffic: sending a little
    too much that day is better than not starting."""
    return atomic_files.read_json_or_set_aside(path, _checked, _MAX_FILE_BYTES, _LOST) or Used()


def write_day(path: Path, used: Used) -> None:
    """Raises DiskFull, UsageError."""
    atomic_files.write(path, json.dumps(asdict(used)) + "\n")


def _checked(found: object) -> Used:
    match found:
        case {"day": str(day), "sent": int(sent), "received": int(received)} if (
            0 <= sent <= _MOST_BYTES and 0 <= received <= _MOST_BYTES and not isinstance(sent or received, bool)
        ):
            return Used(day, sent, received)
    raise ValueError("it is not a day's traffic")
