"""A newcomer fetches the live state of a peer; a peer serves it: slow weights, outer momentum and round.

One server stream: a header that states size and digest, then the bytes. They are opaque here: the training thread makes
and takes them. What arrives counts only when it has the stated size and digest; nothing is used before.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from noloco_node.errors import PeerLost, PeerMisbehaved, PeerRefused
from noloco_node.traffic import Pace, Traffic
from noloco_node.transport.base import peer_faults
from noloco_node.version import PROTOCOL
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import StateServicer, StateStub

CHUNK_BYTES = 128 << 10
"""A donor's limited uplink sends one within a newcomer's patience: 4 s at the slowest rate that can be set."""
FRAME_S = 30.0
"""A donor that sends nothing for so long is given up."""
SNAPSHOT_S = 60.0
"""For the training thread to come to the end of an inner step and copy its state."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveState:
    round: int
    data: bytes
    """Slow weights, then outer momentum: fp32, little-endian."""


class Donor(Protocol):
    """What is needed of the training thread."""

    def live_state(self) -> "Future[tuple[int, bytes]]": ...


class Callers(Protocol):
    """What is needed of a Transport."""

    def caller(self, context: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Terms:
    run_id: bytes
    layout: bytes


class StateService(StateServicer):
    """Serves one download at a time: more would copy the state once each and share one uplink all the same."""

    def __init__(
        self, callers: Callers, pace: Pace | None = None, withholds: Callable[[], bool] = lambda: False
    ) -> None:
        self._callers = callers
        self._pace = pace or Traffic()
        self._withholds = withholds
        self._terms: Terms | None = None
        self._donor: Donor | None = None
        self._serving = asyncio.Lock()

    def begin(self, terms: Terms, donor: Donor) -> None:
        self._terms, self._donor = terms, donor

    async def Fetch(self, request: pb.StateRequest, context: Any) -> AsyncIterator[pb.StateFrame]:  # noqa: N802
        peer = self._callers.caller(context)
        try:
            asked = wire.decode_state_request(request)
        except PeerMisbehaved as fault:
            log.debug("%s: %s", peer, fault)
            yield wire.encode_state(wire.Refusal(wire.Code.INCOMPATIBLE))
            return
        if self._withholds():
            yield wire.encode_state(wire.Refusal(wire.Code.PAUSED))
        elif self._terms is None or self._donor is None or self._serving.locked():
            yield wire.encode_state(wire.Refusal(wire.Code.BUSY, retry_in_s=1.0))
        elif asked.protocol != PROTOCOL or Terms(asked.run_id, asked.layout) != self._terms:
            yield wire.encode_state(wire.Refusal(wire.Code.INCOMPATIBLE))
        else:
            async with self._serving:
                async with asyncio.timeout(SNAPSHOT_S):
                    round_, data = await asyncio.wrap_future(self._donor.live_state())
                digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
                yield wire.encode_state(wire.StateHeader(round_, len(data), digest))
                view = memoryview(data)
                for start in range(0, len(view), CHUNK_BYTES):
                    chunk = wire.encode_state(wire.StateChunk(bytes(view[start : start + CHUNK_BYTES])))
                    await self._pace.sending(chunk.ByteSize())
                    yield chunk


async def fetch(
    channel: grpc.aio.Channel,
    terms: Terms,
    total_bytes: int,
    progress: Callable[[int, int], None],
    pace: Pace | None = None,
) -> LiveState:
    """One peer's state, whole and checked; `progress` hears of bytes so far and in all. Raises PeerFault."""
    pace = pace or Traffic()
    request = wire.StateRequest(PROTOCOL, terms.run_id, terms.layout)
    call = StateStub(channel).Fetch(wire.encode_state_request(request))
    stream = aiter(call)
    try:
        header = await _receive(stream, pace)
        if isinstance(header, wire.Refusal):
            raise PeerRefused(header.code.reason, header.retry_in_s)
        if not isinstance(header, wire.StateHeader) or header.total_bytes != total_bytes:
            raise PeerMisbehaved("bad_state", f"not a header of {total_bytes} bytes")
        data = bytearray()
        while len(data) < total_bytes:
            chunk = await _receive(stream, pace)
            if not isinstance(chunk, wire.StateChunk) or not 0 < len(chunk.data) <= total_bytes - len(data):
                raise PeerMisbehaved("bad_state", "not a chunk of what was announced")
            data += chunk.data
            progress(len(data), total_bytes)
        if await asyncio.to_thread(lambda: hashlib.sha256(data).digest()) != header.digest:
            raise PeerMisbehaved("bad_digest", "of the state")
        return LiveState(header.round, bytes(data))
    finally:
        call.cancel()


async def _receive(stream: AsyncIterator[pb.StateFrame], pace: Pace) -> wire.StateFrame:
    await pace.taking()
    try:
        async with asyncio.timeout(FRAME_S):
            with peer_faults():
                message = await anext(stream)
    except TimeoutError:
        raise PeerLost("silent", f"no frame for {FRAME_S:g} s") from None
    except StopAsyncIteration:
        raise PeerLost("hung_up") from None
    pace.took(message.ByteSize())
    return wire.decode_state(message)
