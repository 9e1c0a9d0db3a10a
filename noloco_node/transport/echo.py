"""One round trip to a peer: what every node answers at once, asked by the clock.

The call is the mirror's, which a peer of any version answers. What it carries there is read by nobody, so that the time
it takes beyond an empty one's tells how fast the way is.
"""

import time
from typing import Protocol

import grpc.aio

from noloco_node.transport.base import peer_faults
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorStub

TIMEOUT_S = 20.0
"""For a way to the peer to be found, which may take several addresses and a relay, and the answer."""


class Calls(Protocol):
    """What is needed of a transport."""

    def channel(self, peer: str) -> grpc.aio.Channel: ...


async def echo(transport: Calls, peer: str, payload_bytes: int = 0) -> float:
    """Seconds until the answer. Raises PeerLost."""
    request = pb.LookRequest(padding=bytes(payload_bytes))
    asked = time.perf_counter()  # a loop's own clock may count in milliseconds
    with peer_faults():
        await MirrorStub(transport.channel(peer)).Look(request, timeout=TIMEOUT_S)
    return time.perf_counter() - asked
