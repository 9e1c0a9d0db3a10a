"""What has changed since a page last heard: server-sent events out of views.

A page holds a picture: status, peers, and the five series of the history. An event is what turns the picture before
into the one of now, and the first one begins from nothing. A series is told as how many of its first items are gone,
how many after them stay, and what follows. Nothing is looked at while nobody listens.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from noloco_node.views.documents import document, plain
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeersView
from noloco_node.views.status import StatusView

PERIOD_S = 1.0
HEARTBEAT_S = 10.0
"""A page that hears nothing for much longer knows that the node is gone, also where no connection breaks."""
MAX_LISTENERS = 8
"""A person's tabs and telephones; each costs the encoding of a few numbers a second."""

_SERIES = ("points", "pieces", "rates", "meetings", "said")


class Watched(Protocol):
    def status(self) -> StatusView: ...

    def peers(self) -> PeersView: ...

    def history(self) -> HistoryView: ...


@dataclass(frozen=True, slots=True)
class PageState:
    status: StatusView | None = None
    peers: PeersView | None = None
    history: HistoryView = field(default_factory=HistoryView)


class Live:
    def __init__(self, node: Watched) -> None:
        self._node = node
        self._picture = PageState()
        self._taken = -PERIOD_S
        self.listeners = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One event a PERIOD_S at most, for one listener, as long as it listens."""
        self.listeners += 1
        try:
            known, spoke = PageState(), time.monotonic()
            while True:
                now = self._look()
                if told := change(known, now):
                    known, spoke = now, time.monotonic()
                    yield f"data: {json.dumps(told, allow_nan=False, separators=(',', ':'))}\n\n".encode()
                elif time.monotonic() - spoke >= HEARTBEAT_S:
                    spoke = time.monotonic()
                    yield b"data: {}\n\n"
                await asyncio.sleep(PERIOD_S)
        finally:
            self.listeners -= 1

    def _look(self) -> PageState:
        """One look for everybody who listens."""
        now = time.monotonic()
        if now - self._taken >= PERIOD_S / 2:
            self._picture = PageState(self._node.status(), self._node.peers(), self._node.history())
            self._taken = now
        return self._picture


def change(before: PageState, now: PageState) -> dict[str, Any]:
    """What is to be told; empty when there is nothing."""
    told: dict[str, Any] = {}
    if now.status is not None and not (before.status and _ageless(now.status) == _ageless(before.status)):
        told["status"] = document(now.status)
    if now.peers is not None and not (before.peers and _only_older(before.peers, now.peers)):
        told["peers"] = document(now.peers)
    for series in _SERIES:
        items = getattr(now.history, series)
        gone, stay = _common(known := getattr(before.history, series), items)
        if gone or not stay == len(known) == len(items):
            told[series] = {"gone": gone, "stay": stay, "then": [plain(item) for item in items[stay:]]}
    named = before.history.names
    if fresh := {peer: name for peer, name in now.history.names.items() if peer not in named}:
        told["names"] = fresh
    return told


def _ageless(status: StatusView) -> StatusView:
    return replace(status, uptime_s=0.0)


def _only_older(before: PeersView, now: PeersView) -> bool:
    """Whether nothing but time has passed: a page counts seconds by itself."""
    if len(before.peers) != len(now.peers) or before.runs != now.runs:
        return False
    return all(
        (old.last_seen_s or 0.0) <= (new.last_seen_s or 0.0) and replace(old, last_seen_s=new.last_seen_s) == new
        for old, new in zip(before.peers, now.peers, strict=True)
    )


def _common(before: Sequence[object], now: Sequence[object]) -> tuple[int, int]:
    """How many of the first items before are gone now, and how many that follow are what now begins with."""
    gone = next((at for at, item in enumerate(before) if now and _same(item, now[0])), len(before))
    stay = 0
    while gone + stay < len(before) and stay < len(now) and _same(before[gone + stay], now[stay]):
        stay += 1
    return gone, stay


def _same(one: object, other: object) -> bool:
    return one is other or one == other
