"""A direct way between two nodes behind routers, so that their relay does not carry what they swap.

A router lets in what answers a packet that it sent out. So both nodes dial at the same moment, each where their relay
sees the other: each one's own packets make its router let the other's in. This is done over QUIC: p2pd sends to all
from the UDP port that it listens at, and most routers use one port of their own for all that a host sends from one
(a symmetric router does not, and such nodes stay with the relay). On TCP, dials that cross become one connection, on
which both ends begin the handshake.

libp2p's own protocol for it, DCUtR, begins when four peers in different places agree where they see this node, which in
a small swarm never happens, and with a connection over the relay, which stays beside the direct one.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import grpc

from noloco_node.base.addresses import QUIC, Address, parse
from noloco_node.base.identity import is_peer_id
from noloco_node.base.latest import remember
from noloco_node.errors import PeerLost, UsageError
from noloco_node.transport.base import peer_faults
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import HolePunchingServicer, HolePunchingStub

DIAL_S = 3
"""For the dial. Two routers that let each other's packets in take two round trips."""
AGAIN_S = 600.0
"""When it is tried again with a peer whose router, or ours, let nothing in: a call waits for it."""
_ARRANGE_S, _TOLD_S = 5.0, 3.0
MOST_DIALS = 8
"""That a relay may have this node make at the same time."""
MOST_ARRANGED, MOST_OF_PLACE = 32, 4
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
        """`relays`: those at whose word this node dials. It arranges for others in any case."""
        self._relays = relays
        self._channel = channel
        self._far_end = far_end
        self._control = control
        self._not_before: dict[str, float] = {}
        """Peers that were dialled in vain."""
        self._arranged: Counter[str] = Counter()
        """Under way, by place."""
        self._dials: set[asyncio.Task[bool]] = set()

    def close(self) -> None:
        for dial in self._dials:
            dial.cancel()

    async def connect(self, peer: str, relay: Address, others: Sequence[Address], *, idle: bool) -> None:
        """Be connected to a peer directly, if that can be; `relay`, `others`: its address at a relay, and those at
        which it may be in the same network. `idle`: no stream between the two is open, so a connection over the relay
        may be closed for it."""
        now = asyncio.get_running_loop().time()
        if now < self._not_before.get(peer, now):
            return
        control = self._control()
        with suppress(OSError, PeerLost, UsageError):
            if (found := await control.find_connected(peer)) is not None:
                if not (found.relayed and idle):
                    return
                await control.disconnect(peer)
            await control.try_connect(relay.relay, relay.without_peers().both)
            with peer_faults():
                request = pb.ArrangeRequest(peer=peer)
                reply = await HolePunchingStub(self._channel(relay.relay)).Arrange(request, timeout=_ARRANGE_S)
            ways = [*others, _seen(reply.address)]
            remember(self._not_before, peer, now + AGAIN_S, _MOST_KNOWN)
            await control.connect(peer, ways, DIAL_S)
            del self._not_before[peer]

    async def Arrange(self, request: pb.ArrangeRequest, context: Any) -> pb.ArrangeReply:  # noqa: N802
        caller = self._far_end(context)
        place = caller.place
        if self._arranged[place] >= MOST_OF_PLACE or self._arranged.total() >= MOST_ARRANGED:
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
                await HolePunchingStub(self._channel(request.peer)).Dial(told, timeout=_TOLD_S)
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
            address = _seen(request.address)
        except UsageError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "")
        if len(self._dials) >= MOST_DIALS or not is_peer_id(request.peer):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        dial = asyncio.create_task(self._control().try_connect(request.peer, [address]))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)
        return pb.DialReply()


def _seen(text: str) -> Address:
    """Where a relay sees a peer. Raises UsageError for any other address."""
    address = parse(text)
    if address.transport != QUIC or address.ip is None or address.peer:
        raise UsageError(f"{text!r} is not where a peer is seen")
    return address
