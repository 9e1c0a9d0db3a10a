"""Whether this node may train, swap and send its state now, by its volunteer's limits.

Compares the settings with today's traffic and the clock. The arithmetic is in host/limits.py; node/trainer.py acts on
the answer. A `pause` is a mark in the home, so that a restart does not end it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from noloco_node.base import atomic_files
from noloco_node.base.units import size
from noloco_node.core.round import MAX_LAG
from noloco_node.errors import NolocoError
from noloco_node.host import limits
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.host.limits import DailyQuota
from noloco_node.host.traffic import Traffic, read_day, write_day
from noloco_node.views.status import Health, LastRound, Today

log = logging.getLogger(__name__)

SAVE_S = 10.0
"""How often the day's count is saved: a kill loses what came after."""
_RATES = ("--max-upload", "--max-download")


class Policy:
    def __init__(self, config: NodeConfig, home: Home, last_swap: Callable[[], LastRound | None]) -> None:
        self._hours = config.hours
        self._quota = DailyQuota(config.daily_upload, config.daily_download)
        self.max_upload, self.max_download = config.max_upload, config.max_download
        self._file = home.traffic
        self._saved = read_day(self._file)
        self._last_swap = last_swap
        answers = limits.for_answers(config.max_upload, config.daily_upload)
        self.traffic = Traffic(config.max_upload, config.max_download, self._saved, answers_bytes_s=answers)
        self._mark = home.pause_mark
        self._asked = self._asked_before = self._mark.exists()
        self._marking = threading.Lock()

    def pause(self) -> None:
        """At once; with `keep_mark` also after a restart."""
        self._asked = True

    def resume(self) -> None:
        self._asked = self._asked_before = False

    async def keep_mark(self) -> None:
        """In a thread, since a sync can take seconds."""
        await asyncio.to_thread(self._keep_mark)

    def _keep_mark(self) -> None:
        """Of a pause and a resume under way at the same time the later one counts, whichever thread comes first."""
        with self._marking:
            try:
                if self._asked:
                    atomic_files.write(self._mark, "", mode=0o600)
                else:
                    self._mark.unlink()
                    atomic_files.sync(self._mark.parent)
            except NolocoError as error:
                log.warning("this pause will not outlive the node: %s", error)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("the node will be paused at its next start, until %s goes: %s", self._mark, error.strerror)

    def held_back(self) -> str | None:
        """limits.PAUSED, limits.QUOTA or None, at this moment."""
        time.tzset()  # a laptop travels; the day of the quota follows, since this is asked each second
        now = time.localtime()
        return limits.held_back(
            asked=self._asked,
            hours=self._hours,
            minute=60 * now.tm_hour + now.tm_min,
            exhausted=self.exhausted() is not None,
        )

    def exhausted(self) -> str | None:
        """`upload` or `download` where another swap like the last one would exceed the day's quota."""
        last = self._last_swap()
        sent, received = (last.sent, last.received) if last else (0, 0)
        return self._quota.exhausted(self.traffic.used, sent, received)

    def room_to_send(self, size_bytes: int) -> bool:
        return self._quota.exhausted(self.traffic.used, sent=size_bytes) is None

    def room_to_give(self, state_bytes: int, reserved_bytes: int = 0) -> bool:
        """Half of a day's upload stays for swaps: anybody may ask for states, again and again. Where one takes more
        than that half, it may: else who joins a run of such nodes would find no donor."""
        half = (self._quota.sent or 0) // 2
        return self.room_to_send(state_bytes + reserved_bytes + (half if state_bytes <= half else 0))

    def room_to_receive(self, size_bytes: int) -> bool:
        return self._quota.exhausted(self.traffic.used, received=size_bytes) is None

    def pause_ends(self) -> str:
        """What a paused node waits for."""
        if self._asked or self._hours is None:
            return "`noloco-node resume`" + (" (paused before this start)" if self._asked_before else "")
        return f"{limits.clock(self._hours.begin)}, when its hours begin"

    def health(self, swaps_fit: bool, *, staged: bool = False) -> tuple[Health, ...]:
        """Warnings for `status`. `swaps_fit`: whether swaps end before MAX_LAG phases have passed. `staged`: this node
        holds a stage, which trains by what it sends."""
        return (*self._of_the_quota(staged), *(() if swaps_fit else (self._too_slow(),)))

    def _too_slow(self) -> Health:
        rates = self.max_upload, self.max_download
        own = [flag for flag, limit in zip(_RATES, rates, strict=True) if limit is not None]
        remedy = f"raise {' or '.join(own)}, or ask" if own else "ask"
        return Health(
            "warning",
            f"swaps do not fit: the last one was given up after {MAX_LAG} phases",
            f"{remedy} the run's author for longer phases",
        )

    def _of_the_quota(self, staged: bool) -> tuple[Health, ...]:
        way = self.exhausted() if self.held_back() == limits.QUOTA else None
        if way is None:
            return ()
        limit = self._quota.sent if way == "upload" else self._quota.received
        follows = "this stage neither trains nor answers others" if staged else "training goes on without swaps"
        text = f"another swap would exceed the daily {way} of {size(limit)}: {follows} until midnight"
        return (Health("warning", text, f"wait, or allow more with --daily-{way}"),)

    def today(self) -> Today:
        used = self.traffic.used
        return Today(used.sent, used.received, self._quota.sent, self._quota.received)

    async def write_down(self) -> None:
        """Save today's traffic for the next start; in a thread, since a sync can take seconds."""
        try:
            if (used := self.traffic.used) != self._saved:
                await asyncio.to_thread(write_day, self._file, used)
                self._saved = used
        except NolocoError as error:
            log.debug("today's traffic is not saved: %s", error)
