"""The gRPC service that sends this node's live state to joining nodes; state_transfer/client.py is the other end.

AT_ONCE downloads run at a time and share the volunteer's uplink; others queue in the order in which they came, and are
sent their place. A slow reader would hold its turn for days and leave the uplink idle: it reads on beside the turns.
What is sent is a copy (state_transfer/copies.py).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from noloco_node.base.latest import Seldom
from noloco_node.base.peer_names import name_of
from noloco_node.errors import NolocoError, PeerFault, PeerRefused
from noloco_node.host.limits import MIN_RATE_BYTES_S
from noloco_node.host.policy import Policy
from noloco_node.run.admission import Refuses, refuses_nobody
from noloco_node.state_transfer.client import StateTerms
from noloco_node.state_transfer.copies import StateCopies, StateOwner
from noloco_node.state_transfer.cross_check import BLOCKS
from noloco_node.transport import base
from noloco_node.transport.base import taken
from noloco_node.version import PROTOCOL
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format
from noloco_node.wire.peer_pb2_grpc import StateServicer

AT_ONCE, OF_PLACE = 4, 2
"""More at a time would make each slower and none end earlier; and of these from one place (base/places.py), and only
one where another place waits, so that slow readers of a few hosts leave turns for others. Who reads already goes on, so
six may read."""
MAX_WAITING = 32
"""Beyond that, the place that has most in the queue gives one up for another place."""
SAY_PLACE_S = 10.0
"""How often a waiting caller is sent its place: more often than its timeout for one frame (client.FRAME_S)."""
LEAST_BYTES_S = MIN_RATE_BYTES_S / 2
"""Mean rate at which a caller must read. A slower one would hold its place in the queue for days."""
SLOW_S, SLOW_BYTES_S = 10.0, 2 * MIN_RATE_BYTES_S
"""Who reads at a lower mean rate, beside so many seconds, leaves its turn to others. Of an uplink of 2 Mbit/s, on which
each of AT_ONCE seems slow, more of them then get a part at once."""
MAX_SLOW = 8
"""So many read on. Beyond that, the place that has several of them gives one up; where none has, turns are kept."""
SAMPLE_EVERY_S, SAMPLES_OF_PLACE, SAMPLES_A_MINUTE = 2.0, 2, 60
"""How often one caller is sent blocks of the weights, and how often a minute all callers, or in longer where the upload
is limited: 64 KiB a second at most, as newcomers ask for BLOCKS, and who asks for more counts as several. A place has
less than one in so many of those that are left: 20 where it is the only one. With a fixed 20, three places had all."""
SAMPLE_BYTES = 4 * wire.MAX_SAMPLE_BLOCKS * wire.BLOCK

log = logging.getLogger(__name__)


class DownloadQueue:
    """Downloads under way, and behind them those that wait. A peer is in it once: a second call takes its place."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def join(self, peer: str, place: str) -> "Ticket | None":
        """None where too many wait already, and no place has more of them than this one would have."""
        ticket = Ticket(self, peer, place)
        mine = [index for index, other in enumerate(self._tickets) if other.peer == peer]
        if mine:
            before = self._tickets[mine[0]]
            before.moved.set()
            ticket.slow = before.slow  # no turn for who calls again and again
            self._tickets[mine[0]] = ticket
        elif len(self._tickets) < AT_ONCE + MAX_WAITING or self._send_one_away(place):
            self._tickets.append(ticket)
        else:
            return None
        return ticket

    def place(self, ticket: "Ticket") -> int | None:
        """How many come before it, beside those whose turn it is; None if it is no longer in the queue."""
        if ticket not in self._tickets:
            return None
        waiting = self._waiting()
        return waiting.index(ticket) + 1 if ticket in waiting else 0

    def slows_down(self, ticket: "Ticket") -> None:
        """Its turn is for others; it is served all the same."""
        if ticket.slow or self.place(ticket):  # who waits and does not read its place gets no turn by that
            return
        ticket.slow = True
        slow = [other for other in self._tickets if other.slow]
        if len(slow) > MAX_SLOW:
            sizes = Counter(other.at for other in slow)
            last = max(reversed(slow), key=lambda other: sizes[other.at])
            if sizes[last.at] == 1:
                ticket.slow = False
                return
            self.leave(last)
        self._moved()

    def _waiting(self) -> "list[Ticket]":
        served, waiting = Counter[str](), [ticket for ticket in self._tickets if not ticket.slow]
        for most in range(1, OF_PLACE + 1):  # a place's first turn comes before any other place's second
            for ticket in waiting[:]:
                if served.total() < AT_ONCE and served[ticket.at] < most:
                    served[ticket.at] += 1
                    waiting.remove(ticket)
        return waiting

    def _send_one_away(self, place: str) -> bool:
        """The last one of the place that has most, if it has more than this one would have."""
        sizes = Counter(ticket.at for ticket in self._tickets)
        last = max(reversed(self._waiting()), key=lambda ticket: sizes[ticket.at])
        if sizes[last.at] <= sizes[place] + 1:
            return False
        self.leave(last)
        last.moved.set()
        return True

    def leave(self, ticket: "Ticket") -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._moved()

    def _moved(self) -> None:
        for ticket in self._tickets:
            ticket.moved.set()


class Ticket:
    def __init__(self, queue: DownloadQueue, peer: str, at: str) -> None:
        """`at`: the place of the peer."""
        self.peer, self.at = peer, at
        self.slow = False
        """Whether it is served beside the turns."""
        self.moved = asyncio.Event()
        self._queue = queue

    def place(self) -> int | None:
        """Its place; `changed` waits for a change of it."""
        self.moved.clear()
        return self._queue.place(self)

    async def changed(self, place: int) -> None:
        """Returns when its place is another one than this, or after SAY_PLACE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SAY_PLACE_S):
                while self.place() == place:
                    await self.moved.wait()


class _Reader:
    """Ends the call of a peer that reads too slowly. Only the time counts that frames wait for the peer, not the time
    that they wait for this node's own --max-upload."""

    def __init__(self, slows_down: Callable[[], None], gives_up: Callable[[], None]) -> None:
        """`gives_up`: its place in the queue is free at once; the peer still gets what is in the buffers."""
        self._slows_down, self._gives_up = slows_down, gives_up
        self._sent_bytes = 0
        self._waited_s = 0.0

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """While a frame of this size waits to be read."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        in_the_long_run = base.TAKEN_S + self._sent_bytes / LEAST_BYTES_S - self._waited_s
        slow = loop.call_later(SLOW_S + self._sent_bytes / SLOW_BYTES_S - self._waited_s, self._slows_down)
        try:
            with taken(in_the_long_run, self._gives_up):
                yield
        finally:
            slow.cancel()
            self._sent_bytes += size_bytes
            self._waited_s += loop.time() - began


class ReservedBytes:
    """Upload bytes reserved for downloads under way, counted against the day's quota."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._bytes = self.state_bytes = 0

    def has_room(self) -> bool:
        """For one more state, by the quota; not in a pause: a node that joins while everybody pauses would have to
        begin from nothing."""
        return self._policy.room_to_give(self.state_bytes, self._bytes)

    def has_room_for_sample(self) -> bool:
        return self._policy.room_to_give(SAMPLE_BYTES, self._bytes)

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """The context's value is to be called for each part that was sent: that counts as traffic from then on."""
        left = size_bytes
        self._bytes += left

        def sent(part_bytes: int) -> None:
            nonlocal left
            left -= part_bytes
            self._bytes -= part_bytes

        try:
            yield sent
        finally:
            self._bytes -= left


class _Samples:
    """Who was sent a sample in the last minute, or longer: a larger one counts as several."""

    def __init__(self, upload_bytes_s: float | None = None) -> None:
        """`upload_bytes_s`: what the volunteer allows, of which samples take a quarter at most: swaps wait for them."""
        of_all = 4 * wire.BLOCK * BLOCKS * SAMPLES_A_MINUTE
        self._within_s = max(60.0, 4 * of_all / upload_bytes_s) if upload_bytes_s else 60.0
        self._sent: deque[tuple[float, str, str]] = deque()

    def may_have_one(self, peer: str, place: str, blocks: int, now: float) -> bool:
        while self._sent and self._sent[0][0] <= now - self._within_s:
            self._sent.popleft()
        lately = any(other == peer and at > now - SAMPLE_EVERY_S for at, other, _ in self._sent)
        of_place, more = sum(where == place for _, _, where in self._sent), -(-blocks // BLOCKS)
        left = SAMPLES_A_MINUTE - len(self._sent) - (more - 1)
        if lately or SAMPLES_OF_PLACE * (of_place + more - 1) >= left:
            return False
        self._sent.extend([(now, peer, place)] * more)
        return True


class StateService(StateServicer):
    """`caller`: the peer id of who calls; `place`: where it is (base/places.py); `progress`: round and held-out loss of
    this node, now."""

    def __init__(
        self,
        caller: Callable[[Any], str],
        place: Callable[[Any], str],
        progress: Callable[[], tuple[int, float | None]],
        policy: Policy,
    ) -> None:
        self._caller, self._place, self._progress = caller, place, progress
        self._samples = _Samples(policy.max_upload)
        self._pace = policy.traffic
        self._reserved = ReservedBytes(policy)
        self._terms: StateTerms | None = None
        self._refuses_peer: Refuses = refuses_nobody
        self._copies: StateCopies | None = None
        self._queue = DownloadQueue()
        self._says = Seldom()

    def begin(
        self, terms: StateTerms, owner: StateOwner, state_bytes: int, refuses_peer: Refuses = refuses_nobody
    ) -> None:
        self._terms, self._refuses_peer, self._reserved.state_bytes = terms, refuses_peer, state_bytes
        self._copies = StateCopies(owner, lambda: self._progress()[0])

    def weights_replaced(self) -> None:
        """By a peer's, or by those of a checkpoint."""
        if self._copies:
            self._copies.forget()

    async def Progress(self, request: pb.StateRequest, context: Any) -> pb.StateProgress:  # noqa: N802
        try:
            self._agreed(self._caller(context), wire.decode_state_request(request))
        except NolocoError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._code(error).reason)
        return pb.StateProgress(round=self._progress()[0])

    async def Sample(self, request: pb.SampleRequest, context: Any) -> pb.StateSample:  # noqa: N802
        try:
            sample = await self._sample(self._caller(context), self._place(context), request)
        except NolocoError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._code(error).reason)
        await self._pace.giving(sample.ByteSize())
        return sample

    async def _sample(self, peer: str, place: str, request: pb.SampleRequest) -> pb.StateSample:
        """Raises PeerFault, and NolocoError where the training has ended."""
        asked = wire.decode_sample_request(request)
        copies = self._agreed(peer, asked)
        who = peer, place, len(asked.blocks), asyncio.get_running_loop().time()
        if not self._reserved.has_room_for_sample() or not self._samples.may_have_one(*who):
            raise PeerRefused(wire.Code.BUSY.reason)
        round_, blocks = await asyncio.wrap_future(copies.owner.sample(asked.blocks))
        return wire.encode_sample(wire.StateSample(round_, self._progress()[1], blocks))

    async def Fetch(self, request: pb.StateRequest, context: Any) -> AsyncIterator[pb.StateFrame]:  # noqa: N802
        peer, ticket = self._caller(context), None
        try:
            asked = wire.decode_state_request(request)
            copies = self._agreed(peer, asked)
            if not self._reserved.has_room():
                raise PeerRefused(wire.Code.PAUSED.reason)
            ticket = self._queue.join(peer, self._place(context))
            if ticket is None:
                raise PeerRefused(wire.Code.BUSY.reason)
            reader = _Reader(partial(self._queue.slows_down, ticket), partial(self._too_slow, ticket))
            async with aclosing(_answer(asked, copies, ticket, self._reserved, self._log)) as frames:
                async for frame in frames:
                    message = wire.encode_state(frame)
                    await self._pace.giving(message.ByteSize())
                    with reader.taking(message.ByteSize()):
                        yield message
        except NolocoError as error:
            with taken():
                yield wire.encode_state(wire.Refusal(self._code(error)))
        finally:
            if ticket:
                self._queue.leave(ticket)

    def _too_slow(self, ticket: Ticket) -> None:
        self._log("%s reads the state that it asked for too slowly", ticket.peer)
        self._queue.leave(ticket)

    def _code(self, error: NolocoError) -> wire.Code:
        """What the caller is told. What is its own fault is not logged for all to see: it could fill the log."""
        (log.debug if isinstance(error, PeerFault) else self._log)("no state for a peer: %s", error)
        match error:
            case PeerRefused():
                return wire.Code[error.reason.upper()]
            case PeerFault():  # what came is no request
                return wire.Code.INCOMPATIBLE
        return wire.Code.LEAVING

    def _log(self, line: str, *args: object) -> None:
        log.log(logging.INFO if self._says() else logging.DEBUG, line, *args)

    def _agreed(self, peer: str, asked: wire.StateRequest | wire.SampleRequest) -> StateCopies:
        """Raises PeerRefused where this peer is not served."""
        if self._copies is None:
            raise PeerRefused(wire.Code.BUSY.reason)
        if asked.protocol != PROTOCOL or StateTerms(asked.run_id, asked.layout) != self._terms:
            raise PeerRefused(wire.Code.INCOMPATIBLE.reason)
        if why := self._refuses_peer(peer, asked.admission):
            raise PeerRefused(why)
        return self._copies


async def _answer(
    asked: wire.StateRequest, copies: StateCopies, ticket: Ticket, reserved: ReservedBytes, say: Callable[..., None]
) -> AsyncGenerator[wire.StateFrame, None]:
    while place := ticket.place():
        yield wire.StatePlace(place)
        await ticket.changed(place)
    if place is None:
        raise PeerRefused(wire.Code.BUSY.reason)
    making = asyncio.create_task(copies.version(asked.root, asked.coding, ticket.at))
    try:
        while not (await asyncio.wait({making}, timeout=SAY_PLACE_S))[0]:
            yield wire.StatePlace(0)
    finally:
        making.cancel()  # no harm to one that is done
    copy, version = making.result()
    if not reserved.has_room():  # others may have used the day's quota while this one waited
        raise PeerRefused(wire.Code.PAUSED.reason)
    first = asked.fragment if asked.root == version.root else 0
    if first > state_format.fragments(version.total_bytes):
        raise PeerRefused(wire.Code.INCOMPATIBLE.reason)
    name, digest = name_of(ticket.peer), version.root.hex()[:12]
    say("sending %s the state of round %d (version %s)", name, version.round, digest)
    start = first * state_format.fragment_bytes(version.total_bytes)
    with reserved.of(version.total_bytes - start) as sent, copies.using(copy, lambda: ticket.slow):
        yield replace(version, fragment=first)
        for chunk in copy.chunks(asked.coding, start):
            if ticket.place() is None:
                raise PeerRefused(wire.Code.BUSY.reason)
            sent(len(chunk.data))
            yield chunk
    if first == 0:
        copies.was_read(ticket.at)
