"""Asks the node for its views, over one connection that is made again whenever it breaks.

The history is long, so it is fetched only when the status shows that something happened, and every HISTORY_S for the
log's lines; between two fetches, traffic comes from the status.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from noloco_node.control import socket_client
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import NolocoError, NoNodeRunning
from noloco_node.host.home import Home
from noloco_node.terminal.picture import Absence, Picture
from noloco_node.views.history import HistoryView, Rate
from noloco_node.views.status import StatusView, Today

HISTORY_S = 5.0
"""The largest age of the shown log lines."""
_RATES = 300


class Poller:
    """`changed` is called after each answer, and when the node stops answering."""

    def __init__(self, home: Home, every_s: float, changed: Callable[[], None]) -> None:
        self.picture: Picture | None = None
        self.node: ControlClient | None = None
        """None while it does not answer."""
        self._home, self._every_s, self._changed = home, every_s, changed
        self._traffic = _Traffic()
        self._history = HistoryView()
        self._history_at = 0.0
        self._key: object = None

    async def first(self) -> Picture:
        """One picture. Raises NolocoError if the node does not answer."""
        return await socket_client.ask(self._home, self._ask)

    async def keep(self) -> NoReturn:
        """Until it is cancelled."""
        while True:
            try:
                async with socket_client.connected(self._home) as self.node:
                    self._history_at = 0.0  # another node may run there now
                    while True:
                        await self._ask(self.node)
                        self._changed()
                        await asyncio.sleep(self._every_s)
            except NolocoError as error:
                self._miss(error)
            finally:
                self.node = None
            self._changed()
            await asyncio.sleep(self._every_s)

    async def _ask(self, node: ControlClient) -> Picture:
        status, now = await node.status(), time.time()
        peers = await node.peers()
        if _history_key(status) != self._key or not 0 <= now - self._history_at < HISTORY_S:
            self._history = await node.history()
            self._key, self._history_at = _history_key(status), now
        rates = self._traffic.after(self._history.rates, status, now)
        self.picture = Picture(status, peers, self._history, rates, now)
        return self.picture

    def _miss(self, error: NolocoError) -> None:
        why: Absence = "silent"
        if isinstance(error, NoNodeRunning):
            why = "gone" if self._home.holder() is None else "changing"
        if self.picture:
            self.picture = replace(self.picture, absence=why)


class _Traffic:
    """Bytes per second: the node's own series, continued by the differences of the day's counters, as it makes it."""

    def __init__(self) -> None:
        self._since: deque[Rate] = deque(maxlen=_RATES)
        self._before: tuple[float, int, int, str] | None = None

    def after(self, known: tuple[Rate, ...], status: StatusView, now: float) -> tuple[Rate, ...]:
        day = status.today or Today()
        sent, received = day.sent, day.received
        before, self._before = self._before, (now, sent, received, status.peer_id)
        if before and before[3] == status.peer_id and before[0] < now and before[1] <= sent and before[2] <= received:
            passed = now - before[0]
            self._since.append(Rate(now, (sent - before[1]) / passed, (received - before[2]) / passed))
        else:
            self._since.clear()
        last = known[-1].at if known else 0.0
        return (*known, *(rate for rate in self._since if rate.at > last))


def _history_key(status: StatusView) -> object:
    """Changes whenever the history has something new."""
    ended = status.rounds.committed, status.rounds.solo
    return status.peer_id, status.run_id, status.state, status.round, ended, status.eval_loss, status.last_error
