"""Which peers answer: a presence record counts once somebody with its key has answered at its addresses.

A record proves that somebody has a key, and keys cost nothing. So each peer that is new is called once; one that called
this node has answered, too. Calls are short and few at a time. Whom to call next is drawn first among the nodes of the
DHT that told us of peers, then among places: a node that makes up a thousand records gets no more than its share of the
calls. A peer that does not answer is called again later and later, one that did after ten minutes without a stream.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from noloco_node.base.addresses import Address
from noloco_node.base.latest import remember
from noloco_node.base.places import claimed, draw, several
from noloco_node.peers.record import PeerRecord

AT_ONCE = 32
"""Calls under way: 500 dead addresses are tried within a minute, where each swallows its call for ANSWER_S."""
ANSWER_S = 3
PATIENCE_S = 1.0
"""How long a look-up waits for the peers that it found: on a good way they answer sooner."""
ENOUGH, FEW = 24, 4
"""With so many that answer, few new ones are called at each look-up: the work does not grow with the swarm."""
AGAIN_S, AGAIN_MOST_S = 5.0, 300.0
"""After which time a peer that did not answer is called again, the first time and at the most."""
CHECK_S = 600.0
MAX_REMEMBERED = 4096
MAX_WAITING, MAX_TELLERS = 128, 64
"""Peers of one node of the DHT that wait for their call, and such nodes."""


class Reaches(Protocol):
    """The part of a transport that is used."""

    async def reaches(self, peer: str, addresses: Sequence[Address], within_s: int) -> bool: ...
    def met_at(self, peer: str) -> float | None:
        """When the last stream with a peer began, by the event loop's clock."""


class _Known(NamedTuple):
    answered_at: float | None = None
    failed_at: float = -1.0
    failures: int = 0
    """In a row."""


class Answering:
    def __init__(self, transport: Reaches, rng: random.Random | None = None) -> None:
        self._transport = transport
        self._rng = rng or random.Random()
        self._known: dict[str, _Known] = {}
        """The one asked about longest ago first."""
        self._waiting: dict[str, dict[str, PeerRecord]] = {}
        """Peers to call, by the node of the DHT that told us of them."""
        self._calls: dict[str, asyncio.Task[None]] = {}

    def answered(self, peer: str) -> bool:
        known = self._look_up(peer)
        return known.answered_at is not None and known.answered_at > known.failed_at

    def failed(self, peer: str) -> bool:
        known = self._look_up(peer)
        return known.failures > 0 and not self.answered(peer)

    async def ask(self, told: Mapping[str, Mapping[str, PeerRecord]]) -> None:
        """Call those that are due, of peers by who told us of them; wait for a part of them only."""
        now = asyncio.get_running_loop().time()
        enough = sum(map(self.answered, {peer for peers in told.values() for peer in peers})) >= ENOUGH
        for teller, peers in told.items():
            due = {peer: record for peer, record in peers.items() if self._is_due(peer, now)}
            if enough:
                few = several(self._rng, {peer: claimed(peer, record.addresses) for peer, record in due.items()}, FEW)
                due = {peer: due[peer] for peer in few}
            if due and (teller in self._waiting or len(self._waiting) < MAX_TELLERS):
                waiting = self._waiting.get(teller, {}) | due
                first = sorted(waiting, key=self._failures)[:MAX_WAITING]
                self._waiting[teller] = {peer: waiting[peer] for peer in first}
        self._call_next()
        await self._settled(now + PATIENCE_S)

    def close(self) -> None:
        self._waiting.clear()
        for call in self._calls.values():
            call.cancel()

    async def _settled(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while self._calls and (left := until - loop.time()) > 0:
            await asyncio.wait(self._calls.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _call_next(self) -> None:
        while self._waiting and len(self._calls) < AT_ONCE:
            teller = self._rng.choice(sorted(self._waiting))
            waiting = self._waiting[teller]
            least = min(map(self._failures, waiting))
            first = {
                peer: claimed(peer, record.addresses)
                for peer, record in waiting.items()
                if self._failures(peer) == least
            }
            peer = draw(self._rng, first)
            record = waiting.pop(peer)
            if not waiting:
                del self._waiting[teller]
            if peer not in self._calls and self._is_due(peer, asyncio.get_running_loop().time()):
                self._calls[peer] = asyncio.create_task(self._call(record))

    async def _call(self, record: PeerRecord) -> None:
        peer, now = record.peer_id, asyncio.get_running_loop().time
        try:
            there = await self._transport.reaches(peer, record.addresses, ANSWER_S)
            known = self._look_up(peer)
            self._remember(
                peer, _Known(now()) if there else known._replace(failed_at=now(), failures=known.failures + 1)
            )
        finally:
            del self._calls[peer]
        self._call_next()

    def _failures(self, peer: str) -> int:
        return self._known[peer].failures if peer in self._known else 0

    def _is_due(self, peer: str, now: float) -> bool:
        known = self._look_up(peer)
        if self.answered(peer):
            return known.answered_at is None or now > known.answered_at + CHECK_S
        wait = min(AGAIN_MOST_S, AGAIN_S * 2.0 ** min(known.failures - 1, 16))
        return not known.failures or now > known.failed_at + wait

    def _look_up(self, peer: str) -> _Known:
        known, met = self._known.get(peer, _Known()), self._transport.met_at(peer)
        if met is not None and (known.answered_at is None or met > known.answered_at):
            known = _Known(met) if met > known.failed_at else known._replace(answered_at=met)
        if peer in self._known or known.answered_at is not None:
            self._remember(peer, known)
        return known

    def _remember(self, peer: str, known: _Known) -> None:
        remember(self._known, peer, known, MAX_REMEMBERED)
