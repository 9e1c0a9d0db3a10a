"""This node among the peers of its run: publishes its record, looks up the others, keeps their addresses.

Connects the directory (peers/directory.py), the transport, which needs the addresses of peers, and the cache of peers
seen lately: the bootstrap nodes may be gone, or the swarm may be split. It does not know what the peers are needed for.
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc

from noloco_node.base.addresses import Address
from noloco_node.base.places import claimed, several
from noloco_node.base.states import NodeState
from noloco_node.base.units import span
from noloco_node.errors import NolocoError, SwarmUnreachable
from noloco_node.peers import rows, run_registry
from noloco_node.peers.cache import PeerCache
from noloco_node.peers.directory import REFUSED, REFUSED_REMEDY, SILENT, Directory
from noloco_node.peers.record import TTL_S, PeerRecord, Presence
from noloco_node.run.admission import Refuses, refuses_nobody
from noloco_node.views.status import Health

LOOK_S, LOOK_ALONE_S = 5.0, 1.0
"""How often the DHT is read; more often while there is nobody to meet."""
_SILENT_REMEDY = (
    "check this machine's connection. If it is right, the bootstrap nodes have gone or moved: join again with an "
    "invitation of today"
)
_UNSTORED_REMEDY = (
    "compare this machine's clock with that of the bootstrap nodes. If both are right, too many nodes have this "
    f"address: {REFUSED_REMEDY}"
)
CACHED_ANSWER_S, CACHED_ASKED = 5.0, 4
"""How long peers of the cache have to answer, and how many of them are asked at a time."""


class KnowsAddresses(Protocol):
    """The part of a transport that is used."""

    peer_id: str

    @property
    def p2p(self) -> Any: ...
    @property
    def can_be_called(self) -> bool: ...
    def channel(self, peer: str) -> grpc.aio.Channel: ...
    def introduce(self, peers: Mapping[str, Sequence[Address]]) -> None: ...
    def place_of(self, peer: str) -> str: ...


class Membership:
    """`changed` is called after each look-up of peers."""

    def __init__(
        self,
        transport: KnowsAddresses,
        cache: PeerCache,
        changed: Callable[[], None],
        refuses: Refuses = refuses_nobody,
    ) -> None:
        """`refuses`: who may not take part, and is left out."""
        self.seen: dict[str, PeerRecord] = {}
        """The other peers of this run, as of the last look-up."""
        self.published: str | None = None
        """The state in the last published record."""
        self._transport = transport
        self._cache = cache
        self._changed, self._refuses = changed, refuses
        self._directory: Directory | None = None
        self._unanswered: tuple[float, str] | None = None
        """The first look-up that was not answered, by the monotonic clock, and why the last was not; None: it was."""
        self._unstored_since: float | None = None
        """The first time that nobody stored this node's record."""

    @property
    def dht(self) -> Mapping[str, int]:
        """What the directory has done so far."""
        return dict(self._directory.done) if self._directory else {}

    @property
    def living(self) -> list[PeerRecord]:
        """Those whose records have not expired since the last look-up, as they do while look-ups fail."""
        return rows.living(self.seen.values(), time.time())

    @property
    def answered(self) -> bool:
        """Whether the last look-up says who is there."""
        return self._unanswered is None

    async def enter(self, directory: Directory) -> None:
        """Raises SwarmUnreachable."""
        self._directory = directory
        await directory.start()
        await self._call_cached(directory)

    async def publish(self, presence: Presence) -> None:
        if self._directory:
            self._unstored_since = self._unstored_since or time.monotonic()
            try:
                await self._directory.publish(presence)
                self.published = presence.state
            finally:
                if self._directory.stored:
                    self._unstored_since = None

    async def look(self) -> None:
        if self._directory:
            self._unanswered = since, _ = self._unanswered or (time.monotonic(), SILENT)
            found = await self._directory.peers()
            self._unanswered = (since, found.unanswered) if found.unanswered else None
            self.seen = {peer: seen for peer, seen in found.peers.items() if not self._refuses(peer, seen.admission)}
            self._transport.introduce({peer: record.addresses for peer, record in self.seen.items()})
            self._changed()

    async def others(self) -> Collection[PeerRecord]:
        """Those of a look-up now. Raises SwarmUnreachable where it says nothing of who is there."""
        await self.look()
        if self._unanswered and not self.seen:
            raise SwarmUnreachable(self._unanswered[1])
        return self.seen.values()

    def health(self, now: float) -> tuple[Health, ...]:
        """`now`: by the monotonic clock. What has lasted as long as a record lives."""
        since, why = self._unanswered or (now, SILENT)
        if (for_s := now - since) > TTL_S:
            text = f"network: for {span(for_s)} {why}, so this node finds nobody"
            remedy = REFUSED_REMEDY if why == REFUSED else _SILENT_REMEDY
        elif self._unstored_since and (for_s := now - self._unstored_since) > TTL_S:
            text = f"network: for {span(for_s)} no other node has stored this one's record, so nobody finds it"
            remedy = _UNSTORED_REMEDY
        else:
            return ()
        return (Health("warning", text, remedy),)

    def look_again_s(self, own_state: str, partners: Collection[str]) -> float:
        """A node that trains looks for others until it sees one of its partners train. To see some that pause or begin
        is not enough, nor one that says it trains: while it is the only one, it can hold this node's swap for long. Who
        is refused does not ask more often."""
        if self._unanswered and self._unanswered[1] == REFUSED:
            return LOOK_S
        trains = own_state == NodeState.TRAINING
        met = any(peer in partners and record.state == NodeState.TRAINING for peer, record in self.seen.items())
        return LOOK_ALONE_S if not self.seen or (trains and not met) else LOOK_S

    async def refresh_cache(self) -> None:
        """Call some cached peers that were not seen, and add those seen to the cache."""
        if self._directory:
            await self._call_cached(self._directory)
            met = {peer: self._transport.place_of(peer) for peer in self.seen}
            await asyncio.to_thread(self._cache.keep, [*self.seen.values()], met)  # it syncs the disk

    async def rejoin(self) -> None:
        """Enter the directory again, after another p2pd was started."""
        if self._directory:
            await self._directory.rejoin(self._transport.p2p, stores=self._transport.can_be_called)

    async def leave(self) -> None:
        if self._directory:
            await self._directory.leave()

    async def close(self) -> None:
        if self._directory:
            await self._directory.close()

    async def _answers(self, peer: str) -> bool:
        with suppress(NolocoError, TimeoutError):
            async with asyncio.timeout(CACHED_ANSWER_S):
                await run_registry.ask(self._transport.channel(peer))
                return True
        return False

    async def _call_cached(self, directory: Directory) -> None:
        known = self._cache.peers()
        absent = [peer for peer in known if peer not in self.seen and peer != self._transport.peer_id]
        places = {peer: claimed(peer, known[peer]) for peer in absent}
        chosen = several(random.Random(), places, CACHED_ASKED)
        self._transport.introduce({peer: known[peer] for peer in chosen})
        answers = await asyncio.gather(*map(self._answers, chosen))
        if there := [peer for peer, answered in zip(chosen, answers, strict=True) if answered]:
            await directory.connect(there)
