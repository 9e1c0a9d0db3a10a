"""What a volunteer allows: units, a bucket that holds its rate, a day that ends, and hours over midnight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.host import limits
from noloco_node.host.limits import BURST_S, DAY_MIN, PAUSED, QUOTA, DailyQuota, Hours, TokenBucket, Used


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [("5MB", 5e6), ("5 MB/s", 5e6), ("40Mbit", 5e6), ("1.5MB", 1.5e6), ("500kbit/s", 62_500), ("40000", 40_000)],
)
def test_rates(text: str, bytes_s: float) -> None:
    assert limits.rate(text) == bytes_s


@pytest.mark.parametrize("text", ["", "5Mb", "5MiB", "fast", "-5MB", "0", "1kB", "1e9", "5MB/h", "inf"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate like 5MB or 40Mbit"):
        limits.rate(text)


def test_amounts() -> None:
    assert limits.amount("20GB") == 20 * 10**9
    assert limits.amount("1500000") == 1_500_000
    for text in ("20Gbit", "20GB/s", "1kB", "much"):
        with pytest.raises(ValueError, match="must be an amount like 20GB"):
            limits.amount(text)


SENDS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 200_000)), min_size=1, max_size=40)


@given(st.floats(1e3, 1e6), SENDS)
def test_whoever_waits_as_told_stays_within_the_rate(rate: float, sends: list[tuple[float, int]]) -> None:
    """In every stretch from one message to another, however long was idled in between."""
    bucket, now, gone = TokenBucket(rate), 0.0, []
    for idle_s, size in sends:
        now += idle_s
        bucket.take(size, now)
        now += bucket.wait_s(now)
        gone.append((now, size))
    for k, (begin, _) in enumerate(gone):
        passed = 0
        for end, size in gone[k + 1 :]:
            passed += size
            assert passed <= rate * (end - begin + BURST_S) * (1 + 1e-9) + 1e-3


@given(st.floats(1e3, 1e6), st.integers(1, 10**7))
def test_nothing_waits_longer_than_the_rate_demands(rate: float, size: int) -> None:
    for bucket, burst_s in ((TokenBucket(rate), BURST_S), (TokenBucket(rate, 30.0), 30.0)):
        bucket.take(size, 100.0)
        assert bucket.wait_s(100.0) == pytest.approx(max(0.0, size / rate - burst_s), rel=1e-9, abs=1e-9)
    assert bucket.wait_s(100.0 + size / rate) == 0.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1000.0)
    bucket.take(10_000, 50.0)
    before = bucket.wait_s(50.0)
    assert bucket.wait_s(10.0) == before


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["1", "2"]))))
def test_a_day_counts_its_own_traffic(traffic: list[tuple[int, int, str]]) -> None:
    used, sent, received, today = Used(), 0, 0, ""
    for up, down, day in traffic:
        used = used.plus(up, down, day)
        sent, received = (sent + up, received + down) if day == today else (up, down)
        today = day
    assert (used.sent, used.received) == (sent, received)


def test_a_quota_ends_where_another_swap_has_no_room() -> None:
    quota = DailyQuota(sent=100, received=200)
    assert quota.exhausted(Used("d", 60, 60), sent=40, received=40) is None
    assert quota.exhausted(Used("d", 61, 60), sent=40, received=40) == "upload"
    assert quota.exhausted(Used("d", 0, 200)) == "download"
    assert DailyQuota().exhausted(Used("d", 10**15, 10**15)) is None
    assert quota.exhausted(Used("d", 100, 200).plus(0, 0, "e")) is None, "another day"


@given(st.integers(0, DAY_MIN - 1), st.integers(0, DAY_MIN - 1), st.integers(0, DAY_MIN - 1))
def test_hours_and_the_rest_of_the_day_are_opposites(begin: int, end: int, minute: int) -> None:
    if begin != end:
        assert Hours(begin, end).open(minute) != Hours(end, begin).open(minute)
        assert Hours(begin, end).open(begin)
        assert not Hours(begin, end).open(end)
        assert Hours.parse(str(Hours(begin, end))) == Hours(begin, end)


def test_hours_over_midnight() -> None:
    night = Hours.parse("22-08")
    assert [night.open(60 * hour) for hour in (21, 22, 23, 0, 7, 8)] == [False, True, True, True, True, False]
    assert Hours.parse("8:30-24") == Hours(510, 0)
    for text in ("22", "22-22", "25-3", "22:60-3", "ten-two", "0-24"):
        with pytest.raises(ValueError, match="must be hours like 22-08"):
            Hours.parse(text)


def test_what_holds_a_node_back() -> None:
    def held(*, asked: bool = False, minute: int = 0, exhausted: bool = False) -> str | None:
        return limits.held_back(asked=asked, hours=Hours(600, 660), minute=minute, exhausted=exhausted)

    assert held(minute=600) is None
    assert held(minute=599) == PAUSED
    assert held(minute=600, exhausted=True) == QUOTA
    assert held(minute=600, asked=True, exhausted=True) == PAUSED, "a pause is more than a quota"
