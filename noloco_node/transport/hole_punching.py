"""A direct way between two nodes behind routers, so that their relay does not carry what they swap.

A router lets in what answers a packet that it sent out. So both nodes dial at the same moment, each where their relay
sees the other: each one's own packets make its router let the other's in. This is done over QUIC: p2pd sends to all
from the UDP port that it listens at, and most routers use one port of their own for all that a host sends from one. A
symmetric router does not; and one without a firewall of its own takes the other's first packet as meant for itself, if
that comes before our own has gone out. Such nodes stay with the relay. Over TCP it would take dials from the port that
p2pd listens at, which fail where they cross: see `p2pd/process.py`.

libp2p's own protocol for it, DCUtR, begins when four peers in different places agree where they see this node, which in
a small swarm never happens. p2pd dials no second connection to a peer, so this comes before one over the relay, and
again when that has ended, after half an hour.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from noloco_node.base.addresses import QUIC, Address, parse
from noloco_node.base.identity import is_peer_id
from noloco_node.base.latest import remember
from noloco_node.base.places import place_of
from noloco_node.errors import PeerLost, UsageError
from noloco_node.transport.base import peer_faults
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import HolePunchingServicer, HolePunchingStub

WITHIN_S = 2
"""A call waits for it, and then goes over the relay. It takes two round trips to the relay and one to the peer."""
AGAIN_S, ASK_AGAIN_S = 600.0, 60.0
"""When it is tried again with a peer that was dialled in vain, and with one for which the relay arranged nothing."""
MOST_DIALS, AN_HOUR, OF_PLACE_AN_HOUR, OF_PLACE, PLACE_S = 8, 40, 8, 4, 240.0
"""At a relay's word: at the same time; in vain, in an hour; of one place in an hour, and in this time. After 100 dials
of which fewer than 5 reach somebody p2pd takes UDP for blocked."""
_HOUR_S = 3600.0
MOST_ARRANGED, ARRANGED_OF_PLACE = 32, 4
"""That a relay arranges at the same time, over all callers, and of one place."""
_MOST_KNOWN = 1024


class HolePunching(HolePunchingServicer):
    def __init__(
        self,
        relays: Collection[str],
        channel: Callable[[str], grpc.aio.Channel],
        far_end: Callable[[Any], FarEnd],
        control: Callable[[], P2pdControl],
    ) -> None:
        """`relays`: at whose word this node dials, and so shows its address. It arranges for others in any case."""
        self._relays = relays
        self._channel = channel
        self._far_end = far_end
        self._control = control
        self._not_before: dict[str, float] = {}
        """By peer."""
        self._own, self._told = _InVain(), _InVain()
        """Dials for a call of this node, and for others'."""
        self._arranged: Counter[str] = Counter()
        """Under way, by place."""
        self._dials: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for dial in self._dials:
            dial.cancel()

    async def connect(self, peer: str, known: Sequence[Address]) -> None:
        """Be connected directly to a peer that has one of this node's relays among its known addresses, if there is no
        connection and the relay sees both over QUIC. A record may name anybody else as its relay, who is not asked."""
        now = asyncio.get_running_loop().time()
        relays = [way.relay for way in known if way.relay in self._relays and way.relay != peer]
        if not relays or now < self._not_before.get(peer, now):
            return
        with suppress(OSError, PeerLost, UsageError):
            async with asyncio.timeout(WITHIN_S):
                control = self._control()
                if await control.find_connected(peer) or (relay := await self._connected_relay(relays)) is None:
                    return
                remember(self._not_before, peer, now + ASK_AGAIN_S, _MOST_KNOWN)
                with peer_faults():
                    reply = await HolePunchingStub(self._channel(relay.peer)).Arrange(pb.ArrangeRequest(peer=peer))
                seen = _seen(reply.address, relay)
                if dial := self._own.begin(seen, now):
                    remember(self._not_before, peer, now + AGAIN_S, _MOST_KNOWN)
                    await control.connect(peer, [*(way for way in known if not way.relay), seen], WITHIN_S)
                    self._own.reached(dial)
                    self._not_before.pop(peer, None)

    async def _connected_relay(self, relays: Sequence[str]) -> FarEnd | None:
        """One that sees this node over QUIC."""
        for relay in dict.fromkeys(relays):
            if (found := await self._control().find_connected(relay)) and found.quic:
                return found
        return None

    async def Arrange(self, request: pb.ArrangeRequest, context: Any) -> pb.ArrangeReply:  # noqa: N802
        caller = self._far_end(context)
        place = caller.place
        if self._arranged[place] >= ARRANGED_OF_PLACE or self._arranged.total() >= MOST_ARRANGED:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        if caller.quic is None or not is_peer_id(request.peer):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not seen over QUIC")
        own = Counter([place])
        self._arranged += own
        try:
            found = await self._control().find_connected(request.peer)
            address = found and found.quic
            if address is None:
                raise PeerLost("not_seen")
            told = pb.DialRequest(peer=caller.peer, address=str(caller.quic))
            with peer_faults():
                await HolePunchingStub(self._channel(request.peer)).Dial(told, timeout=WITHIN_S)
        except (OSError, PeerLost):
            await context.abort(grpc.StatusCode.NOT_FOUND, "that peer is not seen over QUIC, or does not dial")
        finally:
            self._arranged -= own
        return pb.ArrangeReply(address=str(address))

    async def Dial(self, request: pb.DialRequest, context: Any) -> pb.DialReply:  # noqa: N802
        relay = self._far_end(context)
        if relay.peer not in self._relays or relay.relayed:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "")
        try:
            address = _seen(request.address, relay)
        except UsageError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "")
        now = asyncio.get_running_loop().time()
        may = is_peer_id(request.peer) and len(self._dials) < MOST_DIALS
        if dial := self._told.begin(address, now) if may else None:
            task = asyncio.create_task(self._dial(request.peer, address, dial))
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)
        else:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        return pb.DialReply()

    async def _dial(self, peer: str, address: Address, dial: "_Dial") -> None:
        with suppress(OSError):
            await self._control().connect(peer, [address], WITHIN_S)
            self._told.reached(dial)


class _Dial(NamedTuple):
    at: float
    place: str


class _InVain:
    """Dials that reached nobody, or are under way, of the last hour."""

    def __init__(self) -> None:
        self._dials: list[_Dial] = []

    def begin(self, address: Address, now: float) -> _Dial | None:
        """None where there were too many."""
        dial = _Dial(now, place_of(address.host))
        self._dials = [each for each in self._dials if each.at > now - _HOUR_S]
        of_place = [each.at for each in self._dials if each.place == dial.place]
        lately = [at for at in of_place if at > now - PLACE_S]
        if len(self._dials) >= AN_HOUR or len(of_place) >= OF_PLACE_AN_HOUR or len(lately) >= OF_PLACE:
            return None
        self._dials.append(dial)
        return dial

    def reached(self, dial: _Dial) -> None:
        if dial in self._dials:
            self._dials.remove(dial)


def _seen(text: str, relay: FarEnd) -> Address:
    """Where a relay sees a peer: over QUIC, and in a private network only where the relay is in one. Raises UsageError
    for any other address, which the relay may have made up."""
    address = parse(text)
    ip = address.ip
    if address.transport == QUIC and ip is not None and not address.peer:
        nowhere = ip.is_multicast or ip.is_unspecified or ip.is_loopback or ip.is_link_local
        if not nowhere and (ip.is_global or not ipaddress.ip_address(relay.host).is_global):
            return address
    raise UsageError(f"{text!r} is not where a peer is seen")
