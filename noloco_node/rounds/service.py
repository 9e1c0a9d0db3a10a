"""Outer rounds over gRPC: the calls, answers, swaps and timers around core/round.py.

It carries out the state machine's actions and reports how they ended; every decision is made there. It moves opaque
bytes and never imports torch: an offer's work is done on the codec thread, behind the `Vectors` protocol, and the
result of a round goes out as an event. It does not know the DHT: node/trainer.py passes the candidates.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import grpc

from noloco_node.base.events import Event, PeerFaulted, RoundCommitted, TakenBack, WentSolo
from noloco_node.base.latest import remember
from noloco_node.core import fragments, round_events
from noloco_node.core import round as core
from noloco_node.core.partners import Random
from noloco_node.core.standing import Standing
from noloco_node.core.verdict import SOMEBODY, Verdict
from noloco_node.errors import NonFinite, OutOfMemory, PeerFault, PeerMisbehaved, PeerRefused
from noloco_node.host.traffic import Traffic
from noloco_node.rounds.link import Link
from noloco_node.rounds.swap import DIVERGED, Backlog, Swap, Vectors
from noloco_node.run.admission import Refuses, refuses_nobody
from noloco_node.transport.base import HUNG_UP, connected, taken_to_the_end
from noloco_node.version import PROTOCOL
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb

OFFER_S = 10.0
"""How long a caller's first frame may take."""
TIMER_S = 1e-3
"""uvloop's timers count whole milliseconds: one that fired before its time was set again, a dozen times at once."""
LAST_FRAME_S = 2.0
"""How long the partner may take to receive why a swap failed."""
MAX_CALLERS = 32
"""Calls answered at once, so that a flood holds a bounded number of streams. For a further one, one is refused as busy
that has made no offer yet: of a stranger rather than of a known peer, and of the place that has the most."""
EVENT_LINE = 200
"""Characters: a long list of candidates is cut."""
PARTNERS = 512
"""Exchanges whose partner is remembered: a verdict on their corrections comes a few rounds later."""
LONGER = 1.5
"""So much longer a round trip is taken to be than at the last call, at most: a peer may have moved."""
UNKNOWN_ROUND_TRIP_S = 0.3
"""... and at the first call to a peer: half of it is the way to a satellite and back."""
MEMORY = 4096
"""Exchange ids remembered against replay: hours of rounds, 200 KiB."""

EXCHANGE, SWAP = pb.DESCRIPTOR.services_by_name["Exchange"].full_name, "Swap"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What two nodes must have in common to swap."""

    run_id: bytes
    layout: bytes
    fragments: int
    admission: bytes = field(default=b"", compare=False)
    """This node's token."""


class Channels(Protocol):
    """The part of a transport that is used."""

    @property
    def peer_id(self) -> str: ...
    def channel(self, peer: str) -> grpc.aio.Channel: ...
    def caller(self, context: Any) -> str: ...
    def place(self, context: Any) -> str:
        """Where the caller is, as base/places.py says."""


class RoundListener(Protocol):
    """What the training thread must know of a round."""

    def swapping(self, under_way: bool, source: frozenset[str] = SOMEBODY) -> None:
        """`source`: who the partner is, and where (core/verdict.py)."""

    def round_over(self, round: int) -> None: ...


@dataclass(slots=True)
class RoundTotals:
    """Counts of this node's calls and swaps, for status and metrics."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    unsettled_bytes: int = 0
    """Of those sent: in the swap under way, which is no round's yet."""
    one_sided: int = 0


@dataclass(slots=True)
class _Caller:
    place: str
    known: bool
    """A candidate, or a partner before."""
    link: Link
    offered: bool = False


@dataclass(frozen=True, slots=True)
class _SwapUnderWay:
    peer: str
    link: Link
    swap: Swap
    started: float


def swap_over(channel: grpc.aio.Channel, outgoing: AsyncIterator[bytes]) -> Any:
    """The call, whose messages are bytes in both directions."""
    return channel.stream_stream(f"/{EXCHANGE}/{SWAP}")(outgoing)  # type: ignore[call-arg]  # its stubs want codecs


def answer_swaps(server: Any, answer: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]) -> None:
    """As the generated function adds a servicer, without its codec."""
    method = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXCHANGE, {SWAP: method}),))


class RoundService:
    def __init__(
        self,
        channels: Channels,
        random: Random,
        trainer: RoundListener,
        observe: Callable[[Event], None],
        *,
        pace: Traffic | None = None,
    ) -> None:
        self._channels = channels
        self._machine = core.Round(random, channels.peer_id)
        self._trainer = trainer
        self._observe = observe
        self._terms: RoundTerms | None = None
        self._refuses: Refuses = refuses_nobody
        self._pace = pace
        self._offers: dict[int, Vectors] = {}
        self._all_closed = asyncio.Event()
        self._verdicts: dict[
            bytes, asyncio.Queue[round_events.Accept | round_events.Appoint | round_events.Refuse]
        ] = {}
        self._stay_s = 0.0  # how long our call with an appointment waits: there is one call at a time
        self._tasks: dict[bytes, asyncio.Task[None]] = {}  # by exchange: our calls, and swaps with callers
        self._callers: dict[str, _Caller] = {}
        self._under_way: _SwapUnderWay | None = None
        self._backlog = Backlog()
        self._links: set[Link] = set()
        self._seen: dict[tuple[str, bytes], None] = {}
        self._partners: dict[bytes, tuple[int, str]] = {}
        """Round and partner of the latest exchanges."""
        self._round_trips: dict[str, float] = {}
        """By peer, as far as calls to it have shown."""
        self._timer: asyncio.TimerHandle | None = None
        self._totals = RoundTotals()

    # ---- for node/trainer.py ----
    def begin(
        self,
        terms: RoundTerms,
        swaps: int | None = 1,
        *,
        blocking: bool = False,
        refuses: Refuses = refuses_nobody,
    ) -> None:
        """From here on calls are answered; before, the node has no vector to offer and answers `busy`. `swaps`,
        `blocking`: as in core/round_events.py. Again, where the run was amended."""
        self._terms, self._refuses = terms, refuses
        self._handle(round_events.Settings(swaps, blocking))

    def boundary(self, round: int, phase_s: float, offer: Vectors | None, closed: str | None) -> None:
        if offer is not None:
            self._offers[round] = offer
            self._all_closed.clear()
        progress = self._under_way.swap.progress if self._under_way else None
        self._handle(round_events.Boundary(round, phase_s, closed, progress))

    def candidates(self, places: Mapping[str, str], own: str = "") -> None:
        """Who may be called: the place (base/places.py) of each peer, and this node's own."""
        self._handle(round_events.Candidates(places, own))

    def standing(self, peer: str) -> Standing:
        return self._machine.partners.standing(peer, asyncio.get_running_loop().time())

    def standings(self) -> Mapping[str, Standing]:
        """Of all peers of which this node has seen something itself."""
        return {peer: self.standing(peer) for peer in self._machine.partners.ledger.peers}

    def judged(self, exchange: bytes, verdict: Verdict, loss_with: float, loss_without: float) -> None:
        """What the corrections of this exchange did to the model."""
        if exchange not in self._partners:
            return
        round, partner = self._partners[exchange]
        if verdict.harmful:
            self._observe(TakenBack(round, partner, loss_with, loss_without))
        self._handle(round_events.Judged(partner, verdict, exchange))

    def misbehaved(self, peer: str, reason: str) -> None:
        """It did something else than a swap that the protocol does not allow."""
        self._observe(PeerFaulted(peer, reason))
        self._handle(round_events.Misbehaved(peer, reason))

    def stop(self) -> None:
        """Make and accept no more calls; a swap under way goes on."""
        self._handle(round_events.Closing(round_events.LEAVING))

    def pause(self, reason: str) -> None:
        """As `stop`, until `resume`; rounds that end meanwhile are solo for this reason."""
        self._handle(round_events.Closing(reason))

    def resume(self) -> None:
        self._handle(round_events.Resuming())

    @property
    def partner(self) -> str | None:
        """The peer of the swap under way."""
        return self._under_way.peer if self._under_way else None

    @property
    def tally(self) -> RoundTotals:
        """Including what is under way."""
        return replace(
            self._totals,
            sent_bytes=self._totals.sent_bytes + sum(link.sent_bytes for link in self._links),
            received_bytes=self._totals.received_bytes + sum(link.received_bytes for link in self._links),
            unsettled_bytes=self._under_way.link.sent_bytes if self._under_way else 0,
        )

    def event_log(self) -> list[str]:
        """The latest events of the state machine, one a line, by the seconds since: for a bug report."""
        now = asyncio.get_running_loop().time()
        return [f"{at - now:9.3f} s  {event!r}"[:EVENT_LINE] for at, event in self._machine.log]

    async def settled(self) -> None:
        """Waits until no offer is open and no swap under way. The caller sets the deadline."""
        if self._offers:
            await self._all_closed.wait()

    async def close(self) -> None:
        self.stop()  # so that what is cancelled below is not tried again with somebody else
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer:
            self._timer.cancel()
        self._offers.clear()

    # ---- the machine ----
    def _handle(self, event: round_events.Event) -> None:
        loop = asyncio.get_running_loop()
        for action in self._machine.handle(event, loop.time()):
            self._perform(action)
        if self._timer:
            self._timer.cancel()
        wake_at = self._machine.wake_at()
        self._timer = None if wake_at is None else loop.call_at(wake_at + TIMER_S, self._handle, round_events.Tick())

    def _perform(self, action: round_events.Action) -> None:
        match action:
            case round_events.Call(exchange):
                self._totals.calls += 1
                task = self._tasks[exchange] = asyncio.create_task(self._call(action))
                task.add_done_callback(lambda task: self._called(exchange, task))
            case round_events.HangUp(exchange):
                if exchange in self._tasks:
                    self._tasks[exchange].cancel()
            case round_events.Accept(exchange) | round_events.Appoint(exchange) | round_events.Refuse(exchange):
                if exchange in self._verdicts:
                    self._verdicts[exchange].put_nowait(action)
            case round_events.Stay(_, deadline_s):
                self._stay_s = deadline_s
            case round_events.Begin():
                pass  # the call's own task goes on to swap
            case round_events.EndRound():
                self._end_round(action)
            case round_events.Further(round, partner, swap):
                self._committed(round, partner, swap)
            case round_events.CloseOffer(round):
                self._close_offer(round)

    def _end_round(self, end: round_events.EndRound) -> None:
        if end.reason is None and end.partner is not None:
            self._committed(end.round, end.partner, 1)
        else:
            self._observe(WentSolo(end.round, end.reason or "", end.partner, end.applied, end.one_sided))
        self._trainer.round_over(end.round)
        if not end.further:
            self._close_offer(end.round)

    def _committed(self, round: int, partner: str, swap: int) -> None:
        if self._under_way:
            link, seconds = self._under_way.link, asyncio.get_running_loop().time() - self._under_way.started
            sent, received = link.sent_bytes, link.received_bytes
            stats, allowed = self._under_way.swap.stats, self._under_way.swap.allowed
            quality = (stats.missed_share, stats.relative_error)
            self._observe(RoundCommitted(round, partner, seconds, sent, received, *quality, swap, allowed))

    def _close_offer(self, round: int) -> None:
        self._offers.pop(round, None)
        if not self._offers:
            self._all_closed.set()

    # ---- calling ----
    async def _call(self, call: round_events.Call) -> None:
        link = self._link()
        stream = None
        try:
            stream = swap_over(self._channels.channel(call.peer), link.outgoing())
            link.listen(aiter(stream))
            clock = asyncio.get_running_loop().time
            until = clock() + call.deadline_s
            await connected(stream, call.deadline_s)  # that takes several round trips, and the link measures one
            link.send(self._offer(call))
            await self._wait_for_answer(call, link, until - clock())
            if link.ending:
                await link.wait_for_end(LAST_FRAME_S)
        except PeerFault as fault:
            self._blame_for_call(call.peer, fault)
            self._handle(round_events.Unanswered(call.exchange, fault.reason))
        finally:
            self._count(link)
            link.close()
            if stream is not None:
                stream.cancel()

    async def _wait_for_answer(self, call: round_events.Call, link: Link, within_s: float) -> None:
        answer = await link.receive(within_s)
        if isinstance(answer, wire.Refusal) and answer.code is wire.Code.APPOINTMENT:
            self._handle(round_events.Appointed(call.exchange, answer.retry_in_s))
            answer = await link.receive(self._stay_s)
        match answer:
            case wire.Refusal(code, retry_in_s):
                self._handle(round_events.Refused(call.exchange, code.reason, retry_in_s))
            case wire.Accept(token) if why := self._refuses(call.peer, token):
                self._handle(round_events.Refused(call.exchange, why, 0.0))
                link.end_with(wire.Refusal(wire.Code[why.upper()]))
            case wire.Accept():
                self._note_round_trip(call.peer, link)
                self._handle(round_events.Accepted(call.exchange))
                if self._machine.swapping == call.exchange and (ours := self._machine.offered) is not None:
                    await self._swap(call.exchange, call.peer, ours, link, leads=True)
            case _:
                raise PeerMisbehaved("unexpected_frame", type(answer).__name__)

    def _note_round_trip(self, peer: str, link: Link) -> None:
        """An answer may have waited until another call was answered, or for a busy machine."""
        if link.round_trip_s:
            most = LONGER * self._round_trips[peer] if peer in self._round_trips else UNKNOWN_ROUND_TRIP_S
            link.round_trip_s = min(link.round_trip_s, most)
            remember(self._round_trips, peer, link.round_trip_s, PARTNERS)

    def _called(self, exchange: bytes, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(exchange, None)
        if not task.cancelled() and (error := task.exception()):
            log.error("a call ended by a fault of our own", exc_info=error)
            self._handle(round_events.Unanswered(exchange, "internal"))

    def _offer(self, call: round_events.Call) -> wire.Offer:
        terms = self._terms
        if terms is None:
            raise PeerRefused("busy")
        return wire.Offer(
            PROTOCOL,
            terms.run_id,
            terms.layout,
            call.exchange,
            terms.fragments,
            call.patience_s,
            terms.admission,
        )

    # ---- being called ----
    def add_to(self, server: Any) -> None:
        """A Link reads and writes the messages' bytes itself."""
        answer_swaps(server, self._answer_stream)

    async def _answer_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        peer, place = self._channels.caller(context), self._channels.place(context)
        link = self._link()
        link.listen(aiter(requests))
        call = asyncio.current_task()
        answering = asyncio.create_task(self._answer(peer, place, link))
        answering.add_done_callback(lambda _: taken_to_the_end(call))  # the swap itself has its own deadlines
        try:
            async for message in link.outgoing():
                yield message
        finally:
            answering.cancel()
            self._count(link)
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer(self, peer: str, place: str, link: Link) -> None:
        try:
            await self._answer_call(peer, place, link)
        except PeerRefused as no:
            link.send(wire.Refusal(wire.Code[no.reason.upper()], no.retry_in_s))
        except PeerFault as fault:
            self._blame_for_call(peer, fault)
        except Exception:
            log.exception("an answer ended by a fault of our own")
        finally:
            link.close()

    async def _answer_call(self, peer: str, place: str, link: Link) -> None:
        if peer in self._callers:
            raise PeerRefused("busy")
        caller = self._callers[peer] = _Caller(
            place, self._machine.partners.knows(peer, asyncio.get_running_loop().time()), link
        )
        if len(self._callers) > MAX_CALLERS:
            self._send_one_away()
        try:
            offer = await link.receive(OFFER_S)
            if self._callers.get(peer) is not caller:
                return  # sent away meanwhile
            caller.offered = True
            if not isinstance(offer, wire.Offer):
                raise PeerMisbehaved("unexpected_frame", type(offer).__name__)
            self._check(peer, offer)
            verdict = await self._verdict(peer, place, offer, link)
            if isinstance(verdict, round_events.Refuse):
                raise PeerRefused(verdict.reason, verdict.retry_in_s)
            link.send(wire.Accept(self._terms.admission if self._terms else b""))
            await self._swap(verdict.exchange, peer, verdict.round, link, leads=False)
        finally:
            if self._callers.get(peer) is caller:
                del self._callers[peer]

    def _send_one_away(self) -> None:
        """Of those without an offer the first one, a stranger if there is one, of the place that has the most."""
        sizes = Counter(caller.place for caller in self._callers.values())
        silent = [peer for peer, caller in self._callers.items() if not caller.offered]
        least = min(silent, key=lambda p: (self._callers[p].known, -sizes[self._callers[p].place]))
        self._callers.pop(least).link.end_with(wire.Refusal(wire.Code.BUSY))

    def _check(self, peer: str, offer: wire.Offer) -> None:
        """Refuse an offer that does not fit ours, and one that was seen before."""
        if self._terms is None:
            raise PeerRefused("busy")
        if offer.protocol != PROTOCOL or RoundTerms(offer.run_id, offer.layout, offer.fragments) != self._terms:
            self._observe(PeerFaulted(peer, "incompatible"))  # counted, but no fault: it may be of another version
            raise PeerRefused("incompatible")
        if why := self._refuses(peer, offer.admission):
            raise PeerRefused(why)
        identity, used = (peer, offer.exchange_id), (self._verdicts, self._tasks, self._partners)
        if identity in self._seen or any(offer.exchange_id in exchanges for exchanges in used):
            self.misbehaved(peer, "stale")
            raise PeerRefused("stale")  # each caller draws its own: an id that was used is a replay, from any sender
        remember(self._seen, identity, None, MEMORY)

    async def _verdict(
        self, peer: str, place: str, offer: wire.Offer, link: Link
    ) -> round_events.Accept | round_events.Refuse:
        exchange = offer.exchange_id
        verdicts = self._verdicts[exchange] = asyncio.Queue()
        try:
            self._handle(round_events.Called(exchange, peer, offer.patience_s, place))
            while isinstance(verdict := await verdicts.get(), round_events.Appoint):
                link.send(wire.Refusal(wire.Code.APPOINTMENT, verdict.in_s))
            return verdict
        except asyncio.CancelledError:
            self._handle(round_events.CallerGone(exchange))
            raise
        finally:
            del self._verdicts[exchange]

    # ---- swapping ----
    async def _swap(self, exchange: bytes, peer: str, round: int, link: Link, *, leads: bool) -> None:
        vectors = self._offers[round]
        order, stall_s = fragments.order(vectors.fragments, exchange), self._machine.stall_s
        remember(self._partners, exchange, (round, peer), PARTNERS)
        swap = Swap(link, vectors, exchange, order, leads=leads, stall_s=stall_s, backlog=self._backlog)
        self._under_way = _SwapUnderWay(peer, link, swap, asyncio.get_running_loop().time())
        if task := asyncio.current_task():
            self._tasks[exchange] = task
        self._trainer.swapping(True, self._machine.partners.source(peer))
        heard = link.received_bytes
        reason: str | None = HUNG_UP  # the result when this task is cancelled
        faulty = False
        try:
            await swap.run()
            reason = None
        except PeerFault as fault:
            reason = fault.reason
            faulty = reason == DIVERGED or isinstance(fault, PeerMisbehaved)
            self._blame(peer, fault)
        except NonFinite:
            reason = "nonfinite"
        except OutOfMemory:
            reason = "no_memory"
        finally:
            self._trainer.swapping(False)
            if reason == HUNG_UP and not leads and link.received_bytes == heard:
                reason = core.CALLER_GONE
            if reason == DIVERGED:  # the other end may not have found it yet, and must count it too
                link.end_with(wire.Refusal(wire.Code.DIVERGED))
            elif reason is not None:
                link.drop()
            self._totals.one_sided += swap.one_sided
            self._handle(round_events.SwapEnded(exchange, reason, swap.applied, swap.one_sided, faulty))
            self._under_way = None
            self._tasks.pop(exchange, None)

    def _link(self) -> Link:
        link = Link(self._pace)
        self._links.add(link)
        return link

    def _count(self, link: Link) -> None:
        self._links.discard(link)
        self._totals.sent_bytes += link.sent_bytes
        self._totals.received_bytes += link.received_bytes

    def _blame_for_call(self, peer: str, fault: PeerFault) -> None:
        self._blame(peer, fault)
        if isinstance(fault, PeerMisbehaved):
            self._handle(round_events.Misbehaved(peer, fault.reason))

    def _blame(self, peer: str, fault: PeerFault) -> None:
        log.debug("%s: %s", peer, fault)
        if isinstance(fault, PeerMisbehaved):
            self._observe(PeerFaulted(peer, fault.reason))
