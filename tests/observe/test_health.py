"""Warnings about the network daemon's deaths, reachability and the clock."""

import pytest

from noloco_node.errors import ClockTooFarOff
from noloco_node.observe import health
from noloco_node.observe.health import LATELY_S, MAX_WAIT_S, NetworkOutages
from noloco_node.transport.self_view import ClockSkew


def test_the_first_death_costs_no_wait_and_many_cost_more_each() -> None:
    outages = NetworkOutages()
    waits = [outages.died("p2pd was killed by signal 9", float(now)) for now in range(10)]
    assert waits[:5] == [0, 1, 2, 4, 8]
    assert waits[-1] == MAX_WAIT_S
    assert outages.died("p2pd ended with status 1", 10 + LATELY_S) == 0, "forgotten"


def test_status_shows_an_outage_while_it_lasts_and_many_for_longer() -> None:
    outages = NetworkOutages()
    assert outages.health(0) == ()
    outages.died("p2pd no longer answered", 0)
    (finding,) = outages.health(1)
    assert finding.level == "error" and finding.text == "network: degraded, p2pd no longer answered"
    outages.over()
    assert outages.health(2) == ()
    for now in (3, 4):
        outages.died("p2pd was killed by signal 9", now)
    assert "3 times in 10 minutes" in outages.health(5)[0].text
    outages.over()
    (finding,) = outages.health(6)
    assert finding.level == "warning" and "p2pd died 3 times in 10 minutes" in finding.text
    assert outages.health(4 + LATELY_S) == ()


@pytest.mark.parametrize(("ahead_s", "said"), [(5.0, "clock: 5.0 s ahead of"), (-3600.0, "clock: 1 h behind")])
def test_a_clock_that_is_off_is_shown_with_the_remedy(ahead_s: float, said: str) -> None:
    (finding,) = health.health(None, ClockSkew(ahead_s, 2))
    assert finding.text.startswith(said) and "set-ntp" in finding.remedy


@pytest.mark.parametrize("skew", [None, ClockSkew(0.0, 1), ClockSkew(0.9, 2), ClockSkew(-0.9, 1)])
def test_a_clock_that_is_right_enough_is_not_mentioned(skew: ClockSkew | None) -> None:
    assert health.health("directly", skew) == ()
    health.check(skew)


def test_a_clock_too_far_off_ends_the_start() -> None:
    health.check(ClockSkew(29.0, 5))
    with pytest.raises(ClockTooFarOff, match="31 s ahead"):
        health.check(ClockSkew(31.0, 2))


def test_one_witness_keeps_nobody_out_and_both_clocks_are_named() -> None:
    alone = ClockSkew(-3600.0, 1)
    health.check(alone)
    (finding,) = health.health("directly", alone)
    assert finding.text == "clock: 1 h behind that of a single host: one of the two is wrong"
    assert "set-ntp" in finding.remedy
    assert "one of the two is wrong. If it is this one, synchronise" in str(health.doubt(alone))
    assert health.doubt(ClockSkew(5.0, 1)) is health.doubt(None) is None


def test_a_node_that_cannot_be_called_is_told_what_to_do() -> None:
    assert health.advice(None) is health.advice("directly") is health.advice("mapped") is None
    assert "relay" in str(health.advice("relayed")) and "--announce" in str(health.advice("outgoing"))
    assert [finding.level for finding in health.health("outgoing", ClockSkew(0.0, 1))] == ["warning"]
