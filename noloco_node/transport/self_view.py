"""How a node looks from outside, asked of a peer: where it is seen, whether it can be called there, what time it is.

libp2p's own AutoNAT never judges private addresses and tells its verdict to nobody. Here the peer that is asked opens a
TCP connection to the address it sees the caller at, and nowhere else, so nobody can be made to knock at strangers'
doors; libp2p's first words show that a libp2p host listens there. It is a hint for the caller alone.
"""

import asyncio
import ipaddress
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from noloco_node.errors import PeerLost
from noloco_node.transport.base import peer_faults
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, MirrorStub

MAX_PORTS = 4
_GREETING = b"\x13/multistream/1.0.0\n"
_KNOCK_S = 3.0  # a router that drops what comes in unasked says nothing at all
_LOOK_S = 2 * _KNOCK_S
_MAX_KNOCKS = 16  # at a time, over all callers
_LATEST = float(1 << 34)  # seconds since 1970 that a clock may show: five centuries, and sums of them stay exact


class SelfViewService(MirrorServicer):
    """Tells callers how they look from here."""

    def __init__(self, far_end: Callable[[Any], FarEnd]) -> None:
        self._far_end = far_end
        self._knocks = 0

    async def Look(self, request: pb.LookRequest, context: Any) -> pb.LookReply:  # noqa: N802 (the proto's name)
        caller = self._far_end(context)
        if caller.relayed:
            return pb.LookReply(time=time.time())
        ports = {port for port in request.ports[:MAX_PORTS] if 0 < port < 1 << 16}
        if self._knocks + len(ports) > _MAX_KNOCKS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        self._knocks += len(ports)
        try:
            answers = await asyncio.gather(*(_libp2p_answers(caller.host, port) for port in ports))
        finally:
            self._knocks -= len(ports)
        open_ports = [port for port, answer in zip(ports, answers, strict=True) if answer]
        return pb.LookReply(host=caller.host, open=open_ports, time=time.time())


async def _libp2p_answers(host: str, port: int) -> bool:
    writer = None
    try:
        async with asyncio.timeout(_KNOCK_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_GREETING)
            return await reader.readexactly(len(_GREETING)) == _GREETING
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


class SelfView(NamedTuple):
    """What a peer said of us."""

    host: str
    """Empty where a relay lies between."""
    open: tuple[int, ...]


async def look(channel: grpc.aio.Channel, ports: Sequence[int]) -> SelfView | None:
    """Ask one peer; nothing where it does not answer, or with nonsense."""
    try:
        with peer_faults():
            reply = await MirrorStub(channel).Look(pb.LookRequest(ports=ports[:MAX_PORTS]), timeout=_LOOK_S)
        host = str(ipaddress.ip_address(reply.host)) if reply.host else ""
    except (PeerLost, ValueError):
        return None
    return SelfView(host, tuple(port for port in reply.open if port in ports))


class ClockSkew(NamedTuple):
    """How our clock differs from those of peers."""

    ahead_s: float
    """The median of what they say, and only what no delay can explain."""
    witnesses: int
    """Peers that say this much or more. It may be the clock of a single one that is wrong."""


async def skew(channels: Sequence[grpc.aio.Channel]) -> ClockSkew | None:
    """Nothing where no peer has a clock to compare with."""
    found = await asyncio.gather(*(_skew(channel) for channel in channels))
    known = sorted((value for value in found if value is not None), key=abs)
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
    if not 0 <= reply.time <= _LATEST:  # nor where it is not a number
        return None
    return beyond_doubt(before, reply.time, loop.time() - asked)


def beyond_doubt(before: float, theirs: float, took_s: float) -> float:
    """It was `before` by our clock; some time in the `took_s` that followed it was `theirs` by the peer's clock."""
    ahead = before + took_s / 2 - theirs
    return math.copysign(max(0.0, abs(ahead) - took_s / 2), ahead)
