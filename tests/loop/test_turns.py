"""Turns: one of two threads works at a time, and nobody waits for one that has gone."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from noloco_node.loop.turns import Turns


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_one_works_at_a_time_and_every_step_is_counted_once() -> None:
    turns, working, seen = Turns(), [], []

    def loop() -> None:
        wanted = turns.wait()
        while wanted:
            working.append("loop")
            seen.append(tuple(working))
            working.remove("loop")
            wanted = turns.wait(float(len(seen)))

    thread = beside(loop)
    for number in range(1, 101):
        assert turns.step(60.0, nullcontext)
        assert turns.loss == number
        working.append("node")
        time.sleep(0)
        working.remove("node")
    turns.end()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [("loop",)] * 100


def test_a_loop_that_is_not_there_yet_is_waited_for_only_so_long() -> None:
    turns = Turns()
    began = time.monotonic()
    assert not turns.step(0.05, nullcontext)
    assert time.monotonic() - began >= 0.05


def test_a_step_takes_as_long_as_it_takes_and_is_told_apart_from_waiting() -> None:
    turns, times = Turns(), []

    @contextmanager
    def working() -> Iterator[None]:
        began = time.monotonic()
        yield
        times.append(time.monotonic() - began)

    def loop() -> None:
        turns.wait()
        time.sleep(0.1)
        turns.wait()

    beside(loop)
    assert turns.step(60.0, working)
    assert times[0] >= 0.1
    turns.end()


def test_a_step_that_is_given_up_does_not_count() -> None:
    turns, begun = Turns(), threading.Event()

    def loop() -> None:
        turns.wait()
        begun.set()
        turns.close()

    beside(loop)
    assert not turns.step(60.0, nullcontext)
    assert begun.is_set()
    assert not turns.step(0.01, nullcontext), "and it makes no further one"


def test_who_waits_hears_that_no_step_is_wanted_any_more() -> None:
    turns, heard = Turns(), []
    thread = beside(lambda: heard.append(turns.wait()))
    turns.end()
    thread.join(60)
    assert heard == [False]
    assert turns.wait() is False, "nor later"
