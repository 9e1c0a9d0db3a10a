"""One swap: two partners send each other every fragment of a vector, and apply what both have.

It knows frames, their order and their deadlines; what a payload holds is the codec's business, what a correction is
the training thread's. The rules:

- At most WINDOW fragments are under way beyond the last one that was applied, in each direction. Applied means handed
  to the training thread, which adds a correction between two of its steps: behind a long step corrections wait, of all
  swaps together no more than BACKLOG_BYTES. Then nothing more is read until some were added, but for a swap's last
  fragment. Both bounds together bound memory.
- What opens a fragment is small with lattice codes, and goes before codes that wait: the partner needs it for its own.
- Only a whole fragment or an acknowledgement is progress. A partner that makes none is given up after the time that its
  fragment takes on the slowest link that it may set itself and has to share, and never before `stall_s` of
  core/round.py. What bounds a slow swap as a whole is `MAX_LAG` there.
- A fragment is applied when both sides have the other's, whole and checked. One side leads: the other acknowledges, the
  leader applies and acknowledges, then the other applies. Fragments are applied one after the other, so a swap that
  fails leaves at most one that its leader applied and the other did not: `one_sided` counts what may be such a one, so
  both sides may count theirs. What was applied stays.
- The two lead in turn, the caller the last fragment. Who does not lead a fragment acknowledges it as soon as it is
  whole. The leader's Ack of one fragment shows that it applied the one before. So two are applied in a round trip.
- Each side bounds how far a fragment may move it (core/bounds.py). Who does not lead says by which factor it wants the
  correction multiplied, and the leader's acknowledgement has the smaller of both, which both use: so corrections stay
  exact opposites.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

from noloco_node.core.codecs.codec import CodecStats, Payload
from noloco_node.errors import PeerFault, PeerMisbehaved, PeerRefused
from noloco_node.host.limits import MIN_RATE_BYTES_S
from noloco_node.rounds.link import Link
from noloco_node.run import admission
from noloco_node.wire import messages as wire

DIVERGED = wire.Code.DIVERGED.reason
"""As this node itself found."""
PARTNER_DIVERGED = "partner_diverged"
"""The partner says that the two have diverged: its word proves nothing, it only ends the swap."""
WINDOW = 6
"""Fragments under way. 30 M elements in 3 bits, 500 Mbit/s, 100 ms there and back: 2.5 s with 4, 2.1 with 6 and 8."""
FRAME_S = 20.0
"""A partner that sends nothing for so long, not even a piece, is given up: that needs 26 kbit/s of a link."""
DONE_S = 5.0
"""How long to wait for the callee's Done; without it the last fragment counts as one-sided."""
SETTLING_SHARE = 1 / 2
"""Of `stall_s`: so long at most a swap waits for the verdict on the one before it, of the same round."""
SLOW_STREAMS = 4
"""A fragment may take as long as on a link of MIN_RATE_BYTES_S that this swap shares with three other streams."""
BACKLOG_BYTES = 256 << 20
"""Corrections that were handed over and not added yet: 67 M parameters in fp32, so smaller models never wait. 1 B
parameters at 1 Gbit/s and 4 bits would be 4 s of the link; with steps of 3 s they are 15 steps, where WINDOW fragments
a step would be 160. Small beside such a model's 16 GB."""

T = TypeVar("T")


class Vectors(Protocol):
    """One open offer (training/offer.py); its work is done on another thread. Payloads are opaque here, and a
    correction never comes here."""

    @property
    def fragments(self) -> int: ...
    @property
    def correction_bytes(self) -> int:
        """What the correction of one fragment holds in memory, at most."""

    def settled(self) -> "Future[None]":
        """Done when it is known whether what earlier partners of the round did stays."""

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]": ...
    def receive(self, index: int, payload: Payload) -> "Future[bytes | float]":
        """What to send next, or the factor that our bounds allow: the correction is whole, and `apply` adds it."""

    def apply(self, index: int, scale: float) -> "Future[None]":
        """Done when the correction was added, or never will be, as other weights came; in the order of the calls.
        OutOfMemory: it was not."""

    def stats(self) -> "Future[CodecStats]":
        """How well the swap's fragments were coded, once every `apply` has been passed on."""


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
        """Waits until one more of this size may wait; alone it always may."""
        while (waiting := self.bytes) and waiting + size_bytes > self._limit_bytes:
            await asyncio.gather(asyncio.wrap_future(self._waiting[0][1]), return_exceptions=True)  # its swap will see


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
        """`leads`: this side leads the last fragment. `stall_s`: how long a partner may make no progress, or longer
        where a fragment needs it."""
        self._link = link
        self._vectors = vectors
        self._exchange_id = exchange_id
        self._order = order
        self._place = {index: place for place, index in enumerate(order)}
        self._leads = leads
        self._stall_s = stall_s
        self._backlog = backlog
        self._opened = 0
        self._whole: dict[int, float] = {}
        """The factors that we allow, by places in the order, of corrections that are whole: at most a window."""
        self._allowed = 0.0
        """The sum of our own factors, of all corrections so far."""
        self._acked: dict[int, float] = {}
        """The factors that the partner allows, by places that we lead."""
        self._sent: dict[int, int] = {}
        """The link's number of our last frame, by places under way."""
        self._added: list[Future[None]] = []
        """The corrections that were handed over, without those at the front that were added."""
        self._fragment_bytes = 0
        """Of the largest payload: with most codecs the second of a fragment, after one of a few kB."""
        self.applied = 0
        self.one_sided = 0
        self.stats = CodecStats()
        """When the swap is over."""

    async def run(self) -> None:
        """Swap everything. Raises what broke it: PeerFault, or NonFinite where our own vector is at fault."""
        self._link.begin_swap(as_caller=self._leads)
        await self._settled()
        while self.applied < len(self._order):
            self._require_added()
            may_lead = self.applied in self._whole and self.applied in self._acked
            if not may_lead:  # else first our word, for which the partner waits
                await self._open_ahead()
            if self.applied + 1 < len(self._order):  # the last one's leader waits for Done, and for less than a step
                await self._backlog.room(self._vectors.correction_bytes)  # each pass has one more added at most
            if may_lead:
                self._lead()
                continue
            match await self._link.receive_whole(FRAME_S, self._stall_s):
                case wire.Fragment(index, payload):
                    await self._at_fragment(index, payload)
                case wire.Ack(index, scale):
                    self._at_ack(index, scale)
                case wire.Refusal(wire.Code.DIVERGED):
                    raise PeerFault(PARTNER_DIVERGED)
                case wire.Refusal(code) if code.reason in admission.WHY:
                    raise PeerRefused(code.reason)
                case frame:
                    raise PeerMisbehaved("unexpected_frame", type(frame).__name__)
        self.stats = await _done(self._vectors.stats())
        await self._finish()

    @property
    def progress(self) -> float:
        """0 to 1. Of the fragment that is next to be applied, the bytes count that went in the slower direction: on a
        slow link it may take phases."""
        moved = min(self._link.sent_bytes, self._link.received_bytes) / max(1, self._fragment_bytes)
        return min(max(moved, self.applied), self.applied + 1) / len(self._order)

    @property
    def allowed(self) -> float:
        """What our own bounds leave of the corrections, in the mean; once all are whole."""
        return self._allowed / len(self._order)

    async def _settled(self) -> None:
        """Wait until what an earlier partner of the round did wrong is not passed on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLING_SHARE * self._stall_s):
                await asyncio.wrap_future(self._vectors.settled())

    async def _open_ahead(self) -> None:
        while self._opened < min(self.applied + WINDOW, len(self._order)):
            index = self._order[self._opened]
            self._opened += 1
            self._send(index, await _done(self._vectors.open(index, self._exchange_id)), first=True)

    def _send(self, index: int, payload: bytes, *, first: bool = False) -> None:
        self._fragment_bytes = max(self._fragment_bytes, len(payload))
        self._stall_s = max(self._stall_s, SLOW_STREAMS * len(payload) / MIN_RATE_BYTES_S)
        self._sent[self._place[index]] = self._link.send(wire.Fragment(index, payload), first=first)

    async def _at_fragment(self, index: int, payload: Payload) -> None:
        place = self._place.get(index, -1)
        if not self.applied <= place < self._opened or place in self._whole:
            raise PeerMisbehaved("out_of_window", f"fragment {index}")
        answer = await _done(self._vectors.receive(index, payload))
        if isinstance(answer, bytes):
            self._send(index, answer)
        else:
            self._whole[place] = answer
            self._allowed += answer
            if not self._leads_at(place):
                self._link.send(wire.Ack(index, answer), first=True)

    def _leads_at(self, place: int) -> bool:
        return self._leads == ((len(self._order) - place) % 2 == 1)

    def _at_ack(self, index: int, scale: float) -> None:
        place = self._place.get(index, -1)
        if not self._link.has_sent(self._sent.get(place, -1)):  # else who reads nothing could have all of ours wait
            raise PeerMisbehaved("bad_ack", f"fragment {index}, which was not sent yet")
        if self._leads_at(place):
            if not self.applied <= place < self._opened or place in self._acked:
                raise PeerMisbehaved("bad_ack", f"fragment {index}")
            self._acked[place] = scale
        elif place != self.applied or place not in self._whole:
            raise PeerMisbehaved("bad_ack", f"fragment {index} before ours")
        elif scale > (allowed := self._whole[place]):
            raise PeerMisbehaved("bad_scale", f"{scale:g} where we allow {allowed:g}")
        else:
            self.one_sided = 0  # the partner applied all before this one
            self._apply(scale)

    def _lead(self) -> None:
        """Apply the next fragment first: both have it, and we lead it."""
        place = self.applied
        scale = min(self._whole[place], self._acked.pop(place))
        self._link.send(wire.Ack(self._order[place], scale), first=True)
        self._apply(scale)
        self.one_sided = 1

    def _apply(self, scale: float) -> None:
        del self._whole[self.applied], self._sent[self.applied]
        added = self._vectors.apply(self._order[self.applied], scale)
        self._backlog.add(self._vectors.correction_bytes, added)
        self._added.append(added)
        self.applied += 1

    def _require_added(self) -> None:
        """Raises what kept a correction from being added, which the partner has added: no more of them get lost."""
        while self._added and self._added[0].done():
            if lost := self._added.pop(0).exception():
                self.one_sided += 1
                raise lost

    async def _finish(self) -> None:
        if not self._leads:
            self._link.send(wire.Done())
            return
        try:
            if await self._link.receive_whole(DONE_S, DONE_S) == wire.Done():
                self.one_sided = 0
        except PeerFault:
            pass  # everything is applied here; only the partner's last fragment is in doubt, and counted


async def _done(future: "Future[T]") -> T:
    return await asyncio.wrap_future(future)
