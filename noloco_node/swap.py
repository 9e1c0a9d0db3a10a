"""One swap: two partners tell each other every fragment of a vector, and apply what both have.

It knows frames, their order and their deadlines; what a payload holds is the codec's business, what a correction is
the training thread's. The rules:

- At most WINDOW fragments are under way beyond the last one that was applied, in each direction: that bounds memory
  and keeps the link full.
- A fragment is applied when both sides hold the other's, whole and screened. The follower says so first, the leader
  (who called) applies and says so, then the follower applies. Fragments are applied one after the other, so a break
  leaves at most one that the leader applied and the follower did not: `one_sided` counts it. What was applied stays.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from noloco_node.errors import PeerFault, PeerLost, PeerMisbehaved
from noloco_node.transport.base import peer_faults
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb

WINDOW = 4
"""Fragments under way: enough that a link of 100 ms and 1 Gbit/s stays full with fragments of a few MiB."""
FRAME_S = 30.0
"""A partner that sends no frame for so long is given up: a fragment of 4 MiB needs 1.2 Mbit/s."""
DONE_S = 5.0
"""For the follower's last word; without it the last fragment counts as one-sided."""


class Heard(Protocol):
    @property
    def say(self) -> bytes | None: ...
    @property
    def correction(self) -> Any: ...


class Vectors(Protocol):
    """One open offer, as the codec thread keeps it. Payloads and corrections are opaque here."""

    @property
    def round(self) -> int: ...
    @property
    def fragments(self) -> int: ...
    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]": ...
    def hear(self, index: int, payload: bytes) -> "Future[Any]":
        """Gives what is `Heard`."""

    def apply(self, index: int, correction: Any) -> None: ...


class Link:
    """Frames to and from one partner over one gRPC stream, each with a deadline; counts bytes."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[pb.SwapFrame | None] = asyncio.Queue()
        self._incoming: AsyncIterator[pb.SwapFrame] | None = None
        self.sent_bytes = 0
        self.received_bytes = 0

    def listen(self, incoming: AsyncIterator[pb.SwapFrame]) -> None:
        self._incoming = incoming

    def send(self, frame: wire.Frame) -> None:
        """Never blocks: the swap's window bounds what can lie in the outbox."""
        self._outbox.put_nowait(wire.encode(frame))

    def close(self) -> None:
        self._outbox.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[pb.SwapFrame]:
        while (message := await self._outbox.get()) is not None:
            self.sent_bytes += message.ByteSize()
            yield message

    async def receive(self, deadline_s: float) -> wire.Frame:
        if self._incoming is None:
            raise PeerLost("not_connected")
        try:
            async with asyncio.timeout(deadline_s):
                with peer_faults():
                    message = await anext(self._incoming)
        except TimeoutError:
            raise PeerLost("silent", f"no frame for {deadline_s:g} s") from None
        except StopAsyncIteration:
            raise PeerLost("hung_up") from None
        self.received_bytes += message.ByteSize()
        return wire.decode(message)


class Swap:
    def __init__(self, link: Link, vectors: Vectors, exchange_id: bytes, order: Sequence[int], *, leads: bool) -> None:
        self._link = link
        self._vectors = vectors
        self._exchange_id = exchange_id
        self._order = order
        self._place = {index: place for place, index in enumerate(order)}
        self._leads = leads
        self._opened = 0
        self._ready: dict[int, Any] = {}  # place -> correction; at most WINDOW of them
        self._acked = False
        """Leader: the follower holds the next fragment. Follower: we have said that we hold it."""
        self.applied = 0
        self.one_sided = 0

    async def run(self) -> None:
        """Swap everything. Raises what broke it: PeerFault, or NonFinite where our own vector is at fault."""
        await self._open_ahead()
        while self.applied < len(self._order):
            match await self._link.receive(FRAME_S):
                case wire.Fragment(index, payload):
                    await self._hear(index, payload)
                case wire.Ack(index):
                    self._hear_ack(index)
                case frame:
                    raise PeerMisbehaved("unexpected_frame", type(frame).__name__)
            await self._open_ahead()
        await self._part()

    async def _open_ahead(self) -> None:
        while self._opened < min(self.applied + WINDOW, len(self._order)):
            index = self._order[self._opened]
            self._opened += 1
            self._link.send(wire.Fragment(index, await _done(self._vectors.open(index, self._exchange_id))))

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
        self._vectors.apply(self._order[self.applied], self._ready.pop(self.applied))
        self.applied += 1
        self._acked = False

    async def _part(self) -> None:
        if not self._leads:
            self._link.send(wire.Done())
            return
        try:
            if await self._link.receive(DONE_S) == wire.Done():
                self.one_sided = 0
        except PeerFault:
            pass  # everything is applied here; only the partner's last fragment is in doubt, and counted


async def _done(future: "Future[Any]") -> Any:
    return await asyncio.wrap_future(future)
