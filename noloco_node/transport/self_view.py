"""How a peer sees this node: at which address, which ports are open there, how far the clocks differ, how fast it
answers.

libp2p's own AutoNAT never tests private addresses and does not report its result. Here the peer opens a TCP
connection to the address that it sees the caller at, and nowhere else, so nobody can make it probe others' machines.
The host that listens there has to prove the caller's peer id: a router may forward the port to another libp2p host
behind it. The answer is a hint for the caller alone.
"""

import asyncio
import ipaddress
import math
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from noloco_node.base.identity import is_peer_id, public_key, verify
from noloco_node.errors import PeerLost
from noloco_node.transport.base import peer_faults
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, MirrorStub

MAX_PORTS = 4
_GREETING = b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n"
_PROBE_S = 3.0  # a router that drops unexpected packets does not answer at all
_LOOK_S = 2 * _PROBE_S
_ROUND_TRIP_S = 20.0  # to find a way to the peer, which may take several addresses and a relay, and for the answer
_MAX_PROBES, _MAX_OF_PLACE = 64, 8  # at a time, over all callers, and of one place: one whose router drops them all
# could else keep a rendezvous from telling anybody else how it is seen
_MAX_SEARCHES = 4  # at a time, in p2pd's list of connections
_LATEST = float(1 << 34)  # seconds since 1970 that a clock may show: five centuries, and sums of them stay exact


class SelfViewService(MirrorServicer):
    """Answers callers with how this node sees them."""

    def __init__(
        self, far_end: Callable[[Any], FarEnd], find_connected: Callable[[str], Awaitable[FarEnd | None]]
    ) -> None:
        self._far_end = far_end
        self._find_connected = find_connected
        self._probes: Counter[str] = Counter()
        """Under way, by place."""
        self._searches = 0

    async def Look(self, request: pb.LookRequest, context: Any) -> pb.LookReply:  # noqa: N802 (the proto's name)
        caller = self._far_end(context)
        if caller.relayed:
            return pb.LookReply(time=time.time())
        ports = {port for port in request.ports[:MAX_PORTS] if 0 < port < 1 << 16}
        of_place, of_all = self._probes[caller.place] + len(ports), self._probes.total() + len(ports)
        if of_place > _MAX_OF_PLACE or of_all > _MAX_PROBES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        own = Counter({caller.place: len(ports)})
        self._probes += own
        try:
            answers = await asyncio.gather(*(_answers_as(caller.peer, caller.host, port) for port in ports))
        finally:
            self._probes -= own
        open_ports = [port for port, answer in zip(ports, answers, strict=True) if answer]
        return pb.LookReply(host=caller.host, open=open_ports, time=time.time())

    async def Whence(self, request: pb.WhenceRequest, context: Any) -> pb.WhenceReply:  # noqa: N802
        """Not the address: the peer may not want to be found, and its network is enough to count shares by."""
        if self._searches >= _MAX_SEARCHES or not is_peer_id(request.peer):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        self._searches += 1
        try:
            found = await self._find_connected(request.peer)
        finally:
            self._searches -= 1
        return pb.WhenceReply(place=found.place if found and not found.relayed else "")


async def _answers_as(peer: str, host: str, port: int) -> bool:
    writer = None
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_GREETING)
            if await reader.readexactly(len(_GREETING)) != _GREETING:
                return False
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it checks that the host has the certificate's key
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            await writer.start_tls(context)
            return proves(writer.get_extra_info("ssl_object").getpeercert(binary_form=True), peer)
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


def proves(certificate: bytes, peer: str) -> bool:
    """Whether this peer signed the key of a TLS certificate, in which its own key and the signature stand side by side:
    https://github.com/libp2p/specs/blob/master/tls/tls.md"""
    from cryptography.x509 import InvalidVersion, load_der_x509_certificate  # late: it takes 25 ms

    try:
        key = load_der_x509_certificate(certificate).public_key()
        signed = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, InvalidVersion, UnsupportedAlgorithm):
        return False
    _, _, signature = certificate.partition((public_key(peer) or b"") + b"\x04\x40")  # 64 bytes follow
    return verify(peer, b"libp2p-tls-handshake:" + signed, signature[:64])


class SelfView(NamedTuple):
    """How a peer sees us."""

    host: str
    """Empty where the call came through a relay."""
    open: tuple[int, ...]


async def look(channel: grpc.aio.Channel, ports: Sequence[int]) -> SelfView | None:
    """Ask one peer. None where it does not answer, or answers nonsense."""
    try:
        with peer_faults():
            reply = await MirrorStub(channel).Look(pb.LookRequest(ports=ports[:MAX_PORTS]), timeout=_LOOK_S)
        if "%" in reply.host:
            raise ValueError("the name of a network interface, which may be any text, means nothing here")
        host = str(ipaddress.ip_address(reply.host)) if reply.host else ""
    except (PeerLost, ValueError):
        return None
    return SelfView(host, tuple(port for port in reply.open[:MAX_PORTS] if host and port in ports))


class ClockSkew(NamedTuple):
    """How our clock differs from those of peers."""

    ahead_s: float
    """The median over the places of peers (base/places.py), each without what the delay of its answer may explain."""
    witnesses: int
    """Places that report this much or more. With few of them, it may be a peer's clock that is wrong."""


async def skew(
    peers: Sequence[str], channel: Callable[[str], grpc.aio.Channel], place_of: Callable[[str], str]
) -> ClockSkew | None:
    """Of a place that clock counts which is nearest to ours. None where no peer answers."""
    channels = [channel(peer) for peer in peers]
    answers = zip(peers, await asyncio.gather(*map(_skew, channels)), strict=True)
    by_place: dict[str, float] = {}
    for peer, value in answers:
        if value is not None:  # a place is known once one of its peers has answered
            by_place[place_of(peer)] = min(value, by_place.get(place_of(peer), value), key=abs)
    known = sorted(by_place.values(), key=abs)
    if not known:
        return None
    ahead = known[(len(known) - 1) // 2]
    return ClockSkew(ahead, sum(value >= ahead if ahead > 0 else value <= ahead for value in known))


async def _skew(channel: grpc.aio.Channel) -> float | None:
    loop = asyncio.get_running_loop()
    asked, before = loop.time(), time.time()
    try:
        with peer_faults():
            reply = await MirrorStub(channel).Look(pb.LookRequest(), timeout=_LOOK_S)
    except PeerLost:
        return None
    if not 0 <= reply.time <= _LATEST:  # false for NaN, too
        return None
    return least_skew(before, reply.time, loop.time() - asked)


def least_skew(before: float, theirs: float, round_trip_s: float) -> float:
    """How far our clock is ahead at least. Ours showed `before`; the peer's showed `theirs` within the
    `round_trip_s` that followed."""
    ahead = before + round_trip_s / 2 - theirs
    return math.copysign(max(0.0, abs(ahead) - round_trip_s / 2), ahead)


async def round_trip(channel: grpc.aio.Channel, payload_bytes: int = 0) -> float:
    """Seconds until a peer of any version has answered. Raises PeerLost.

    The peer drops the payload: the time beyond that of an empty call shows the rate of the way there.
    """
    request = pb.LookRequest(padding=bytes(payload_bytes))
    asked = time.perf_counter()  # an event loop's own clock may count in milliseconds
    with peer_faults():
        await MirrorStub(channel).Look(request, timeout=_ROUND_TRIP_S)
    return time.perf_counter() - asked
