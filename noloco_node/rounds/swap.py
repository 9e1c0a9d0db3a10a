"""One swap: two partners tell each other every fragment of a vector, and apply what both have.

It knows frames, their order and their deadlines; what a payload holds is the codec's business, what a correction is
the training thread's. The rules:

- At most WINDOW fragments are under way beyond the last one that was applied, in each direction: that keeps the link
  full. Applied means handed to the training thread, which adds a correction between two of its steps: behind a long one
  corrections wait, of all swaps together no more than BACKLOG_BYTES. Then nothing more is read until some were added.
  Both bounds together bound memory.
- A volunteer may limit what goes out and comes in (host/traffic.py), so that a fragment takes minutes. Deadlines are
  for silence, not for slowness: a large frame travels in pieces (rounds/pieces.py), who has nothing to send says that
  it is alive, and each of both gives a fresh deadline. Waiting for our own limit stands under no such deadline. But
  only a whole fragment or an acknowledgement is headway, and a partner that makes none is given up: after what its
  fragment takes on the slowest link that it may set itself and has to share, at the least after what core/round.py
  allows. What bounds a slow swap as a whole is `MAX_LAG` there.
- A fragment is applied when both sides hold the other's, whole and screened. The follower says so first, the leader
  (who called) applies and says so, then the follower applies. Fragments are applied one after the other, so a break
  leaves at most one that the leader applied and the follower did not: `one_sided` counts it. What was applied stays.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from noloco_node.errors import PeerFault, PeerLost, PeerMisbehaved
from noloco_node.host.limits import MIN_RATE_BYTES_S
from noloco_node.host.traffic import Pace, Traffic
from noloco_node.rounds.pieces import Assembly, cut
from noloco_node.transport.base import peer_faults
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb

DIVERGED = wire.Code.DIVERGED.reason
WINDOW = 4
"""Fragments under way: enough that a link of 100 ms and 1 Gbit/s stays full with fragments of a few MiB."""
FRAME_S = 20.0
"""A partner of whom nothing comes for so long, not even a piece, is given up: that needs 52 kbit/s of a link."""
ALIVE_S = 5.0
"""Who has sent nothing for so long says that it is there: three of these may be late before a partner gives up."""
DONE_S = 5.0
"""For the follower's last word; without it the last fragment counts as one-sided."""
SLOW_STREAMS = 4
"""A fragment may take as long as on a link of MIN_RATE_BYTES_S that this swap shares with three other streams."""
BACKLOG_BYTES = 256 << 20
"""Of corrections that were handed over and not added yet: 67 M parameters in fp32, so smaller models never wait. 1 B
parameters at 1 Gbit/s and 4 bits would be 4 s of the link; with steps of 3 s they are 15 steps, where WINDOW fragments
a step would be 240. Small beside such a model's 16 GB."""


class Heard(Protocol):
    @property
    def say(self) -> bytes | None: ...
    @property
    def correction(self) -> Any: ...


class Stats(Protocol):
    """How well a codec told its fragments."""

    @property
    def missed_share(self) -> float: ...
    @property
    def relative_error(self) -> float: ...


class Vectors(Protocol):
    """One open offer, as the codec thread keeps it. Payloads and corrections are opaque here."""

    @property
    def round(self) -> int: ...
    @property
    def fragments(self) -> int: ...
    @property
    def correction_bytes(self) -> int:
        """What the correction of one fragment holds in memory, at most."""

    @property
    def stats(self) -> Stats: ...
    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]": ...
    def hear(self, index: int, payload: bytes) -> "Future[Any]":
        """Gives what is `Heard`."""

    def apply(self, index: int, correction: Any) -> "Future[None]":
        """Done when it was added, or never will be; in the order of the calls."""


class Backlog:
    """The corrections of a node's swaps that wait for its training thread."""

    def __init__(self, limit_bytes: int = BACKLOG_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, Future[None]]] = deque()

    @property
    def bytes(self) -> int:
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        return sum(size for size, _ in self._waiting)

    def add(self, size_bytes: int, added: "Future[None]") -> None:
        self._waiting.append((size_bytes, added))

    async def room(self, size_bytes: int) -> None:
        """Until one more of this size may wait; it always may alone."""
        while (waiting := self.bytes) and waiting + size_bytes > self._limit_bytes:
            await asyncio.wait({asyncio.wrap_future(self._waiting[0][1])})


class Link:
    """Frames to and from one partner over one gRPC stream, each with a deadline; counts bytes."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Traffic()
        self._outbox: asyncio.PriorityQueue[tuple[int, int, pb.SwapFrame | None]] = asyncio.PriorityQueue()
        self._put = itertools.count()
        self._incoming: AsyncIterator[pb.SwapFrame] | None = None
        self._idle_s: float | None = None
        self.parting = False
        """Our last word has been put."""
        self._dropped = 0
        """What was put before this goes out no more."""
        self.sent_bytes = 0
        self.received_bytes = 0

    def listen(self, incoming: AsyncIterator[pb.SwapFrame]) -> None:
        self._incoming = incoming

    def send(self, frame: wire.Frame) -> None:
        """Never blocks: the swap's window bounds what can lie in the outbox. An Ack overtakes what waits there: the
        partner's window opens by it, and on a limited link the fragments before it may take minutes."""
        for piece in cut(wire.encode(frame)):
            self._post(piece, first=isinstance(frame, wire.Ack))

    def _post(self, piece: pb.SwapFrame | None, *, first: bool = False) -> None:
        self._outbox.put_nowait((int(not first), next(self._put), piece))

    def keep_alive(self) -> None:
        """From the next frame on, never be silent for longer than ALIVE_S."""
        self._idle_s = ALIVE_S

    def drop(self) -> None:
        """Send nothing of what still waits: the swap has failed."""
        self._dropped = next(self._put)
        while not self._outbox.empty():
            self._outbox.get_nowait()

    def part(self, word: wire.Frame) -> None:
        """The swap has failed: this is sent instead of what still waits, and nothing after it."""
        self.drop()
        self.send(word)
        self.close()
        self.parting = True

    async def hear_out(self, patience_s: float) -> None:
        """Until the partner ends the stream: it has heard our last word then."""
        with suppress(PeerFault, TimeoutError):
            async with asyncio.timeout(patience_s):
                while True:
                    await self.receive(patience_s)

    def close(self) -> None:
        """Nothing more comes after what waits."""
        self._post(None)

    async def outgoing(self) -> AsyncIterator[pb.SwapFrame]:
        while True:
            put, piece = await self._next_out()
            if piece is None:
                return
            size = piece.ByteSize()
            await self._pace.sending(size)
            if put >= self._dropped:
                self.sent_bytes += size
                yield piece

    async def _next_out(self) -> tuple[int, pb.SwapFrame | None]:
        try:
            async with asyncio.timeout(self._idle_s):
                return (await self._outbox.get())[1:]
        except TimeoutError:
            return next(self._put), wire.encode(wire.Alive())

    async def receive(self, deadline_s: float) -> wire.Frame:
        if self._incoming is None:
            raise PeerLost("not_connected")
        await self._pace.taking()
        try:
            async with asyncio.timeout(deadline_s):
                with peer_faults():
                    message = await anext(self._incoming)
        except TimeoutError:
            raise PeerLost("silent", f"no frame for {deadline_s:g} s") from None
        except StopAsyncIteration:
            raise PeerLost("hung_up") from None
        size = message.ByteSize()
        self._pace.took(size)
        self.received_bytes += size
        return wire.decode(message)


class Swap:
    def __init__(  # noqa: PLR0913
        self,
        link: Link,
        vectors: Vectors,
        exchange_id: bytes,
        order: Sequence[int],
        *,
        leads: bool,
        stall_s: float,
        backlog: Backlog,
    ) -> None:
        """`stall_s`: how long a partner may make no headway, or longer where a fragment needs it."""
        self._link = link
        self._vectors = vectors
        self._exchange_id = exchange_id
        self._order = order
        self._place = {index: place for place, index in enumerate(order)}
        self._leads = leads
        self._stall_s = stall_s
        self._backlog = backlog
        self._assembly = Assembly()
        self._opened = 0
        self._ready: dict[int, Any] = {}  # place -> correction; at most WINDOW of them
        self._acked = False
        """Leader: the follower holds the next fragment. Follower: we have said that we hold it."""
        self.applied = 0
        self.one_sided = 0

    async def run(self) -> None:
        """Swap everything. Raises what broke it: PeerFault, or NonFinite where our own vector is at fault."""
        self._link.keep_alive()
        await self._open_ahead()
        while self.applied < len(self._order):
            await self._backlog.room(self._vectors.correction_bytes)  # a frame has one more added at most
            match await self._receive(FRAME_S, self._stall_s):
                case wire.Fragment(index, payload):
                    await self._hear(index, payload)
                case wire.Ack(index):
                    self._hear_ack(index)
                case wire.Refusal(wire.Code.DIVERGED):
                    raise PeerFault(DIVERGED, "as the partner found")
                case frame:
                    raise PeerMisbehaved("unexpected_frame", type(frame).__name__)
            await self._open_ahead()
        await self._part()

    async def _receive(self, silence_s: float, stall_s: float) -> wire.Frame:
        """The next whole frame."""
        try:
            async with asyncio.timeout(stall_s):
                while True:
                    match await self._link.receive(silence_s):
                        case wire.Alive():
                            pass
                        case wire.Piece() as piece:
                            if (whole := self._assembly.add(piece)) is not None:
                                return whole
                        case frame:
                            return frame
        except TimeoutError:
            raise PeerLost("stalled", f"no headway for {stall_s:g} s") from None

    async def _open_ahead(self) -> None:
        while self._opened < min(self.applied + WINDOW, len(self._order)):
            index = self._order[self._opened]
            self._opened += 1
            payload = await _done(self._vectors.open(index, self._exchange_id))
            self._stall_s = max(self._stall_s, SLOW_STREAMS * len(payload) / MIN_RATE_BYTES_S)
            self._link.send(wire.Fragment(index, payload))

    async def _hear(self, index: int, payload: bytes) -> None:
        place = self._place.get(index, -1)
        if not self.applied <= place < self._opened or place in self._ready:
            raise PeerMisbehaved("out_of_window", f"fragment {index}")
        heard: Heard = await _done(self._vectors.hear(index, payload))
        if heard.say is not None:
            self._link.send(wire.Fragment(index, heard.say))
        if heard.correction is not None:
            self._ready[place] = heard.correction
            self._advance()

    def _hear_ack(self, index: int) -> None:
        if self.applied >= len(self._order) or index != self._order[self.applied]:
            raise PeerMisbehaved("bad_ack", f"fragment {index}")
        if self._leads:
            if self._acked:
                raise PeerMisbehaved("bad_ack", f"fragment {index} twice")
            self._acked, self.one_sided = True, 0
            self._advance()
        elif self._acked:
            self._apply()
            self._advance()
        else:
            raise PeerMisbehaved("bad_ack", f"fragment {index} before ours")

    def _advance(self) -> None:
        """Say or do what the next fragment in order allows."""
        if self.applied not in self._ready or self._leads != self._acked:
            return
        if self._leads:
            self._link.send(wire.Ack(self._order[self.applied]))
            self._apply()
            self.one_sided = 1
        else:
            self._link.send(wire.Ack(self._order[self.applied]))
            self._acked = True

    def _apply(self) -> None:
        added = self._vectors.apply(self._order[self.applied], self._ready.pop(self.applied))
        self._backlog.add(self._vectors.correction_bytes, added)
        self.applied += 1
        self._acked = False

    async def _part(self) -> None:
        if not self._leads:
            self._link.send(wire.Done())
            return
        try:
            if await self._receive(DONE_S, DONE_S) == wire.Done():
                self.one_sided = 0
        except PeerFault:
            pass  # everything is applied here; only the partner's last fragment is in doubt, and counted


async def _done(future: "Future[Any]") -> Any:
    return await asyncio.wrap_future(future)
