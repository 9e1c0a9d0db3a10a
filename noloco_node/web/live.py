"""Server-sent events for the page: what changed in the views since its last event.

A page holds a state: status, peers, and the five series of the history. An event changes the last state into the
present one; the first one starts from an empty state. A series is sent as the number of first items that are gone, the
number of items after them that stay, and the new items. While no page listens, no view is built.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from noloco_node.views.documents import document, plain
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeerRow, PeersView
from noloco_node.views.status import StatusView

PERIOD_S = 1.0
HEARTBEAT_S = 10.0
"""A page that receives nothing for much longer knows that the node is gone, even if the connection does not break."""
LAST_S = 1.0
"""How long a node that ends waits for its pages to hear of it."""
MAX_LISTENERS = 8
"""A person's browser tabs and phones; each costs a few numbers a second."""

_SERIES = ("points", "pieces", "rates", "meetings", "said")


class NodeViews(Protocol):
    def status(self) -> StatusView: ...

    def peers(self) -> PeersView: ...

    def history(self) -> HistoryView: ...


@dataclass(frozen=True, slots=True)
class PageState:
    status: StatusView | None = None
    peers: PeersView | None = None
    history: HistoryView = field(default_factory=HistoryView)


_EMPTY = PageState()


class Live:
    def __init__(self, node: NodeViews) -> None:
        self._node = node
        self._state = _EMPTY
        self._state_at = -PERIOD_S
        self._latest = _EMPTY, _EMPTY, b""
        """What the last event changed into what, and the event."""
        self._ending, self._unheard = asyncio.Event(), asyncio.Event()
        self._unheard.set()
        self.listeners = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """For one listener, until it closes or the node ends: at most one event per PERIOD_S, and a last one."""
        self.listeners += 1
        self._unheard.clear()
        try:
            known, sent_at = _EMPTY, time.monotonic()
            is_last = False
            while not is_last:
                is_last, now = self._ending.is_set(), self._current()
                event, known = self._event(known, now), now
                if event:
                    sent_at = time.monotonic()
                    yield event
                elif time.monotonic() - sent_at >= HEARTBEAT_S:
                    sent_at = time.monotonic()
                    yield b"data: {}\n\n"
                if not is_last:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PERIOD_S):
                            await self._ending.wait()
        finally:
            self.listeners -= 1
            if not self.listeners:
                self._unheard.set()

    async def end(self) -> None:
        """Tell the listeners how the node ended: a short run may do its last rounds within a period."""
        self._state_at = -PERIOD_S
        self._ending.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._unheard.wait()

    def _current(self) -> PageState:
        """The state of now, built once for all listeners."""
        now = time.monotonic()
        if now - self._state_at >= PERIOD_S / 2:
            self._state = PageState(self._node.status(), self._node.peers(), self._node.history())
            self._state_at = now
        return self._state

    def _event(self, before: PageState, now: PageState) -> bytes:
        """Built once for all listeners that know `before`: of 2048 peers it takes 45 ms and 640 kB."""
        if self._latest[0] is not before or self._latest[1] is not now:
            event = changes(before, now)
            line = f"data: {json.dumps(event, allow_nan=False, separators=(',', ':'))}\n\n".encode() if event else b""
            self._latest = before, now, line
        return self._latest[2]


def changes(before: PageState, now: PageState) -> dict[str, Any]:
    """The event's content; empty if nothing changed."""
    event: dict[str, Any] = {}
    if now.status is not None and not (before.status and _ageless(now.status) == _ageless(before.status)):
        event["status"] = document(now.status)
    if now.peers is not None and not (before.peers and _only_older(before.peers, now.peers)):
        event["peers"] = document(now.peers)
    for series in _SERIES:
        items = getattr(now.history, series)
        gone, stay = _common(known := getattr(before.history, series), items)
        if gone or not stay == len(known) == len(items):
            event[series] = {"gone": gone, "stay": stay, "then": [plain(item) for item in items[stay:]]}
    named = before.history.names
    if fresh := {peer: name for peer, name in now.history.names.items() if peer not in named}:
        event["names"] = fresh
    return event


def _ageless(status: StatusView) -> StatusView:
    return replace(status, uptime_s=0.0)


def _only_older(before: PeersView, now: PeersView) -> bool:
    """Whether only time has passed: a page counts seconds by itself."""
    if len(before.peers) != len(now.peers) or before.runs != now.runs:
        return False
    return all(_is_only_older(old, new) for old, new in zip(before.peers, now.peers, strict=True))


def _is_only_older(old: PeerRow, new: PeerRow) -> bool:
    if (old.last_seen_s or 0.0) > (new.last_seen_s or 0.0) or old.quarantined_s < new.quarantined_s:
        return False
    is_over = old.quarantined_s > 0 and new.quarantined_s == 0
    return not is_over and replace(old, last_seen_s=new.last_seen_s, quarantined_s=new.quarantined_s) == new


def _common(before: Sequence[object], now: Sequence[object]) -> tuple[int, int]:
    """How many first items of `before` are gone in `now`, and how many after them `now` begins with."""
    gone = next((at for at, item in enumerate(before) if now and _same(item, now[0])), len(before))
    stay = 0
    while gone + stay < len(before) and stay < len(now) and _same(before[gone + stay], now[stay]):
        stay += 1
    return gone, stay


def _same(one: object, other: object) -> bool:
    return one is other or one == other
