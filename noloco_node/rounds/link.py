"""Frames to and from one partner over one gRPC stream: in pieces, each with a deadline, at the volunteer's rate.

A volunteer may limit upload and download (host/traffic.py), so that a fragment takes minutes. A deadline limits
silence, not slowness: a large frame travels in pieces (rounds/pieces.py), a link without anything to send sends Alive,
and each piece or Alive starts a fresh deadline. Waiting for our own limit has no such deadline.

Both sides send the same, and neither runs ahead of the other. libp2p's streams (yamux) have windows, which grow by a
round trip that is measured at some moment, so that one direction may have 256 kB and the other a megabyte. What opens a
window again waits behind all that we have sent: the side with the larger one filled its queue, and the other stood
still meanwhile. On links of 20 Mbit/s swaps took half as long again.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress

from noloco_node.errors import PeerFault, PeerLost, PeerMisbehaved
from noloco_node.host.traffic import Traffic
from noloco_node.rounds import pieces
from noloco_node.transport.base import next_message
from noloco_node.wire import messages as wire

ALIVE_S = 5.0
"""A link that has sent nothing for so long sends Alive: three of these may be late before a partner gives up."""
MOST_ALIVE = 100
"""Beyond one each second: what was late may come at once."""
AHEAD_BYTES = 128 << 10
"""A link waits for its partner when sent - received exceeds max(AHEAD_BYTES, what arrives in pieces.QUICK_S), plus what
arrives in one round trip. Both have the same to send, with every codec. Eight nodes, 50 Mbit/s, 30 M elements: 2.9 to
3.0 s with 128 kB, 2.8 to 3.8 with 400; from 512 on it is as without a limit."""
LEAST_BYTES_S = 4e6
"""What is taken to come in at least: nothing has, at first."""
UNKNOWN_AHEAD_BYTES = 1 << 20
"""Before the caller has said how long a round trip takes."""
HOLD_S = 0.25
"""A partner that sends nothing for so long waits for us: then one piece goes."""
FIRST_BYTES = 1 << 10
"""Of a frame before a swap: an offer with a token has 180."""
SMALL_BYTES = 128 << 10
"""Of a frame that may go first: twice what opens the largest fragment with lattice codes."""


class Link:
    def __init__(self, pace: Traffic | None = None) -> None:
        self._pace = pace or Traffic()
        self._outbox: list[tuple[int, int, bytes | None]] = []
        """A heap."""
        self._changed = asyncio.Event()
        self._put = itertools.count()
        self._waiting: set[int] = set()
        """What `outgoing` has not given away."""
        self._incoming: AsyncIterator[bytes] | None = None
        self._assembly = pieces.Assembly()
        self._idle_s: float | None = None
        self._began = 0.0
        self._alive = 0
        """Received."""
        self._offered_at: float | None = None
        self.round_trip_s: float | None = None
        """From our offer to its answer; None: not known."""
        self._swap_began = 0.0
        self._dropped = 0
        """Frames queued before this are not sent any more."""
        self.ending = False
        """Our last frame is queued, for a partner that still reads."""
        self.sent_bytes = 0
        self.received_bytes = 0

    def listen(self, incoming: AsyncIterator[bytes]) -> None:
        self._incoming, self._began = incoming, asyncio.get_running_loop().time()

    # ---- sending ----
    def send(self, frame: wire.Frame, *, first: bool = False) -> int:
        """Never blocks: the swap's window bounds what can lie in the outbox. `first`: before what waits there, if it is
        small. Returns a number for `has_sent`."""
        whole = wire.to_bytes(frame)
        first = (first or self._idle_s is None) and len(whole) <= SMALL_BYTES  # nothing goes before an answer
        if isinstance(frame, wire.Offer):  # which waits for nothing
            self._offered_at = asyncio.get_running_loop().time()
        return [self._post(piece, first=first) for piece in pieces.cut(whole, pieces.largest(self._bytes_s))][-1]

    def has_sent(self, number: int) -> bool:
        return number not in self._waiting

    def _post(self, piece: bytes | None, *, first: bool = False) -> int:
        number = next(self._put)
        self._waiting.add(number)
        heapq.heappush(self._outbox, (int(not first), number, piece))
        self._changed.set()
        return number

    def begin_swap(self, *, as_caller: bool) -> None:
        """From now on, never be silent for longer than ALIVE_S."""
        self._idle_s, self._swap_began = ALIVE_S, asyncio.get_running_loop().time()
        self._changed.set()
        if as_caller:
            self.send(wire.Alive(self.round_trip_s or 0.0))

    def drop(self) -> None:
        """Send nothing of what still waits: the swap has failed."""
        self._dropped = next(self._put)
        self._outbox.clear()
        self._waiting.clear()

    def end_with(self, frame: wire.Frame) -> None:
        """The swap has failed: send this instead of what still waits, and nothing after it."""
        self.drop()
        self.send(frame, first=True)
        self.close()
        self.ending = True

    def close(self) -> None:
        """Send nothing after what waits."""
        self._post(None)

    async def outgoing(self) -> AsyncIterator[bytes]:
        while True:
            put, piece = await self._next_out()
            if piece is None:
                return
            size = len(piece)
            await self._pace.sending(size)
            self._waiting.discard(put)
            if put >= self._dropped:
                self.sent_bytes += size
                yield piece

    async def _next_out(self) -> tuple[int, bytes | None]:
        clock = asyncio.get_running_loop().time
        silent_since = clock()
        while not (self._outbox and self._may_send()):
            self._changed.clear()
            deadlines = [] if self._idle_s is None else [silent_since + self._idle_s]
            if self._outbox:
                deadlines.append(clock() + HOLD_S)
            try:
                async with asyncio.timeout_at(min(deadlines, default=None)):
                    await self._changed.wait()
            except TimeoutError:
                if not self._outbox:
                    return next(self._put), wire.to_bytes(wire.Alive())
                break
        return heapq.heappop(self._outbox)[1:]

    def _may_send(self) -> bool:
        later, _, piece = self._outbox[0]
        return not later or piece is None or self.sent_bytes - self.received_bytes <= self._most_ahead

    @property
    def _most_ahead(self) -> float:
        if self.round_trip_s is None:
            return UNKNOWN_AHEAD_BYTES
        in_time = max(LEAST_BYTES_S, self._bytes_s) * self.round_trip_s
        return max(AHEAD_BYTES, self._bytes_s * pieces.QUICK_S) + in_time

    @property
    def _bytes_s(self) -> float:
        """What came in, on average of the swap."""
        lasted_s = asyncio.get_running_loop().time() - self._swap_began
        return self.received_bytes / max(lasted_s, self.round_trip_s or 0.0, pieces.QUICK_S)

    # ---- receiving ----
    async def receive(self, deadline_s: float) -> wire.Frame:
        """The next frame, before a swap, which is small. Not at the volunteer's rate, nor of the day's quota: anybody
        may send one."""
        message = await self._next_in(deadline_s, paced=False)
        if len(message) > FIRST_BYTES:
            raise PeerMisbehaved("too_large", f"{len(message)} bytes before a swap")
        return wire.from_bytes(message)

    async def receive_whole(self, silence_s: float, stall_s: float) -> wire.Frame:
        """The next frame of a swap. `silence_s`: without a message; `stall_s`: with signs of life or pieces only."""
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(stall_s):
                while True:
                    match self._assembly.add(await self._next_in(silence_s)):
                        case None:
                            pass
                        case wire.Alive(round_trip_s):
                            self.round_trip_s = self.round_trip_s or round_trip_s or None
                            self._alive += 1
                            if self._alive > MOST_ALIVE + now() - self._began:
                                raise PeerMisbehaved("too_many_frames", "signs of life")
                        case frame:
                            return frame
        except TimeoutError:
            raise PeerLost("stalled", f"no progress for {stall_s:g} s") from None

    async def wait_for_end(self, deadline_s: float) -> None:
        """Waits until the partner ends the stream: it has received our last frame then."""
        with suppress(PeerFault, TimeoutError):
            async with asyncio.timeout(deadline_s):
                while True:
                    await self._next_in(deadline_s)

    async def _next_in(self, deadline_s: float, *, paced: bool = True) -> bytes:
        if self._incoming is None:
            raise PeerLost("not_connected")
        if paced:
            await self._pace.receiving()
        message = await next_message(self._incoming, deadline_s)
        size = len(message)
        if paced:
            self._pace.received(size)
        self.received_bytes += size
        if self._outbox:
            self._changed.set()
        if self._offered_at is not None and self.round_trip_s is None:
            self.round_trip_s = asyncio.get_running_loop().time() - self._offered_at
        return message
