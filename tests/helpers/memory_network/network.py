"""A network of peers inside one process, with delay, bandwidth, loss, partition and death: for tests and simulation.

The same surface as grpc.aio, as far as the stubs and servicers generated from proto/ use it. Messages are really
serialised, so sizes count and no object is shared. All time is `loop.time()` and all chance is the `rng` handed in:
on a `VirtualLoop`, two runs with the same seed are the same run.

What it simplifies: each pair of peers has its own link in each direction (a home's upload is not shared among its
partners), and a message that is lost is never sent again: the rest of its stream stays silent, as if the connection
hung, and only deadlines end it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import grpc
import grpc.aio
from memory_network.call import Call, Channel
from memory_network.server import PEER_PREFIX, Services
from memory_network.stream import Carry

from noloco_node.errors import NolocoError
from noloco_node.transport.interceptor import Context

DIAL_TIMEOUT_S = 15.0
"""How long a call tries to reach a peer that does not answer at all, as in transport/libp2p.py."""


@dataclass(slots=True)
class Link:
    """One direction between two peers."""

    delay_s: float
    bandwidth_bytes_s: float
    loss: float
    """The chance of each message to be lost."""
    _free_at: float = 0.0
    _under_way: deque[Callable[[], None]] = field(default_factory=deque)

    def carry(self, loop: asyncio.AbstractEventLoop, size_bytes: int, arrive: Callable[[], None]) -> None:
        now = loop.time()
        self._free_at = max(now, self._free_at) + size_bytes / self.bandwidth_bytes_s
        self._under_way.append(arrive)
        # The timer takes the oldest message, not this one: timers of the same instant fire in any order.
        loop.call_at(self._free_at + self.delay_s, self._arrived)

    def _arrived(self) -> None:
        self._under_way.popleft()()


class MemoryNetwork:
    def __init__(
        self, rng: Random, delay_s: float = 0.0, bandwidth_bytes_s: float = float("inf"), loss: float = 0.0
    ) -> None:
        self._rng = rng
        self._usual = (delay_s, bandwidth_bytes_s, loss)
        self._links: dict[tuple[str, str], Link] = {}
        self._members: dict[str, MemoryTransport] = {}
        self._group_of: dict[str, int] = {}
        self.places: dict[str, str] = {}
        """Of peers that are not on this machine."""
        self._calls: dict[Call, None] = {}  # a dict keeps the order in which they began; a set would not

    def join(self, peer_id: str) -> "MemoryTransport":
        """A new member. Others can call it once it is started; once it is closed, its id is free again."""
        return MemoryTransport(self, peer_id)

    def link(self, source: str, target: str) -> Link:
        """The link from one peer to another; its numbers may be changed at any time."""
        if (source, target) not in self._links:
            self._links[source, target] = Link(*self._usual)
        return self._links[source, target]

    def partition(self, groups: Iterable[Collection[str]]) -> None:
        """Only peers of the same group can call each other; the peers in no group form one more."""
        self._group_of = {peer: number for number, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        self._group_of = {}

    def vanish(self, peer: str) -> None:
        """The peer's process dies: the others see their connections to it break."""
        self._members.pop(peer, None)
        for call in [call for call in self._calls if peer in (call.source, call.target)]:
            call.break_off(dead=peer)

    # For the other modules of this folder.

    def admit(self, member: "MemoryTransport") -> None:
        if member.peer_id in self._members:
            raise NolocoError(f"{member.peer_id} is in this network already: close that one first")
        self._members[member.peer_id] = member

    def member(self, peer: str) -> "MemoryTransport | None":
        return self._members.get(peer)

    def connects(self, source: str, target: str) -> bool:
        return self._group_of.get(source) == self._group_of.get(target)

    def carrier(self, source: str, target: str) -> Carry:
        link, loop = self.link(source, target), asyncio.get_running_loop()

        def carry(size_bytes: int, arrive: Callable[[], None]) -> bool:
            if not self.connects(source, target) or (link.loss and self._rng.random() < link.loss):
                return False
            link.carry(loop, size_bytes, arrive)
            return True

        return carry

    def open(self, call: Call) -> None:
        """Carry the opening of a call to its target; a peer that is not there refuses it."""
        self._calls[call] = None
        if call.source not in self._members:
            call.fail(grpc.StatusCode.UNAVAILABLE)
        elif not self.carrier(call.source, call.target)(0, lambda: self._opened(call)):
            call.expire_in(DIAL_TIMEOUT_S, grpc.StatusCode.UNAVAILABLE)

    def _opened(self, call: Call) -> None:
        target = self._members.get(call.target)
        if target is None:
            call.break_off(dead=call.target)
        else:
            target.answer(call)

    def closed(self, call: Call) -> None:
        self._calls.pop(call, None)


class MemoryTransport:
    """One member of a `MemoryNetwork`; see `transport/base.py` for what its methods promise."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self.peer_id = peer_id
        self._network = network
        self._services = Services()
        self.given_back: list[str] = []
        """Callers whose calls do not count."""
        self._channels: dict[str, Channel] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def serve(self, add: Callable[[grpc.aio.Server], None]) -> None:
        add(cast(grpc.aio.Server, self._services))

    async def start(self) -> None:
        self._network.admit(self)

    async def close(self) -> None:
        if self._network.member(self.peer_id) is self:
            self._network.vanish(self.peer_id)
        for task in self._answers:
            task.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    def channel(self, peer: str) -> grpc.aio.Channel:
        if peer not in self._channels:
            self._channels[peer] = Channel(self._network, self.peer_id, peer)
        return cast(grpc.aio.Channel, self._channels[peer])

    def caller(self, context: Context) -> str:
        return str(context.peer()).removeprefix(PEER_PREFIX)

    def give_back(self, context: Context) -> None:
        self.given_back.append(self.caller(context))

    def place(self, context: Context) -> str:
        return self.place_of(self.caller(context))

    def place_of(self, peer: str) -> str:
        return self._network.places.get(peer, "127.0.0.1")

    def answer(self, call: Call) -> None:
        """A call has arrived: find its method and let a task of this member run it."""
        task = call.serve(self._services.find(call.method))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)


@asynccontextmanager
async def started(*members: Any) -> AsyncIterator[None]:
    """Transports, of this network or not: others can call them until the context ends."""
    try:
        for member in members:
            await member.start()
        yield
    finally:
        for member in members:
            await member.close()
