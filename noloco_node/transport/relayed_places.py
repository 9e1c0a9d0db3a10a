"""Where peers are that come over a relay: where the relay sees them come from (Mirror.Whence), if it is believed.

A relay may say what it likes, so it speaks for few places only, unless it is a bootstrap node, which this node's user
chose. Who comes over a relay that does not answer, or speaks for others already, stands with the relay itself. An
answer comes later than the stream that is asked about, and counts from then on.
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

MAX_PLACES = 4
"""For which a relay speaks that is no bootstrap node, by the relay's own place."""
MAX_KNOWN = 1024
MAX_ASKING = 8
_ANSWER_S = 3.0
_AGAIN_S = 60.0
"""When a relay is asked again that did not answer."""


class RelayedPlaces:
    def __init__(self, channel: Callable[[str], grpc.aio.Channel], trusted: Collection[str]) -> None:
        """`trusted`: the bootstrap nodes."""
        self._channel = channel
        self._trusted = trusted
        self._places: dict[tuple[str, str], str] = {}
        """By relay and peer; empty where the relay did not say."""
        self._relays: dict[tuple[str, str], None] = {}
        """Each relay that is no bootstrap node, with every place in which it was seen."""
        self._ask_again: dict[tuple[str, str], float] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}

    def place(self, far_end: FarEnd) -> str:
        way = far_end.relay, far_end.peer
        said = self._places.get(way, "") if far_end.relay else ""
        return said or far_end.place

    def met(self, far_end: FarEnd) -> None:
        """A stream with this peer has begun: ask its relay about it."""
        way, now = (far_end.relay, far_end.peer), asyncio.get_running_loop().time()
        known = self._places.get(way) or now < self._ask_again.get(way, now)
        if far_end.relay and not known and way not in self._asking and len(self._asking) < MAX_ASKING:
            self._asking[way] = asyncio.create_task(self._ask(far_end))

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, far_end: FarEnd) -> None:
        way = far_end.relay, far_end.peer
        try:
            place = await whence(self._channel(far_end.relay), far_end.peer)
            if place and far_end.relay not in self._trusted:  # so it divides peers, and equals nobody's real place
                place = f"{place}, as {far_end.place} says"
            remember(self._places, way, place if self._is_believed(far_end, place) else "", MAX_KNOWN)
            remember(self._ask_again, way, asyncio.get_running_loop().time() + _AGAIN_S, MAX_KNOWN)
        finally:
            del self._asking[way]

    def _is_believed(self, far_end: FarEnd, place: str) -> bool:
        if far_end.relay in self._trusted:
            return True
        remember(self._relays, (far_end.relay, far_end.place), None, MAX_KNOWN)
        there = {relay for relay, seen_in in self._relays if seen_in == far_end.place}  # its ids are free
        others = {said for (relay, _), said in self._places.items() if relay in there and said}
        return place in others or len(others) < MAX_PLACES


async def whence(relay: grpc.aio.Channel, peer: str) -> str:
    """In which place a relay sees a peer; empty where it does not say."""
    try:
        with peer_faults():
            reply = await MirrorStub(relay).Whence(pb.WhenceRequest(peer=peer), timeout=_ANSWER_S)
        network = ipaddress.ip_network(reply.place) if reply.place else None
    except (PeerLost, ValueError):
        return ""
    return "" if network is None else place_of(str(network.network_address))
