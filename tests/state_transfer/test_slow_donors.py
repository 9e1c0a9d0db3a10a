"""When a donor that sends slowly is left for another one."""

import random
from collections.abc import Callable

from noloco_node.state_transfer.slow_donors import LONG_S, SlowDonors

GB = 10**9
STEP_S = 20.0

Rate = Callable[[float], float]
"""Bytes a second, after so many seconds with this donor."""


class Joining:
    """A node that takes a state of so many bytes; what came of one donor is worth nothing with another."""

    def __init__(self, total_bytes: int, donors: dict[str, float | Rate], own_rate: float = 1e12) -> None:
        self.total, self.donors, self.own = total_bytes, donors, own_rate
        self.asked = list[str]()

    def hours(self) -> float:
        slow, now, donor = SlowDonors(), 0.0, next(iter(self.donors))
        while True:
            self.asked.append(donor)
            slow.begin(donor, self.donors.keys() - {donor})
            began, here, rate = now, 0.0, self.donors[donor]
            while not slow.leaves(int(here), self.total, now):
                if here >= self.total:
                    return now / 3600
                now += STEP_S
                here += min(self.own, rate if isinstance(rate, float) else rate(now - began)) * STEP_S
            donor = slow.better or next(each for each in self.donors if each not in self.asked)


def test_a_donor_that_sends_next_to_nothing_is_left_after_a_minute() -> None:
    joining = Joining(GB, {"slow": 4_500.0, "honest": 5e6})
    assert joining.hours() < 0.1 and joining.asked == ["slow", "honest"]


def test_one_that_sends_most_of_it_at_once_is_left_soon_too() -> None:
    joining = Joining(8 * GB, {"slow": lambda s: 8e7 if s < 80 else 4_500.0, "honest": 5e6})
    assert joining.hours() < 0.6 and joining.asked == ["slow", "honest"]


def test_one_that_becomes_slow_is_left_for_one_that_is_known() -> None:
    joining = Joining(8 * GB, {"first": 1e6, "second": lambda s: 2e6 if s < 1000 else 1_000.0})
    assert joining.hours() < 3.0 and joining.asked == ["first", "second", "first"]


def test_a_slow_minute_throws_nothing_away() -> None:
    """After hours of a download, with others that are as fast."""
    slow_at = lambda s: 45_000.0 if 30_000 < s < 30_090 else 3e5  # noqa: E731
    joining = Joining(10 * GB, {f"{n}": slow_at for n in range(3)})
    assert joining.hours() < 1.2 * 10 * GB / 3e5 / 3600


def test_on_a_slow_link_the_whole_takes_at_most_twice_as_long_whoever_is_there() -> None:
    for donors in (1, 2, 7, 200):
        for alone_s in (2000, 2400, 4000, 40_000):
            joining = Joining(GB, {f"{n}": 5e6 for n in range(donors)}, own_rate=GB / alone_s)
            assert joining.hours() <= 2 * alone_s / 3600 + 0.1
            assert len(joining.asked) <= 6


def test_a_crowd_of_slow_donors_that_comes_first_costs_an_hour_and_not_days() -> None:
    """As a joining node draws by place, a crowd on one host seldom comes first more than once."""
    joining = Joining(8 * GB, {**{f"crowd {n}": 8_100.0 for n in range(3)}, "honest": 5e6})
    assert joining.hours() < 1.0 and joining.asked[-1] == "honest"


def test_whatever_the_rates_it_comes_to_an_end() -> None:
    chance = random.Random(1)
    for _ in range(50):
        rates: dict[str, float | Rate] = {f"{n}": 10 ** chance.uniform(4, 7) for n in range(chance.randrange(1, 8))}
        best = max(rate for rate in rates.values() if isinstance(rate, float))
        assert Joining(GB, rates).hours() <= 8 * (GB / best + LONG_S) / 3600


def test_who_fails_is_unknown_again() -> None:
    slow = SlowDonors()
    for donor, other in (("a", "b"), ("b", "a")):
        slow.begin(donor, [other])
        slow.leaves(0, GB, 0.0)
        assert slow.leaves(60_000, GB, 60.0) == (donor == "a")
    slow.failed("a")
    slow.begin("b", ["a"])
    slow.leaves(0, GB, 0.0)
    assert not slow.leaves(600, GB, 60.0) and slow.better is None
