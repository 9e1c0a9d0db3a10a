"""Where peers are that come over a relay: where a bootstrap node, which this node's user chose, sees them come from
(Mirror.Whence).

Another relay may say what it likes, and is not asked: who comes over it, or over one that has never answered, stands
with all such peers (RELAYED, base/places.py). An answer comes later than the stream that is asked about, and counts
from then on.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Collection

import grpc.aio

from noloco_node.base.latest import remember
from noloco_node.base.places import place_of
from noloco_node.errors import PeerLost
from noloco_node.transport.base import peer_faults
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorStub

MAX_KNOWN = 1024
MAX_ASKING = 8
_ANSWER_S = 3.0
_AGAIN_S = 60.0
"""When a relay is asked again: the peer may come from elsewhere then."""


class RelayedPlaces:
    def __init__(self, channel: Callable[[str], grpc.aio.Channel], bootstrap: Collection[str]) -> None:
        self._channel = channel
        self._bootstrap = bootstrap
        self._places: dict[tuple[str, str], tuple[str, float]] = {}
        """By relay and peer, and when to ask again; empty where the relay did not say."""
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}

    def place(self, far_end: FarEnd) -> str:
        return self._said(far_end.relay, far_end.peer) or far_end.place

    def met(self, far_end: FarEnd) -> None:
        """A stream with this peer has begun: ask its relay about it."""
        way, now = (far_end.relay, far_end.peer), asyncio.get_running_loop().time()
        asked = way in self._asking or (way in self._places and now < self._places[way][1])
        if far_end.relay in self._bootstrap and not asked and len(self._asking) < MAX_ASKING:
            self._asking[way] = asyncio.create_task(self._ask(*way))

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, relay: str, peer: str) -> None:
        try:
            said = await whence(self._channel(relay), peer)
            place = self._said(relay, peer) if said is None else said
            again = asyncio.get_running_loop().time() + _AGAIN_S
            remember(self._places, (relay, peer), (place, again), MAX_KNOWN)
        finally:
            del self._asking[relay, peer]

    def _said(self, relay: str, peer: str) -> str:
        return self._places.get((relay, peer), ("", 0.0))[0]


async def whence(relay: grpc.aio.Channel, peer: str) -> str | None:
    """In which place a relay sees a peer; empty where it does not say; None: it did not answer."""
    try:
        with peer_faults():
            reply = await MirrorStub(relay).Whence(pb.WhenceRequest(peer=peer), timeout=_ANSWER_S)
        return place_of(str(ipaddress.ip_network(reply.place).network_address)) if reply.place else ""
    except PeerLost:
        return None
    except ValueError:
        return ""
