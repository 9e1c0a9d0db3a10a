"""One swap between two partners joined directly: all is applied once, and a break leaves at most one side ahead."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.errors import PeerFault, PeerLost, PeerMisbehaved
from noloco_node.swap import WINDOW, Link, Swap
from noloco_node.wire import fragments
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb

EXCHANGE = b"\x05" * 16


def done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@dataclass
class Heard:
    say: bytes | None
    correction: Any


class Words:
    """Vectors whose fragments are short texts, told in `turns` turns."""

    round = 1

    def __init__(self, name: str, count: int, turns: int = 1) -> None:
        self.name, self.fragments, self.turns = name, count, turns
        self.heard: dict[int, int] = {}
        self.applied: list[int] = []
        self.under_way = self.most_under_way = 0

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return done(f"{self.name} {index} 0".encode())

    def hear(self, index: int, payload: bytes) -> "Future[Heard]":
        turn = self.heard[index] = self.heard.get(index, 0) + 1
        _, theirs, said = payload.decode().split()
        if (int(theirs), int(said)) != (index, turn - 1):
            raise PeerMisbehaved("bad_payload", payload.decode())
        last = turn == self.turns
        say = None if last else f"{self.name} {index} {turn}".encode()
        return done(Heard(say, payload if last else None))

    def apply(self, index: int, correction: Any) -> None:
        self.under_way -= 1
        self.applied.append(index)


class Cut:
    """Lets so many frames through, then the stream breaks."""

    def __init__(self, frames: int | None) -> None:
        self.left = frames

    async def through(self, frames: AsyncIterator[pb.SwapFrame]) -> AsyncIterator[pb.SwapFrame]:
        async for frame in frames:
            if self.left is not None:
                if self.left == 0:
                    return
                self.left -= 1
            yield frame


async def meet(a: Words, b: Words, cut_a: int | None = None, cut_b: int | None = None) -> list[Any]:
    links = Link(), Link()
    links[0].listen(Cut(cut_b).through(links[1].outgoing()))
    links[1].listen(Cut(cut_a).through(links[0].outgoing()))
    order = fragments.order(a.fragments, EXCHANGE)
    swaps = [Swap(link, v, EXCHANGE, order, leads=v is a) for link, v in zip(links, (a, b), strict=True)]

    async def run(swap: Swap, link: Link) -> PeerFault | None:
        try:
            await swap.run()
        except PeerFault as fault:
            return fault
        finally:
            link.close()
        return None

    async with asyncio.timeout(10):
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


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 60), st.integers(0, 60))
def test_wherever_it_breaks_at_most_one_fragment_is_one_sided(count: int, turns: int, cut_a: int, cut_b: int) -> None:
    a, b = Words("a", count, turns), Words("b", count, turns)
    leader, follower, *_ = asyncio.run(meet(a, b, cut_a, cut_b))
    assert len(a.applied) - len(b.applied) in (0, 1)
    assert a.applied[: len(b.applied)] == b.applied
    assert follower.one_sided == 0
    assert leader.one_sided >= len(a.applied) - len(b.applied), "what may be one-sided is counted"
    assert leader.one_sided <= 1


async def against(frames: list[wire.Frame], *, leads: bool) -> tuple[Words, BaseException]:
    """A swap with a partner that says just this, and then nothing."""
    link, vectors = Link(), Words("a", 8)

    async def say() -> AsyncIterator[pb.SwapFrame]:
        for frame in frames:
            yield wire.encode(frame)

    link.listen(say())
    with pytest.raises(PeerFault) as fault:
        await Swap(link, vectors, EXCHANGE, list(range(8)), leads=leads).run()
    return vectors, fault.value


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([wire.Fragment(WINDOW, b"b 4 0")], "out_of_window"),
        ([wire.Fragment(0, b"b 0 0"), wire.Fragment(0, b"b 0 0")], "out_of_window"),
        ([wire.Fragment(99, b"b 99 0")], "out_of_window"),
        ([wire.Ack(3)], "bad_ack"),
        ([wire.Done()], "unexpected_frame"),
        ([wire.Accept(b"b" * 16, 1)], "unexpected_frame"),
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


async def test_acks_without_fragments_apply_nothing() -> None:
    vectors, fault = await against([wire.Ack(0), wire.Ack(0)], leads=True)
    assert isinstance(fault, PeerMisbehaved)
    assert vectors.applied == []
    vectors, fault = await against([wire.Ack(0)], leads=False)
    assert isinstance(fault, PeerMisbehaved), "the follower speaks first"


async def test_silence_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noloco_node.swap.FRAME_S", 0.05)
    link = Link()

    async def nothing() -> AsyncIterator[pb.SwapFrame]:
        await asyncio.Event().wait()
        yield pb.SwapFrame()

    link.listen(nothing())
    with pytest.raises(PeerLost, match="silent"):
        await Swap(link, Words("a", 2), EXCHANGE, [0, 1], leads=True).run()


def test_orders_differ_between_exchanges() -> None:
    rng = random.Random(0)
    assert len({tuple(fragments.order(16, rng.randbytes(16))) for _ in range(50)}) > 8
