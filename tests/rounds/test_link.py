"""Neither end of a link runs ahead of the other: what libp2p says to the one waits behind what the other has sent."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from virtual_clock import run_virtual
from virtual_nodes import done

from noloco_node.core.codecs.codec import CodecStats, Payload
from noloco_node.errors import PeerMisbehaved
from noloco_node.host.traffic import Traffic
from noloco_node.rounds import link as link_module
from noloco_node.rounds.link import (
    AHEAD_BYTES,
    ALIVE_S,
    FIRST_BYTES,
    HOLD_S,
    LEAST_BYTES_S,
    UNKNOWN_AHEAD_BYTES,
    Link,
)
from noloco_node.rounds.pieces import QUICK_S
from noloco_node.rounds.swap import Backlog, Swap
from noloco_node.wire import messages as wire

FRAME_BYTES = 48 << 10
OFFER = wire.Offer(1, bytes(32), bytes(32), bytes(16), 1, 1.0)


def sent_at(round_trip_s: float | None, heard: dict[float, int], frames: int) -> list[float]:
    """When a link sends each of so many frames, whose partner's bytes come at these times."""

    async def main() -> list[float]:
        link, clock = Link(), asyncio.get_running_loop().time

        async def incoming() -> AsyncIterator[bytes]:
            for at, size in heard.items():
                await asyncio.sleep(at - clock())
                yield wire.to_bytes(wire.Fragment(0, bytes(size)))
            await asyncio.Event().wait()

        link.listen(incoming())
        link.round_trip_s = round_trip_s
        link.begin_swap(as_caller=False)

        async def read() -> None:
            while True:
                await link.receive_whole(100, 100)

        reading = asyncio.create_task(read())
        for k in range(frames):
            link.send(wire.Fragment(k, bytes(FRAME_BYTES)))
        link.close()
        times = [clock() async for _ in link.outgoing()]
        reading.cancel()
        return times

    return run_virtual(main())


def test_a_partner_that_is_behind_is_waited_for_but_not_for_ever() -> None:
    at_once = AHEAD_BYTES // FRAME_BYTES + 1
    times = sent_at(0.0, {}, 6)
    assert times == pytest.approx([0.0] * at_once + [HOLD_S * (k + 1) for k in range(6 - at_once)], abs=0.01)


async def test_an_answer_to_an_offer_goes_before_the_swap_s_frames() -> None:
    """A small fragment may go before what waits, but not before the word that there is a swap."""
    link = Link()
    link.send(wire.Refusal(wire.Code.APPOINTMENT, 1.0))
    link.send(wire.Accept())
    link.begin_swap(as_caller=False)
    link.send(wire.Fragment(0, bytes(1000)), first=True)
    link.close()
    assert [type(wire.from_bytes(frame)) for frame in [f async for f in link.outgoing()]] == [
        wire.Refusal,
        wire.Accept,
        wire.Fragment,
    ]


def test_what_has_come_lets_as_much_go() -> None:
    times = sent_at(0.0, {0.1 * k: FRAME_BYTES for k in range(1, 6)}, 8)
    assert times[3:] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5], abs=0.01)


def test_a_link_that_is_held_is_never_silent_for_long() -> None:
    """Something comes all the time, and never enough."""
    times = sent_at(0.0, {0.2 * k: 1 for k in range(1, 200)}, 10)
    assert max(late - early for early, late in itertools.pairwise(times)) <= ALIVE_S + 0.01


@pytest.mark.parametrize(
    ("round_trip_s", "ahead"), [(0.1, AHEAD_BYTES + 0.1 * LEAST_BYTES_S), (None, UNKNOWN_AHEAD_BYTES)]
)
def test_on_a_far_link_more_is_under_way(round_trip_s: float | None, ahead: float) -> None:
    assert sent_at(round_trip_s, {}, 40).count(0.0) == pytest.approx(ahead / FRAME_BYTES, abs=1.01)


async def test_who_has_not_been_checked_costs_no_quota_and_sends_little() -> None:
    traffic = Traffic()
    link = Link(traffic)

    async def said() -> AsyncIterator[bytes]:
        yield wire.to_bytes(OFFER)
        yield wire.to_bytes(OFFER) + bytes(FIRST_BYTES)

    link.listen(said())
    assert await link.receive(1.0) == OFFER
    with pytest.raises(PeerMisbehaved, match="too_large"):
        await link.receive(1.0)
    assert traffic.used.received == 0


def test_what_comes_in_a_round_trip_may_be_under_way() -> None:
    quick = 10 * LEAST_BYTES_S
    times = sent_at(0.1, {0.2: int(0.2 * quick)}, 400)
    at_once = sum(0.19 < at < 0.21 for at in times)
    assert at_once * FRAME_BYTES == pytest.approx(0.3 * quick, rel=0.1), "as much as has come, and a round trip's"


def test_on_a_quick_link_more_is_under_way() -> None:
    """128 kB are 20 ms at 50 Mbit/s, and 3 at 300: both sides stood still after each piece."""
    quick = 10 * LEAST_BYTES_S
    times = sent_at(0.001, {0.2: int(0.2 * quick)}, 400)
    at_once = sum(at < 0.21 for at in times)
    assert at_once * FRAME_BYTES == pytest.approx((0.2 + QUICK_S + 0.001) * quick, rel=0.01)


async def late(frames: AsyncIterator[bytes], delay_s: float) -> AsyncIterator[bytes]:
    async for frame in frames:
        await asyncio.sleep(delay_s)
        yield frame


def test_the_caller_tells_how_long_a_round_trip_takes() -> None:
    async def main() -> tuple[float | None, float | None]:
        caller, callee = Link(), Link()
        caller.listen(late(callee.outgoing(), 0.03))
        callee.listen(late(caller.outgoing(), 0.02))
        caller.send(OFFER)
        await callee.receive(10)
        callee.send(wire.Accept())
        await caller.receive(10)
        for link in (caller, callee):
            link.begin_swap(as_caller=link is caller)
        caller.send(wire.Done())
        await callee.receive_whole(10, 10)
        return caller.round_trip_s, callee.round_trip_s

    assert run_virtual(main()) == pytest.approx((0.05, 0.05))


# ---- what this is for ----
class Codes:
    """Fragments whose opening is small and whose codes are large, as those of lattice codes."""

    correction_bytes = 100
    fragments = 40

    def __init__(self) -> None:
        self.applied = 0

    def settled(self) -> "Future[None]":
        return done(None)

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        return done(b"opens")

    def receive(self, index: int, payload: Payload) -> "Future[bytes | float]":
        return done(bytes(500_000) if payload == b"opens" else 1.0)

    def apply(self, index: int, scale: float) -> "Future[None]":
        self.applied += 1
        return done(None)

    def stats(self) -> "Future[CodecStats]":
        return done(CodecStats())


@dataclass
class Way:
    """One direction of a connection with flow control: what was taken from it lets more go, once the half of a window
    was; that word goes the other way, in order with all that is sent there."""

    bytes_s: float
    window: int
    delay_s: float = 0.01
    queue: "asyncio.Queue[bytes | int]" = field(default_factory=asyncio.Queue)
    allowed: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: "asyncio.Queue[bytes]" = field(default_factory=asyncio.Queue)

    async def send(self, frames: AsyncIterator[bytes]) -> None:
        self.allowed = self.window
        async for frame in frames:
            while self.allowed <= 0:
                self.more.clear()
                await self.more.wait()
            self.allowed -= len(frame)
            self.queue.put_nowait(frame)

    async def carry(self, back: "Way") -> None:
        while True:
            match await self.queue.get():
                case bytes() as frame:
                    await asyncio.sleep(len(frame) / self.bytes_s)
                    asyncio.get_running_loop().call_later(self.delay_s, self.arrived.put_nowait, frame)
                case word:
                    asyncio.get_running_loop().call_later(self.delay_s, back.allow, word)

    def allow(self, more: int) -> None:
        self.allowed += more
        self.more.set()

    async def received(self, back: "Way") -> AsyncIterator[bytes]:
        taken = 0
        while True:
            frame = await self.arrived.get()
            taken += len(frame)
            if 2 * taken >= self.window:
                back.queue.put_nowait(taken)
                taken = 0
            yield frame


def swap_s(windows: tuple[int, int]) -> float:
    """How long a swap of 20 MB takes at 20 Mbit/s, over two directions of these windows. The limit is 8 s."""

    async def main() -> float:
        ways, links = [Way(2.5e6, window) for window in windows], (Link(), Link())
        tasks = []
        for link, out, back in zip(links, ways, reversed(ways), strict=True):
            link.listen(back.received(out))
            link.round_trip_s = 0.02
            tasks += [asyncio.create_task(out.send(link.outgoing())), asyncio.create_task(out.carry(back))]
        swaps = [
            Swap(link, Codes(), bytes(16), range(40), leads=k == 0, stall_s=60, backlog=Backlog())
            for k, link in enumerate(links)
        ]
        await asyncio.gather(*(swap.run() for swap in swaps))
        for task in tasks:
            task.cancel()
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_where_one_direction_has_the_larger_window_both_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = (1 << 20, 256 << 10)
    assert swap_s(windows) < 9
    monkeypatch.setattr(link_module, "AHEAD_BYTES", 1 << 30)
    assert swap_s(windows) > 11, "as it was"
