"""Downloads the live state of a peer: slow weights, outer momentum and round, as state_transfer/server.py sends it.

The donor first sends the version's header: its round, the digests of its fragments, and one root hash over them. A
fragment whose digest holds is kept when the stream breaks; the download resumes after it, from any donor that has the
same version. Nothing of another version is kept, so fragments of two donors never mix. The numbers are only checked for
NaN and Inf, and nothing is used before all of them are there.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

import grpc
import numpy as np

from noloco_node.base.units import share, size, span
from noloco_node.errors import PeerMisbehaved, PeerRefused
from noloco_node.host.traffic import Traffic
from noloco_node.transport.base import next_message, peer_faults
from noloco_node.version import PROTOCOL
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format
from noloco_node.wire.peer_pb2_grpc import StateStub
from noloco_node.wire.state_format import Coding

FRAME_S = 30.0
"""A donor that sends nothing for so long is given up."""
MOST_PLACES = 100
"""Beyond one each second: a donor says the place in its queue each 10 s, and when it changes."""
PROGRESS_S = 5.0
"""How long a peer may take to say how far it is."""
SAMPLE_S = 15.0
"""How long a peer may take to send some blocks: its training thread answers between two inner steps."""
ASIDE_BYTES = 4 << 20
"""10 ms of hashing."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateTerms:
    run_id: bytes
    layout: bytes
    admission: bytes = field(default=b"", compare=False)
    """The token of who asks."""


@dataclass(frozen=True, slots=True)
class LiveState:
    round: int
    data: memoryview
    """Slow weights, then outer momentum: fp32, little-endian."""


def is_finite(numbers: memoryview) -> bool:
    """Of fp32 bytes; in parts, because a mask of all of them would take a quarter of their memory."""
    whole = np.frombuffer(numbers, np.float32)
    return all(np.isfinite(part).all() for part in np.array_split(whole, max(1, len(whole) >> 22)))


class DownloadProgress:
    """How far a download is, in words: `62% of 12.6 MB, 34 s left`, at its rate since the first call."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> str:
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = (now, done_bytes)
        began, before = self._began
        rate = (done_bytes - before) / max(now - began, 1e-6)
        left = f", {span((total_bytes - done_bytes) / rate)} left" if rate else ""
        return f"{share(done_bytes / total_bytes)} of {size(total_bytes)}{left}"


class DownloadWatcher(Protocol):
    """Receives the progress of a download."""

    def queued(self, place: int) -> None:
        """`place` others come first; 0: the donor makes its copy."""

    async def check_round(self, round: int) -> None:
        """The donor has another version than the one that was begun. Raises PeerFault to refuse its round."""

    def progress(self, done_bytes: int, total_bytes: int) -> None: ...


class Download:
    """The received part of one version; it outlives the streams that bring it."""

    def __init__(self, numbers: int, coding: Coding = Coding.FP32) -> None:
        self.coding = coding
        self.total_bytes = coding.size(numbers)
        self.root = b""
        self.done = 0
        """Fragments received and verified."""
        self.round = 0
        self._digests = b""
        self._numbers = memoryview(bytearray())
        self._size = 4 * numbers

    @property
    def fragments(self) -> int:
        return state_format.fragments(self.total_bytes)

    @property
    def done_bytes(self) -> int:
        return min(self.done * state_format.fragment_bytes(self.total_bytes), self.total_bytes)

    @property
    def next_bytes(self) -> int:
        """The size of the fragment that comes next."""
        return min(state_format.fragment_bytes(self.total_bytes), self.total_bytes - self.done_bytes)

    def begin(self, header: wire.StateHeader) -> None:
        """Resume the version that was begun, or begin another one. Raises PeerMisbehaved."""
        if header.total_bytes != self.total_bytes:
            raise PeerMisbehaved("bad_state", f"{header.total_bytes} bytes instead of {self.total_bytes}")
        resumes = header.root == self.root
        if header.fragment != (self.done if resumes else 0):
            raise PeerMisbehaved("bad_state", f"resumes at fragment {header.fragment}")
        if not resumes:
            # not zeros: to write a large state's would hold up the event loop for seconds
            self._numbers = self._numbers or np.empty(self._size, np.uint8).data
            self.root, self.round, self._digests, self.done = header.root, header.round, header.digests, 0

    def add(self, fragment: bytearray) -> None:
        """The next one. Raises PeerMisbehaved."""
        expected = self._digests[self.done * state_format.DIGEST_BYTES :][: state_format.DIGEST_BYTES]
        if state_format.digest(fragment) != expected:
            raise PeerMisbehaved("bad_digest", f"fragment {self.done} of the state")
        start = self.done_bytes
        place = slice(*(self._size * at // self.total_bytes for at in (start, start + len(fragment))))
        self.coding.decode(fragment, self._numbers[place])
        if not is_finite(self._numbers[place]):
            raise PeerMisbehaved("nonfinite", "state")
        self.done += 1

    def result(self) -> LiveState:
        return LiveState(self.round, self._numbers)


async def fetch(
    channel: grpc.aio.Channel,
    terms: StateTerms,
    download: Download,
    watcher: DownloadWatcher,
    pace: Traffic | None = None,
) -> LiveState:
    """Receive what `download` still lacks from one peer. Raises PeerFault; what came stays in `download`."""
    pace = pace or Traffic()
    request = wire.StateRequest(
        PROTOCOL,
        terms.run_id,
        terms.layout,
        download.coding,
        download.root,
        download.done if download.root else 0,
        terms.admission,
    )
    call = StateStub(channel).Fetch(wire.encode_state_request(request))
    stream = aiter(call)
    try:
        header = await _header(stream, pace, watcher)
        if header.root != download.root:  # a version that was begun may be old by now, and is resumed all the same
            await watcher.check_round(header.round)
        download.begin(header)
        while download.done < download.fragments:
            fragment = bytearray()
            while len(fragment) < download.next_bytes:
                chunk = await _receive(stream, pace)
                if isinstance(chunk, wire.Refusal):
                    raise PeerRefused(chunk.code.reason)
                due = min(state_format.CHUNK_BYTES, download.next_bytes - len(fragment))
                # smaller chunks are refused as well: each of them costs work
                if not isinstance(chunk, wire.StateChunk) or len(chunk.data) != due:
                    raise PeerMisbehaved("bad_state", "not a chunk of what was announced")
                fragment += chunk.data
                watcher.progress(download.done_bytes + len(fragment), download.total_bytes)
            await aside(len(fragment), download.add, fragment)
        return download.result()
    finally:
        call.cancel()


async def aside(size_bytes: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Runs in a thread where hashing so many bytes would hold up the event loop."""
    return await asyncio.to_thread(work, *args, **options) if size_bytes > ASIDE_BYTES else work(*args, **options)


async def progress(channel: grpc.aio.Channel, terms: StateTerms) -> int:
    """The round in which a peer is. Raises PeerFault."""
    asked = wire.StateRequest(PROTOCOL, terms.run_id, terms.layout, admission=terms.admission)
    request = wire.encode_state_request(asked)
    with peer_faults():
        return wire.decode_progress(await StateStub(channel).Progress(request, timeout=PROGRESS_S))


async def sample(
    channel: grpc.aio.Channel, terms: StateTerms, blocks: Sequence[int], size_bytes: int, pace: Traffic | None = None
) -> wire.StateSample:
    """Some blocks of a peer's slow weights, `size_bytes` in all. Raises PeerFault."""
    request = wire.SampleRequest(PROTOCOL, terms.run_id, terms.layout, tuple(blocks), terms.admission)
    pace = pace or Traffic()
    with peer_faults():
        message = await StateStub(channel).Sample(wire.encode_sample_request(request), timeout=SAMPLE_S)
    pace.received(message.ByteSize())
    return wire.decode_sample(message, size_bytes)


async def _header(stream: AsyncIterator[pb.StateFrame], pace: Traffic, watcher: DownloadWatcher) -> wire.StateHeader:
    now, places = asyncio.get_running_loop().time, 0
    began = now()
    while True:
        match await _receive(stream, pace):
            case wire.StateHeader() as header:
                return header
            case wire.StatePlace(place):
                places += 1
                if places > MOST_PLACES + now() - began:
                    raise PeerMisbehaved("too_many_frames", "places in its queue")
                watcher.queued(place)
            case wire.Refusal(code):
                raise PeerRefused(code.reason)
            case wire.StateChunk():
                raise PeerMisbehaved("bad_state", "bytes before a header")


async def _receive(stream: AsyncIterator[pb.StateFrame], pace: Traffic) -> wire.StateFrame:
    await pace.receiving()
    message = await next_message(stream, FRAME_S)
    pace.received(message.ByteSize())
    return wire.decode_state(message)
