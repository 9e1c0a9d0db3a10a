"""When checkpoints are written, with a training thread that is one future and a disk that is one event."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import pytest

from noloco_node.checkpoints import schedule
from noloco_node.checkpoints.schedule import (
    EVERY_ROUNDS,
    EVERY_S,
    MOST_APART_S,
    MOST_BYTES_PER_S,
    CheckpointSchedule,
)
from noloco_node.errors import DiskFull, NolocoError

DEADLINE_S = 60.0


class Desk:
    """Both ends of a CheckpointSchedule."""

    def __init__(self, patience_s: float = 0.0, size: int = 0) -> None:
        self.patience_s = patience_s
        self.asked: list[Future[int]] = []
        self.takes_it_at_once = False
        self.kept: list[int] = []
        self.failures: list[str] = []
        self.disk_is_free = threading.Event()
        self.disk_is_free.set()
        self.fault: NolocoError | None = None
        self.at_once = 0
        self.saving = CheckpointSchedule(
            self, self.keep, lambda why: self.failures.append(str(why)), round=7, now=100.0, size=size
        )

    def state(self) -> "Future[int]":
        self.asked.append(Future())
        if self.takes_it_at_once:
            self.asked[-1].set_running_or_notify_cancel()
        return self.asked[-1]

    def keep(self, state: int) -> None:
        self.at_once += 1
        assert self.at_once == 1, "two at a time would take each other's files for left-overs"
        assert self.disk_is_free.wait(DEADLINE_S)
        self.at_once -= 1
        if self.fault:
            raise self.fault
        self.kept.append(state)


def lived(life: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await life()

    asyncio.run(limited())


async def until(found: Callable[[], object]) -> None:
    while not found():  # noqa: ASYNC110 (some of it happens on another thread)
        await asyncio.sleep(0.001)


async def saves(desk: Desk, round: int, now: float) -> bool:
    """Whether it writes one then, to the end."""
    before = len(desk.asked)
    desk.saving.save_if_due(round, 10 * round, now)
    await asyncio.sleep(0)
    if len(desk.asked) == before:
        return False
    desk.asked[-1].set_result(round)
    await until(lambda: desk.kept[-1:] == [round] and not desk.saving._under_way)
    return True


def test_every_so_many_rounds_or_minutes_whichever_is_first() -> None:
    async def life() -> None:
        desk = Desk()
        assert not await saves(desk, 9, 100.0)
        assert await saves(desk, 10, 101.0)
        assert not await saves(desk, 9 + EVERY_ROUNDS, 100.0 + EVERY_S)
        assert await saves(desk, 9 + EVERY_ROUNDS, 101.0 + EVERY_S)
        assert not await saves(desk, 9 + EVERY_ROUNDS, 101.0 + 2 * EVERY_S), (
            "it waits for data or memory: nothing is new"
        )
        assert await saves(desk, 11 + EVERY_ROUNDS, 102.0 + 2 * EVERY_S), "a node may miss the very round"

    lived(life)


def test_the_disk_is_not_written_to_faster_than_it_bears() -> None:
    """Rounds of a second."""

    async def life(size: float, rounds: int, written: list[int]) -> None:
        desk = Desk(size=int(size))
        assert [round for round in range(8, rounds) if await saves(desk, round, 93.0 + round)] == written

    lived(lambda: life(0, 41, [10, 20, 30, 40]))
    lived(lambda: life(15 * MOST_BYTES_PER_S, 60, [22, 37, 52]))
    lived(lambda: life(1e15, 3700, [7 + int(MOST_APART_S)]))


def test_weights_that_were_replaced_are_written_at_once() -> None:
    """Else the newest checkpoint has those that were given up, for ten minutes or more."""

    async def life() -> None:
        desk = Desk(size=int(100 * MOST_BYTES_PER_S))
        assert await saves(desk, 100, 1000.0)
        assert not await saves(desk, 95, 1001.0)
        desk.saving.weights_replaced()
        assert await saves(desk, 95, 1001.0)
        assert not await saves(desk, 106, 1100.0), "the rate in the long run stays"
        assert await saves(desk, 106, 1101.0)

    lived(life)


def test_a_save_waits_for_a_step_of_any_length_and_is_the_only_one_meanwhile() -> None:
    async def life() -> None:
        desk = Desk()
        desk.saving.save_if_due(17, 170, 100.0)
        await until(lambda: desk.asked)
        desk.saving.save_if_due(27, 270, 100.0 + 5 * EVERY_S)
        await asyncio.sleep(0)
        assert len(desk.asked) == 1
        desk.asked[0].set_result(1)
        await until(lambda: desk.kept == [1])
        assert not desk.failures

    lived(life)


def test_who_leaves_gets_what_the_thread_gives_at_its_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_S", 0.01)

    async def life() -> None:
        desk = Desk(patience_s=DEADLINE_S)
        last = asyncio.create_task(desk.saving.save_now(leaving=True))
        await asyncio.sleep(0.05)  # beyond LEAST_S: the step is known to take longer
        assert not last.done()
        desk.asked[0].set_result(5)
        await last
        assert desk.kept == [5] and not desk.failures

    lived(life)


def test_a_thread_that_stays_away_costs_the_last_checkpoint_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_S", 0.01)

    async def life() -> None:
        desk = Desk()
        await desk.saving.save_now(leaving=True)
        assert not desk.kept and "no state within" in desk.failures[0]
        assert not desk.asked[0].set_running_or_notify_cancel(), "nor is it copied for nobody"

    lived(life)


def test_who_leaves_while_a_state_is_copied_waits_for_it_and_gets_a_later_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came after its moment would be lost: the last swap, when the work is done."""
    monkeypatch.setattr(schedule, "LEAST_S", 0.01)

    async def life() -> None:
        desk = Desk()
        desk.takes_it_at_once = True
        desk.saving.save_if_due(17, 170, 100.0)
        await until(lambda: desk.asked)
        last = asyncio.create_task(desk.saving.save_now(leaving=True))
        await asyncio.sleep(0.05)
        assert not last.done() and len(desk.asked) == 1
        desk.asked[0].set_result(1)
        await until(lambda: len(desk.asked) == 2)
        await asyncio.sleep(0.05)
        assert not last.done(), "the thread has taken it, so it will come"
        desk.asked[1].set_result(2)
        await last
        assert desk.kept == [1, 2] and not desk.failures and desk.saving._asked is None

    lived(life)


def test_a_slow_disk_is_waited_for_however_long_and_what_came_after_is_written_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "LEAST_S", 0.01)

    async def life() -> None:
        desk = Desk()
        desk.takes_it_at_once = True
        desk.disk_is_free.clear()
        desk.saving.save_if_due(17, 170, 100.0)
        await until(lambda: desk.asked)
        desk.asked[0].set_result(1)
        await until(lambda: desk.at_once)
        last = asyncio.create_task(desk.saving.save_now(leaving=True))
        await asyncio.sleep(0.05)
        assert not last.done() and len(desk.asked) == 1
        desk.disk_is_free.set()
        await until(lambda: len(desk.asked) == 2)
        desk.disk_is_free.clear()
        desk.asked[1].set_result(2)
        await asyncio.sleep(0.05)
        assert not last.done()
        desk.disk_is_free.set()
        await last
        assert desk.kept == [1, 2] and not desk.failures

    lived(life)


def test_one_that_still_waits_for_the_thread_is_the_last_one() -> None:
    async def life() -> None:
        desk = Desk()
        desk.saving.save_if_due(17, 170, 100.0)
        await until(lambda: desk.asked)
        last = asyncio.create_task(desk.saving.save_now(leaving=True))
        await asyncio.sleep(0.01)
        desk.asked[0].set_result(3)
        await last
        assert desk.kept == [3] and len(desk.asked) == 1

    lived(life)


def test_who_is_told_to_leave_while_the_last_one_is_written_waits_for_it() -> None:
    async def life() -> None:
        desk = Desk()
        desk.disk_is_free.clear()
        done = asyncio.create_task(desk.saving.save_now())
        await until(lambda: desk.asked)
        desk.asked[0].set_result(1)
        await until(lambda: desk.at_once)
        done.cancel()
        leaving = asyncio.create_task(desk.saving.save_now(leaving=True))
        desk.disk_is_free.set()
        await until(lambda: len(desk.asked) == 2)
        desk.asked[1].set_result(1)
        await leaving
        assert desk.kept == [1, 1]

    lived(life)


def test_no_fault_of_a_save_keeps_the_node_from_leaving() -> None:
    async def life() -> None:
        desk = Desk()
        last = asyncio.create_task(desk.saving.save_now(leaving=True))
        await until(lambda: desk.asked)
        desk.asked[0].set_exception(RuntimeError("can't allocate memory"))
        await last
        assert desk.failures == ["no checkpoint, by a bug in this node (RuntimeError)"]

    lived(life)


def test_what_was_not_written_is_tried_again_without_another_step() -> None:
    """As of a node that has done its work and stays: the disk may get room."""

    async def life() -> None:
        desk = Desk()
        desk.fault = DiskFull("the disk is full")
        desk.saving.save_if_due(9, 90, 100.0 + EVERY_S)
        await until(lambda: desk.asked)
        desk.asked[-1].set_result(9)
        await until(lambda: desk.failures and not desk.saving._under_way)
        desk.fault = None
        assert not await saves(desk, 9, 99.0 + 2 * EVERY_S)
        assert await saves(desk, 9, 100.0 + 2 * EVERY_S)
        assert not await saves(desk, 9, 100.0 + 3 * EVERY_S), "once"

    lived(life)


def test_a_full_disk_costs_one_checkpoint() -> None:
    async def life() -> None:
        desk = Desk()
        for fault in (DiskFull("the disk is full"), None):
            desk.fault = fault
            last = asyncio.create_task(desk.saving.save_now())
            await asyncio.sleep(0)
            await until(lambda: desk.asked and not desk.asked[-1].done())
            desk.asked[-1].set_result(4)
            await last
        assert desk.failures == ["the disk is full"] and desk.kept == [4]

    lived(life)
