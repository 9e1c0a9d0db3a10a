import asyncio
from contextlib import suppress

from virtual_clock import run_virtual

from noloco_node.base import periodic


async def turns(period_s: "list[float]", change_at: float, until: float, fails: bool = False) -> list[float]:
    """When the duty was done, where its period is the first value and from `change_at` on the last one."""
    clock, done = asyncio.get_running_loop().time, list[float]()
    began = clock()

    async def duty() -> None:
        done.append(round(clock() - began, 3))
        if fails:
            raise OSError

    with suppress(TimeoutError):
        async with asyncio.timeout(until):
            await periodic.every(lambda: period_s[clock() - began >= change_at], duty, (OSError,))
    return done


def test_it_comes_again_after_its_period_and_later_after_failures() -> None:
    assert run_virtual(turns([2.5, 2.5], 0.0, 8.0)) == [0.0, 2.5, 5.0, 7.5]
    assert run_virtual(turns([1.0, 1.0], 0.0, 30.0, fails=True)) == [0.0, 2.0, 6.0, 14.0, 22.0]


def test_a_period_that_becomes_shorter_counts_within_a_second() -> None:
    assert run_virtual(turns([60.0, 5.0], 20.0, 31.0)) == [0.0, 20.0, 25.0, 30.0]
