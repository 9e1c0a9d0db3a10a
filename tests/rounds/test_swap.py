"""One swap between two partners joined directly: all is applied once, and a break leaves at most one side ahead."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_clock import run_virtual
from virtual_nodes import done

from noloco_node.core import fragments
from noloco_node.core.codecs.codec import CodecStats, Payload
from noloco_node.errors import OutOfMemory, PeerFault, PeerLost, PeerMisbehaved
from noloco_node.rounds import pieces
from noloco_node.rounds.link import Link
from noloco_node.rounds.swap import DONE_S, SLOW_STREAMS, WINDOW, Backlog, Swap
from noloco_node.wire import messages as wire

EXCHANGE = b"\x05" * 16
STALL_S = 60.0


class Words:
    """Vectors whose fragments are short texts, sent in `turns` turns."""

    correction_bytes = 100

    def __init__(self, name: str, count: int, turns: int = 1) -> None:
        self.name, self.fragments, self.turns = name, count, turns
        self.received: dict[int, int] = {}
        self.applied: list[int] = []
        self.allowed = 1.0
        self.scales: list[float] = []
        self.under_way = self.most_under_way = 0

    def settled(self) -> "Future[None]":
        return done(None)

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return done(f"{self.name} {index} 0".encode())

    def receive(self, index: int, payload: Payload) -> "Future[bytes | float]":
        turn = self.received[index] = self.received.get(index, 0) + 1
        _, theirs, said = bytes(payload).decode().split()
        if (int(theirs), int(said)) != (index, turn - 1):
            raise PeerMisbehaved("bad_payload", bytes(payload).decode())
        last = turn == self.turns
        return done(self.allowed if last else f"{self.name} {index} {turn}".encode())

    def apply(self, index: int, scale: float) -> "Future[None]":
        self.under_way -= 1
        self.applied.append(index)
        self.scales.append(scale)
        return done(None)

    def stats(self) -> "Future[CodecStats]":
        return done(CodecStats())


class Behind(Words):
    """Corrections wait until a step ends."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count)
        self.waiting: deque[Future[None]] = deque()

    def apply(self, index: int, scale: float) -> "Future[None]":
        super().apply(index, scale)
        self.waiting.append(Future())
        return self.waiting[-1]

    def end_step(self) -> int:
        """How many had waited."""
        waited = len(self.waiting)
        while self.waiting:
            self.waiting.popleft().set_result(None)
        return waited


class Cut:
    """Lets so many frames through, then the stream breaks."""

    def __init__(self, frames: int | None) -> None:
        self.left = frames

    async def through(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for frame in frames:
            if self.left is not None:
                if self.left == 0:
                    return
                self.left -= 1
            yield frame


async def late(frames: AsyncIterator[bytes], delay_s: float) -> AsyncIterator[bytes]:
    """Each comes so long after it was sent, however many are under way."""
    clock = asyncio.get_running_loop().time
    under_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()

    async def send() -> None:
        async for frame in frames:
            under_way.put_nowait((clock() + delay_s, frame))
        under_way.put_nowait((clock() + delay_s, None))

    sending = asyncio.create_task(send())
    try:
        while (arrival := await under_way.get())[1] is not None:
            await asyncio.sleep(arrival[0] - clock())
            yield arrival[1]
    finally:
        sending.cancel()


async def meet(  # noqa: PLR0917
    a: Words,
    b: Words,
    cut_a: int | None = None,
    cut_b: int | None = None,
    backlog_bytes: int = 10**6,
    within_s: float = 60,
    delay_s: float = 0.0,
) -> list[Any]:
    links = Link(), Link()
    links[0].listen(late(Cut(cut_b).through(links[1].outgoing()), delay_s))
    links[1].listen(late(Cut(cut_a).through(links[0].outgoing()), delay_s))
    order = fragments.order(a.fragments, EXCHANGE)
    swaps = [
        Swap(link, v, EXCHANGE, order, leads=v is a, stall_s=STALL_S, backlog=Backlog(backlog_bytes))
        for link, v in zip(links, (a, b), strict=True)
    ]

    async def run(swap: Swap, link: Link) -> PeerFault | OutOfMemory | None:
        try:
            await swap.run()
        except (PeerFault, OutOfMemory) as fault:
            return fault
        finally:
            link.close()
        return None

    async with asyncio.timeout(within_s):
        faults = await asyncio.gather(*(run(s, link) for s, link in zip(swaps, links, strict=True)))
    return [*swaps, *faults]


@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, WINDOW, 23])
async def test_everything_is_applied_once_in_the_same_order(count: int, turns: int) -> None:
    a, b = Words("a", count, turns), Words("b", count, turns)
    one, other, *faults = await meet(a, b)
    assert faults == [None, None]
    assert a.applied == b.applied == fragments.order(count, EXCHANGE)
    assert one.one_sided == other.one_sided == 0
    assert max(a.most_under_way, b.most_under_way) <= WINDOW, "memory stays within the window"


@settings(max_examples=300)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 60), st.integers(0, 60))
def test_wherever_it_breaks_at_most_one_fragment_is_one_sided(count: int, turns: int, cut_a: int, cut_b: int) -> None:
    a, b = Words("a", count, turns), Words("b", count, turns)
    swaps = asyncio.run(meet(a, b, cut_a, cut_b))[:2]
    (behind, _), (ahead, its_swap) = sorted(zip((a, b), swaps, strict=True), key=lambda end: len(end[0].applied))
    more = len(ahead.applied) - len(behind.applied)
    assert more in (0, 1)
    assert ahead.applied[: len(behind.applied)] == behind.applied
    assert its_swap.one_sided >= more, "what may be one-sided is counted"
    assert all(swap.one_sided <= 1 for swap in swaps)


def test_on_a_far_link_two_fragments_are_applied_in_a_round_trip() -> None:
    async def main() -> float:
        a, b = Words("a", 20, turns=2), Words("b", 20, turns=2)
        _, _, *faults = await meet(a, b, delay_s=0.05, within_s=100)
        assert faults == [None, None]
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(0.1 * 20 / 2, abs=0.25)


class Unsettled(Words):
    """A partner before did something of which nobody knows yet whether it stays."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count)
        self.verdict: Future[None] = Future()

    def settled(self) -> "Future[None]":
        return self.verdict


@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_coded_before_it_is_known_what_the_partner_before_did(known: bool) -> None:
    async def main() -> list[Any]:
        a, b = Unsettled("a", 3), Words("b", 3)
        meeting = asyncio.create_task(meet(a, b, within_s=2 * STALL_S))
        await asyncio.sleep(STALL_S / 4)
        assert a.most_under_way == 0 and not meeting.done()
        if known:
            a.verdict.set_result(None)
            await asyncio.sleep(0.1)
            assert meeting.done()
        return await meeting  # else the swap begins when half of the partner's patience is over

    assert run_virtual(main())[2:] == [None, None]


@pytest.mark.parametrize("caller", [True, False])
def test_who_waits_for_a_verdict_says_that_it_is_there(caller: bool) -> None:
    """gRPC waits for the next frame already when the wait begins."""

    async def main() -> list[Any]:
        a, b = (Unsettled("a", 3), Words("b", 3)) if caller else (Words("a", 3), Unsettled("b", 3))
        links, queues = (Link(), Link()), (asyncio.Queue[bytes](), asyncio.Queue[bytes]())

        async def pump(link: Link, queue: "asyncio.Queue[bytes]") -> None:
            async for frame in link.outgoing():
                queue.put_nowait(frame)

        async def read(queue: "asyncio.Queue[bytes]") -> AsyncIterator[bytes]:
            while True:
                yield await queue.get()

        pumps = [asyncio.create_task(pump(link, queue)) for link, queue in zip(links, queues, strict=True)]
        for link, queue in zip(links, reversed(queues), strict=True):
            link.listen(read(queue))
        await asyncio.sleep(1)  # both wait for what is to be sent
        order = fragments.order(3, EXCHANGE)
        swaps = [
            Swap(link, v, EXCHANGE, order, leads=v is a, stall_s=STALL_S, backlog=Backlog())
            for link, v in zip(links, (a, b), strict=True)
        ]
        ended = await asyncio.gather(*(swap.run() for swap in swaps), return_exceptions=True)
        for task in pumps:
            task.cancel()
        return ended

    assert run_virtual(main()) == [None, None]


@pytest.mark.parametrize("fits", [1, 2, 7])
@pytest.mark.parametrize("leads", [True, False])
async def test_behind_a_long_step_corrections_wait_within_their_bound(fits: int, leads: bool) -> None:
    behind, quick = Behind("a", 23), Words("b", 23)
    room = fits * Words.correction_bytes + 50
    meeting = asyncio.create_task(meet(*((behind, quick) if leads else (quick, behind)), backlog_bytes=room))
    ended_steps = []
    while not meeting.done():
        for _ in range(2000):  # enough for all that can go on without another step's end to have gone on
            await asyncio.sleep(0)
        ended_steps.append(behind.end_step())
    one, other, *faults = meeting.result()
    assert faults == [None, None] and one.one_sided == other.one_sided == 0
    assert behind.applied == quick.applied == fragments.order(23, EXCHANGE)
    *full, last = [waited for waited in ended_steps if waited]
    assert set(full) == {fits}, "as many as may, and no more"
    assert sum(full) + last == 23 and last <= fits + 1, "a swap's last fragment waits for none"


@pytest.mark.parametrize("leads", [True, False])
def test_the_last_fragment_does_not_wait_for_a_long_step(leads: bool) -> None:
    """Its leader waits for Done for less time, and hangs up."""

    async def main() -> list[Any]:
        behind, quick = Behind("a", 7), Words("b", 7)
        meeting = asyncio.create_task(meet(*((behind, quick) if leads else (quick, behind)), backlog_bytes=250))
        while not meeting.done():
            await asyncio.sleep(2 * DONE_S)
            behind.end_step()
        assert len(behind.applied) == 7
        return meeting.result()

    one, other, *faults = run_virtual(main())
    assert faults == [None, None] and one.one_sided == other.one_sided == 0


@pytest.mark.parametrize("leads", [True, False])
async def test_a_correction_that_could_not_be_added_ends_the_swap(leads: bool) -> None:
    """Else the partner would go on adding what is lost here."""
    full, well = Behind("a", 23), Words("b", 23)
    meeting = asyncio.create_task(meet(*((full, well) if leads else (well, full)), backlog_bytes=250))
    for _ in range(2000):
        await asyncio.sleep(0)
    full.waiting.popleft().set_exception(OutOfMemory("full"))
    full.end_step()
    swaps_and_faults = await meeting
    swap, fault = swaps_and_faults[::2] if leads else swaps_and_faults[1::2]
    assert isinstance(fault, OutOfMemory) and swap.one_sided >= 1
    assert len(full.applied) <= 3 and len(well.applied) <= 4


async def test_swaps_share_one_backlog_and_a_large_correction_may_wait_alone() -> None:
    backlog, waiting = Backlog(250), [Future[None]() for _ in range(3)]
    await backlog.room(1000)
    for future in waiting[:2]:
        await backlog.room(100)
        backlog.add(100, future)
    third = asyncio.create_task(backlog.room(100))
    await asyncio.sleep(0)
    assert not third.done() and backlog.bytes == 200
    waiting[0].set_result(None)
    async with asyncio.timeout(60):
        await third
    assert backlog.bytes == 100


def swap(link: Link, vectors: Words, *, leads: bool) -> Swap:
    order = list(range(vectors.fragments))
    return Swap(link, vectors, EXCHANGE, order, leads=leads, stall_s=STALL_S, backlog=Backlog())


async def said(link: Link, frames: list[wire.Frame]) -> AsyncIterator[bytes]:
    """What a partner sends that acknowledges a fragment once it has read it."""
    outgoing, read = link.outgoing(), set()
    for frame in frames:
        while isinstance(frame, wire.Ack) and frame.index not in read:
            match wire.from_bytes(await anext(outgoing)):
                case wire.Fragment(index):
                    read.add(index)
        yield wire.to_bytes(frame)


async def against(frames: list[wire.Frame], *, leads: bool) -> tuple[Words, BaseException]:
    """A swap with a partner that sends only this, and then nothing."""
    link, vectors = Link(), Words("a", 8)

    async def say() -> AsyncIterator[bytes]:
        for frame in frames:
            yield wire.to_bytes(frame)

    link.listen(say())
    with pytest.raises(PeerFault) as fault:
        await swap(link, vectors, leads=leads).run()
    return vectors, fault.value


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([wire.Fragment(WINDOW, b"b 4 0")], "out_of_window"),
        ([wire.Fragment(0, b"b 0 0"), wire.Fragment(0, b"b 0 0")], "out_of_window"),
        ([wire.Fragment(99, b"b 99 0")], "out_of_window"),
        ([wire.Ack(WINDOW, 1.0)], "bad_ack"),
        ([wire.Ack(99, 1.0)], "bad_ack"),
        ([wire.Done()], "unexpected_frame"),
        ([wire.Accept()], "unexpected_frame"),
    ],
)
@pytest.mark.parametrize("leads", [True, False])
async def test_a_partner_out_of_order_is_named_and_nothing_is_applied(
    frames: list[wire.Frame], reason: str, leads: bool
) -> None:
    vectors, fault = await against(frames, leads=leads)
    assert isinstance(fault, PeerMisbehaved)
    assert fault.reason == reason
    assert vectors.applied == []


async def test_who_acknowledges_what_it_has_not_read_misbehaves() -> None:
    """Each fragment that is applied opens another one: all of our own would wait for such a partner."""
    frames = [frame for k in range(8) for frame in (wire.Fragment(k, f"b {k} 0".encode()), wire.Ack(k, 1.0))]
    vectors, fault = await against(frames, leads=True)
    assert isinstance(fault, PeerMisbehaved) and fault.reason == "bad_ack" and vectors.applied == []


async def test_what_opens_a_fragment_goes_before_codes_that_wait() -> None:
    link, vectors = Link(), Words("a", 8, turns=2)
    outgoing = link.outgoing()

    async def say() -> AsyncIterator[bytes]:
        for k in range(WINDOW):
            yield wire.to_bytes(wire.Fragment(k, f"b {k} 0".encode()))
        while wire.from_bytes(await anext(outgoing)) != wire.Fragment(0, b"a 0 1"):
            pass
        yield wire.to_bytes(wire.Fragment(0, b"b 0 1"))
        yield wire.to_bytes(wire.Ack(0, 1.0))

    link.listen(say())
    with pytest.raises(PeerLost):
        await swap(link, vectors, leads=False).run()
    link.close()
    words = [wire.from_bytes(message) async for message in outgoing]
    codes = [wire.Fragment(k, f"a {k} 1".encode()) for k in range(1, WINDOW)]
    assert words == [wire.Ack(0, 1.0), wire.Fragment(WINDOW, f"a {WINDOW} 0".encode()), *codes]


async def test_acks_without_fragments_apply_nothing() -> None:
    vectors, fault = await against([wire.Ack(0, 1.0), wire.Ack(0, 1.0)], leads=False)
    assert isinstance(fault, PeerMisbehaved)
    assert vectors.applied == []
    vectors, fault = await against([wire.Ack(0, 1.0)], leads=True)
    assert isinstance(fault, PeerMisbehaved), "who leads speaks last"
    assert vectors.applied == []


@pytest.mark.parametrize(("one", "other"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (0.125, 0.25)])
async def test_both_sides_apply_the_smaller_of_the_two_factors(one: float, other: float) -> None:
    a, b = Words("a", 5), Words("b", 5)
    a.allowed, b.allowed = one, other
    swap, theirs, fault, their_fault = await meet(a, b)
    assert (fault, their_fault) == (None, None)
    assert a.scales == b.scales == 5 * [min(one, other)]
    assert (swap.allowed, theirs.allowed) == (one, other), "each says what its own bounds leave"


async def test_a_leader_that_wants_more_than_we_allow_misbehaves() -> None:
    link, vectors = Link(), Words("a", 8)
    link.listen(said(link, [wire.Fragment(0, b"b 0 0"), wire.Ack(0, 1.0)]))
    with pytest.raises(PeerLost):  # 1 is what this one allows
        await swap(link, vectors, leads=True).run()
    link, vectors = Link(), Words("a", 8)
    vectors.allowed = 0.5
    link.listen(said(link, [wire.Fragment(0, b"b 0 0"), wire.Ack(0, 0.75)]))
    with pytest.raises(PeerMisbehaved, match="bad_scale"):
        await swap(link, vectors, leads=True).run()
    assert vectors.applied == []


async def test_silence_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_node.rounds.swap.FRAME_S", 0.05)
    link = Link()

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    link.listen(nothing())
    with pytest.raises(PeerLost, match="silent"):
        await swap(link, Words("a", 2), leads=True).run()


def alive(frames: list[wire.Frame], then: wire.Frame, every_s: float, *, leads: bool) -> tuple[Swap, float]:
    """A swap with a partner that sends these frames, and then the same one for ever; and how long that lasted."""

    async def main() -> tuple[Swap, float]:
        link = Link()

        async def say() -> AsyncIterator[bytes]:
            async for message in said(link, frames):
                yield message
            while True:
                await asyncio.sleep(every_s)
                yield wire.to_bytes(then)

        link.listen(say())
        made = swap(link, Words("a", 2), leads=leads)
        with suppress(PeerLost):
            await made.run()
        return made, asyncio.get_running_loop().time()

    return run_virtual(main())


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("then", [wire.Alive(), wire.Piece(bytes(pieces.PIECE_BYTES), more=True)])
def test_signs_of_life_and_pieces_are_no_progress(then: wire.Frame, leads: bool) -> None:
    made, lasted_s = alive([wire.Fragment(0, b"b 0 0")], then, 4.0, leads=leads)
    assert lasted_s == pytest.approx(STALL_S) and made.applied == 0


@pytest.mark.parametrize(("then", "reason"), [(wire.Alive(), "too_many_frames"), (wire.Piece(b"x", True), "bad_piece")])
def test_a_flood_of_small_messages_is_a_fault(then: wire.Frame, reason: str) -> None:
    with pytest.raises(PeerMisbehaved) as fault:
        alive([wire.Fragment(0, b"b 0 0")], then, 0.01, leads=True)
    assert fault.value.reason == reason


def test_the_leader_waits_for_done_and_no_longer() -> None:
    frames = [frame for k in range(2) for frame in (wire.Fragment(k, f"b {k} 0".encode()), wire.Ack(k, 1.0))]
    made, lasted_s = alive(frames, wire.Alive(), 4.0, leads=True)
    assert (made.applied, made.one_sided, lasted_s) == (2, 1, pytest.approx(DONE_S))


@pytest.mark.parametrize("turns", [1, 2])
def test_a_large_fragment_has_the_time_that_a_slow_link_needs(turns: int) -> None:
    """Whichever of its payloads is the large one."""

    class Large(Words):
        def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
            return done(bytes(4 << 20) if turns == 1 else b"small")

        def receive(self, index: int, payload: Payload) -> "Future[bytes | float]":
            return done(bytes(4 << 20))

    async def main() -> tuple[float, float]:
        link = Link()

        async def say() -> AsyncIterator[bytes]:
            if turns == 2:
                yield wire.to_bytes(wire.Fragment(0, b"small"))
            while True:
                await asyncio.sleep(5)
                yield wire.to_bytes(wire.Alive())

        link.listen(say())
        made = swap(link, Large("a", 2), leads=True)
        with pytest.raises(PeerLost, match="stalled"):
            await made.run()
        return asyncio.get_running_loop().time(), made.progress

    lasted_s, progress = run_virtual(main())
    assert lasted_s == pytest.approx(SLOW_STREAMS * (4 << 20) / 32_000, abs=1)
    assert progress < 0.01, "a few bytes have come"


def test_orders_differ_between_exchanges() -> None:
    rng = random.Random(0)
    assert len({tuple(fragments.order(16, rng.randbytes(16))) for _ in range(50)}) > 8
