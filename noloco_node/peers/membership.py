"""Who else is there: this node's place among the peers of its run, what it says of itself, and whom it sees.

Joins the directory (peers/directory.py), the transport, which is told where peers can be reached, and the cache of
those who were there once: all others may be gone, or live on an island of their own. It does not know what anybody is
wanted for.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc

from noloco_node.peers import run_registry
from noloco_node.peers.cache import PeerCache
from noloco_node.peers.directory import Directory
from noloco_node.peers.record import PeerRecord, Presence

FRIENDS_ANSWER_S, FRIENDS = 5.0, 4
"""How long those of the cache have to answer, and how many of them are asked at a time."""


class KnowsAddresses(Protocol):
    """What is needed of the transport."""

    peer_id: str

    @property
    def p2p(self) -> Any: ...
    def channel(self, peer: str) -> grpc.aio.Channel: ...
    def introduce(self, peers: Mapping[str, Sequence[str]]) -> None: ...


class Membership:
    """`changed` is called whenever it was looked who is there."""

    def __init__(self, ways: KnowsAddresses, friends: PeerCache, changed: Callable[[], None]) -> None:
        self.seen: dict[str, PeerRecord] = {}
        """The others of this run, as they were looked up last."""
        self.published: str | None = None
        """The state that others were told last."""
        self._ways = ways
        self._friends = friends
        self._changed = changed
        self._swarm: Directory | None = None

    async def enter(self, swarm: Directory) -> None:
        """Raises SwarmUnreachable."""
        self._swarm = swarm
        await swarm.start()
        await self._look_up_friends(swarm)

    async def publish(self, standing: Presence) -> None:
        if self._swarm:
            await self._swarm.publish(standing)
            self.published = standing.state

    async def look(self) -> None:
        if self._swarm:
            self.seen = await self._swarm.peers()
            self._ways.introduce({peer: record.addresses for peer, record in self.seen.items()})
            self._changed()

    async def keep_friends(self) -> None:
        """Some who were there once and are out of sight are looked up; who is there now is written down."""
        if self._swarm:
            await self._look_up_friends(self._swarm)
            await asyncio.to_thread(self._friends.keep, [*self.seen.values()])  # it syncs the disk

    async def rejoin(self) -> None:
        """Over another p2pd."""
        if self._swarm:
            await self._swarm.rejoin(self._ways.p2p)

    async def goodbye(self) -> None:
        if self._swarm:
            await self._swarm.goodbye()

    async def close(self) -> None:
        if self._swarm:
            await self._swarm.close()

    async def _look_up_friends(self, swarm: Directory) -> None:
        known = self._friends.peers()
        absent = [peer for peer in known if peer not in self.seen and peer != self._ways.peer_id]
        chosen = random.sample(absent, min(FRIENDS, len(absent)))
        self._ways.introduce({peer: known[peer] for peer in chosen})
        calls = {peer: asyncio.create_task(run_registry.ask(self._ways.channel(peer))) for peer in chosen}
        try:
            if calls:
                await asyncio.wait(calls.values(), timeout=FRIENDS_ANSWER_S)
            there = [peer for peer, call in calls.items() if call.done() and call.exception() is None]
        finally:
            for call in calls.values():
                call.cancel()
        if there:
            await swarm.meet(there)
