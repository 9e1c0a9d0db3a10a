"""Two real training threads swap while one of them is in a long inner step: what waits for it stays within bounds."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from patience import PATIENCE
from replicas import correct, small_replica, small_run

from noloco_node.core.codecs.by_name import codec
from noloco_node.rounds.link import Link
from noloco_node.rounds.swap import Backlog, Swap
from noloco_node.training.mailbox import PhaseEnded
from noloco_node.training.offer import Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

FRAGMENT = 256
DEADLINE_S = 60.0 * PATIENCE


def replica(peer: str) -> Replica:
    return small_replica(peer, small_run(steps=1))


@contextmanager
def training(build: Callable[[], Replica], rounds: int) -> Iterator[tuple[TrainingThread, Offer]]:
    """A thread, and the offer of its first round."""
    posts: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = TrainingThread(build, codec("fp32"), posts.put, rounds=rounds, fragment_elements=FRAGMENT)
    thread.start()
    thread.begin()
    try:
        while not isinstance(post := posts.get(timeout=DEADLINE_S), PhaseEnded):
            pass
        assert post.offer is not None
        yield thread, post.offer
    finally:
        thread.stop()


async def swap(*sides: tuple[Offer, Backlog]) -> list[Swap]:
    """Of two; the first one leads."""
    links = Link(), Link()
    links[0].listen(links[1].outgoing())
    links[1].listen(links[0].outgoing())
    order = list(range(sides[0][0].fragments))
    swaps = [
        Swap(link, offer, bytes(16), order, leads=k == 0, stall_s=DEADLINE_S, backlog=backlog)
        for k, (link, (offer, backlog)) in enumerate(zip(links, sides, strict=True))
    ]
    await asyncio.gather(*(each.run() for each in swaps))
    return swaps


@pytest.mark.parametrize("leads", [True, False])
async def test_a_step_that_lasts_holds_the_swap_and_not_the_memory(leads: bool) -> None:
    step_begins, step_ends = threading.Event(), threading.Event()

    def long_second_step() -> Replica:
        inner = replica("a")
        step = inner.step

        def long() -> float:
            if inner.round == 1:
                step_begins.set()
                assert step_ends.wait(DEADLINE_S)
            return step()

        inner.step = long  # type: ignore[method-assign]
        return inner

    bound = 3 * 4 * FRAGMENT
    backlog = Backlog(bound)
    with training(long_second_step, 2) as (busy, one), training(lambda: replica("b"), 1) as (_, other):
        assert await asyncio.to_thread(step_begins.wait, DEADLINE_S), "until then it evaluates, and serves its mailbox"
        sides = (one, backlog), (other, Backlog())
        swapping = asyncio.create_task(swap(*(sides if leads else reversed(sides))))
        async with asyncio.timeout(DEADLINE_S):
            while backlog.bytes < bound:  # noqa: ASYNC110 (another thread's doing)
                await asyncio.sleep(0.01)
            another = asyncio.create_task(backlog.room(1))
            await asyncio.sleep(0)
            another.cancel()  # as a swap whose partner hangs up now: the thread adds what was handed over all the same
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert backlog.bytes == bound and not swapping.done(), "full, and it stays so"
            step_ends.set()
            swaps = await swapping
        assert [each.applied for each in swaps] == [one.fragments] * 2
        assert one.fragments > 6
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wrap_future(busy.state())
        assert backlog.bytes == 0, "everything was added"


async def test_nobody_waits_for_a_thread_that_has_ended() -> None:
    with training(lambda: replica("a"), 1) as (thread, _):
        ends_it, after = correct(thread, 1, 10**6, torch.ones(1)), correct(thread, 1, 0, torch.ones(1))
        async with asyncio.timeout(DEADLINE_S):
            for added in (ends_it, after):
                await asyncio.wrap_future(added)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wrap_future(correct(thread, 1, 0, torch.ones(1)))
