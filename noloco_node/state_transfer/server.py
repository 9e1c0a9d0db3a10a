"""A peer gives its live state to newcomers: state_transfer/client.py is the other end.

One copy of the state serves all who come within its life, in each coding that is asked for; what the training thread
pays for it is training/state_snapshot.py's affair. A few downloads go at once and share the volunteer's uplink, the
others wait in the order they came and are told their place. The numbers are opaque here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import grpc

from noloco_node.errors import NolocoError, PeerMisbehaved
from noloco_node.host.limits import MIN_RATE_BYTES_S
from noloco_node.host.traffic import Pace, Traffic
from noloco_node.state_transfer.client import StateTerms, aside
from noloco_node.version import PROTOCOL
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format
from noloco_node.wire.peer_pb2_grpc import StateServicer
from noloco_node.wire.state_format import Coding

AT_ONCE = 4
"""More would make each slower and none earlier."""
MAX_WAITING = 32
BUSY_S = 60.0
"""When somebody beyond that may come again."""
SAY_PLACE_S = 10.0
"""How often who waits is told so: within a newcomer's patience for one frame."""
TAKEN_S = 240.0
"""For one frame to be taken. As much as 6 MB may lie in buffers on the way before it: at the slowest rate that a
volunteer can set, they are read in 190 s."""
LEAST_BYTES_S = MIN_RATE_BYTES_S / 2
"""At which a state is taken in the long run. A slower one would keep its place for days from those who wait."""
SHARED_S = 20.0
"""How old a copy may be for somebody who begins with it."""
KEPT_S = 60.0
"""How long a copy outlives its last download: for one that broke off to go on."""
MAX_COPIES = 2
"""Of 8 bytes a parameter each, however slow those who download are. When both are in use, the newer one is given."""

log = logging.getLogger(__name__)


class StateOwner(Protocol):
    """What is needed of the training thread."""

    def live_state(self) -> "Future[tuple[int, memoryview]]": ...


class Callers(Protocol):
    """What is needed of the transport."""

    def caller(self, context: Any) -> str: ...


class StateCopy:
    """The state at one moment, as whoever downloads it sees it."""

    def __init__(self, round: int, numbers: memoryview, taken_at: float) -> None:
        self.taken_at = self.left_at = taken_at
        self.size = len(numbers)
        self.users = 0
        self._round, self._numbers = round, numbers
        self._versions: dict[Coding, wire.StateHeader] = {}

    def version(self, coding: Coding) -> wire.StateHeader:
        """Takes a second for a gigabyte, the first time."""
        if coding not in self._versions:
            total = coding.size(len(self._numbers) // 4)
            size = state_format.fragment_bytes(total)
            digests = b"".join(
                state_format.digest(coding.encode(self._numbers, start, min(start + size, total)))
                for start in range(0, total, size)
            )
            root = state_format.root(self._round, total, digests)
            self._versions[coding] = wire.StateHeader(self._round, total, root, digests)
        return self._versions[coding]

    def has(self, root: bytes) -> bool:
        return any(version.root == root for version in self._versions.values())

    def chunks(self, coding: Coding, start: int) -> Iterator[wire.StateChunk]:
        """From a byte on that begins a fragment, which is whole chunks but for the last one."""
        total = coding.size(len(self._numbers) // 4)
        for at in range(start, total, state_format.CHUNK_BYTES):
            yield wire.StateChunk(bytes(coding.encode(self._numbers, at, min(at + state_format.CHUNK_BYTES, total))))


class StateCopies:
    """The copies that are held: one as a rule, MAX_COPIES at most."""

    def __init__(self, giver: StateOwner) -> None:
        self._giver = giver
        self._held: list[StateCopy] = []
        self._coming: asyncio.Task[StateCopy] | None = None
        self._hashing = asyncio.Lock()

    async def version(self, root: bytes, coding: Coding) -> tuple[StateCopy, wire.StateHeader]:
        """The one of that root, or else one that is fresh. Raises NolocoError."""
        copy = self._fit(root)
        if copy is None:
            if self._coming is None:
                self._coming = asyncio.create_task(self._take())
                self._coming.add_done_callback(self._came)
            copy = await asyncio.shield(self._coming)
        async with self._hashing:
            version = await aside(copy.size, copy.version, coding)
        copy.left_at = asyncio.get_running_loop().time()  # it is about to be used
        return copy, version

    @contextmanager
    def using(self, copy: StateCopy) -> Iterator[None]:
        copy.users += 1
        try:
            yield
        finally:
            copy.users -= 1
            loop = asyncio.get_running_loop()
            copy.left_at = loop.time()
            loop.call_later(KEPT_S, self._tidy)

    def _fit(self, root: bytes) -> StateCopy | None:
        now = asyncio.get_running_loop().time()
        same = [copy for copy in self._held if root and copy.has(root)]
        fresh = [copy for copy in self._held if now - copy.taken_at <= SHARED_S]
        full = len(self._held) == MAX_COPIES and all(copy.users for copy in self._held)
        return next(iter([*same, *fresh[-1:], *(self._held[-1:] if full else [])]), None)

    async def _take(self) -> StateCopy:
        self._tidy()
        idle = [copy for copy in self._held if not copy.users]
        if idle and len(self._held) >= MAX_COPIES:
            self._held.remove(idle[0])
        round_, numbers = await asyncio.wrap_future(self._giver.live_state())
        copy = StateCopy(round_, numbers, asyncio.get_running_loop().time())
        self._held.append(copy)
        return copy

    def _came(self, _: asyncio.Task[StateCopy]) -> None:
        self._coming = None  # its result would outlive those that are held

    def _tidy(self) -> None:
        now = asyncio.get_running_loop().time()
        self._held = [copy for copy in self._held if copy.users or now - copy.left_at < KEPT_S]


class DownloadQueue:
    """Who downloads, and behind them who waits. A peer stands in it once: whoever calls again takes its own place."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def join(self, peer: str) -> "Ticket | None":
        """None where too many wait."""
        ticket = Ticket(self, peer)
        mine = [index for index, other in enumerate(self._tickets) if other.peer == peer]
        if mine:
            self._tickets[mine[0]].moved.set()
            self._tickets[mine[0]] = ticket
        elif len(self._tickets) >= AT_ONCE + MAX_WAITING:
            return None
        else:
            self._tickets.append(ticket)
        return ticket

    def place(self, ticket: "Ticket") -> int | None:
        """How many must end before its turn; None if it stands here no more."""
        return max(0, self._tickets.index(ticket) - AT_ONCE + 1) if ticket in self._tickets else None

    def leave(self, ticket: "Ticket") -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            for other in self._tickets:
                other.moved.set()


class Ticket:
    def __init__(self, queue: DownloadQueue, peer: str) -> None:
        self.peer = peer
        self.moved = asyncio.Event()
        self._queue = queue

    def look(self) -> int | None:
        """Its place, of which there will be `news`."""
        self.moved.clear()
        return self._queue.place(self)

    async def news(self) -> None:
        """Returns when the queue has moved since the last look, or after SAY_PLACE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SAY_PLACE_S):
                await self.moved.wait()


class _Reader:
    """Whoever a state is given to, who must take it: else its call ends. What counts is the time that frames wait for
    it, and not the time that they wait for this node's own uplink."""

    def __init__(self, call: "asyncio.Task[Any] | None", ended: Callable[[], None]) -> None:
        """`call`: the task in which it is answered."""
        self._call = call
        self._ended = ended
        self._given_bytes = 0
        self._waited_s = 0.0

    @contextmanager
    def taking(self, size_bytes: int) -> Iterator[None]:
        """While a frame of this size waits to be taken."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        in_the_long_run = TAKEN_S + self._given_bytes / LEAST_BYTES_S - self._waited_s
        timer = loop.call_later(min(TAKEN_S, in_the_long_run), self._give_up)
        try:
            yield
        finally:
            timer.cancel()
            self._given_bytes += size_bytes
            self._waited_s += loop.time() - began

    def _give_up(self) -> None:
        """Its place is free at once. Who still reads what is under way finds silence after it."""
        self._ended()
        if self._call:
            self._call.cancel()


Withholds = Callable[[int], bool]
"""Whether its volunteer's limits leave no room for a state beside so many bytes that are promised already."""


class PromisedBytes:
    """What those whose turn it is have still to get, of what the volunteer allows a day."""

    def __init__(self, withholds: Withholds) -> None:
        self._withholds = withholds
        self._bytes = 0

    def too_many(self) -> bool:
        """Whether there is no room for one more state."""
        return self._withholds(self._bytes)

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Calls what it gives for each part that is kept: sent, and counted as that."""
        left = size_bytes
        self._bytes += left

        def kept(part_bytes: int) -> None:
            nonlocal left
            left -= part_bytes
            self._bytes -= part_bytes

        try:
            yield kept
        finally:
            self._bytes -= left


class StateService(StateServicer):
    """`round`: where this node is."""

    def __init__(
        self,
        callers: Callers,
        round: Callable[[], int],
        pace: Pace | None = None,
        withholds: Withholds = lambda _: False,
    ) -> None:
        self._callers = callers
        self._round = round
        self._pace = pace or Traffic()
        self._promises = PromisedBytes(withholds)
        self._terms: StateTerms | None = None
        self._copies: StateCopies | None = None
        self._queue = DownloadQueue()

    def begin(self, terms: StateTerms, giver: StateOwner) -> None:
        self._terms, self._copies = terms, StateCopies(giver)

    async def Progress(self, request: pb.StateRequest, context: Any) -> pb.StateProgress:  # noqa: N802
        asked = self._understood(request)
        if isinstance(asked, wire.Refusal):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, asked.code.reason)
        return pb.StateProgress(round=self._round())

    async def Fetch(self, request: pb.StateRequest, context: Any) -> AsyncIterator[pb.StateFrame]:  # noqa: N802
        peer = self._callers.caller(context)
        asked = self._understood(request)
        if not isinstance(asked, wire.Refusal) and self._promises.too_many():
            asked = wire.Refusal(wire.Code.PAUSED)
        ticket = None if isinstance(asked, wire.Refusal) else self._queue.join(peer)
        if isinstance(asked, wire.Refusal):
            yield wire.encode_state(asked)
        elif ticket is None or self._copies is None:
            yield wire.encode_state(wire.Refusal(wire.Code.BUSY, retry_in_s=BUSY_S))
        else:
            reader = _Reader(asyncio.current_task(), lambda: self._too_slow(ticket))
            try:
                async with aclosing(_answer(asked, self._copies, ticket, self._promises)) as frames:
                    async for frame in frames:
                        message = wire.encode_state(frame)
                        await self._pace.sending(message.ByteSize())
                        with reader.taking(message.ByteSize()):
                            yield message
            except NolocoError as error:
                log.info("no state for %s: %s", peer, error)
                yield wire.encode_state(wire.Refusal(wire.Code.LEAVING))
            finally:
                self._queue.leave(ticket)

    def _too_slow(self, ticket: Ticket) -> None:
        log.info("%s does not take the state that it asked for", ticket.peer)
        self._queue.leave(ticket)

    def _understood(self, request: pb.StateRequest) -> wire.StateRequest | wire.Refusal:
        try:
            asked = wire.decode_state_request(request)
        except PeerMisbehaved as fault:
            log.debug("a request for the state: %s", fault)
            return wire.Refusal(wire.Code.INCOMPATIBLE)
        if self._terms is None:
            return wire.Refusal(wire.Code.BUSY, retry_in_s=1.0)
        same = asked.protocol == PROTOCOL and StateTerms(asked.run_id, asked.layout) == self._terms
        return asked if same else wire.Refusal(wire.Code.INCOMPATIBLE)


async def _answer(
    asked: wire.StateRequest, copies: StateCopies, ticket: Ticket, promises: PromisedBytes
) -> AsyncGenerator[wire.StateFrame, None]:
    while place := ticket.look():
        yield wire.StatePlace(place)
        await ticket.news()
    coming = asyncio.create_task(copies.version(asked.root, asked.coding))
    try:
        while not (await asyncio.wait({coming}, timeout=SAY_PLACE_S))[0]:
            yield wire.StatePlace(0)
    finally:
        coming.cancel()  # no harm to one that is done
    copy, version = coming.result()
    if promises.too_many():  # others may have the rest of the day's quota by now
        yield wire.Refusal(wire.Code.PAUSED)
        return
    first = asked.fragment if asked.root == version.root else 0
    log.info("giving %s the state of round %d (version %s)", ticket.peer, version.round, version.root.hex()[:12])
    start = first * state_format.fragment_bytes(version.total_bytes)
    with promises.of(version.total_bytes - start) as kept, copies.using(copy):
        yield replace(version, fragment=first)
        for chunk in copy.chunks(asked.coding, start):
            if ticket.look() is None:
                return
            kept(len(chunk.data))
            yield chunk
