"""How many calls a caller, its place and all strangers may have."""

import pytest

from noloco_node.base.places import RELAYED
from noloco_node.transport.call_limits import (
    FLOOD,
    FOR_STRANGERS,
    MAX_CALLS,
    MAX_REMEMBERED,
    OF_PEER,
    PEER_A_MINUTE,
    PLACE_A_MINUTE,
    REFUSED_A_MINUTE,
    CallLimits,
)


def begun(limits: CallLimits, calls: int, peer: str, place: str, now: float = 0.0, *, partner: bool = False) -> int:
    return sum(limits.begin(peer, place, partner, now) for _ in range(calls))


def test_a_peer_and_a_place_have_few_calls_at_once() -> None:
    limits = CallLimits()
    assert begun(limits, 99, "a", "here") == OF_PEER
    limits.end("a", "here", False)
    assert begun(limits, 99, "a", "here") == 1
    assert sum(begun(limits, 99, f"b{number}", "here") for number in range(9)) == 39 - OF_PEER
    assert begun(limits, 1, "c", "elsewhere") == 1


@pytest.mark.parametrize(("places", "least"), [(5, 16), (20, 7), (100, 1)])
def test_places_that_hold_as_much_as_they_get_leave_calls_for_another_one(places: int, least: int) -> None:
    """15 identities at five places held all calls of strangers."""
    limits = CallLimits()
    for turn in range(3 * OF_PEER):
        for number in range(places):
            begun(limits, 1, f"p{number}-{turn % 3}", f"place {number}")
    assert begun(limits, 99, "newcomer", "elsewhere") >= least


@pytest.mark.parametrize("partner", [False, True])
def test_places_one_after_the_other_take_all_only_if_they_are_many(partner: bool) -> None:
    limits, places = CallLimits(), 0
    while sum(begun(limits, OF_PEER, f"p{places}-{n}", f"place {places}", partner=partner) for n in range(3)):
        places += 1
    assert places >= 20


def test_strangers_of_a_place_leave_its_calls_for_partners() -> None:
    """All who come over relays that nobody chose are at one place: any of them shut out all partners there."""
    limits = CallLimits()
    flood = 0
    for number in range(2 * PLACE_A_MINUTE):
        if limits.begin(f"s{number // 600}", RELAYED, False, 0.0):
            limits.end(f"s{number // 600}", RELAYED, False)
            flood += 1
    assert flood == PLACE_A_MINUTE
    assert begun(limits, 1, "partner", RELAYED, partner=True) == 1


def test_strangers_from_everywhere_leave_calls_for_partners() -> None:
    limits = CallLimits()
    assert sum(begun(limits, 1, f"p{number}", f"place {number}") for number in range(MAX_CALLS)) == FOR_STRANGERS
    assert begun(limits, 1, "partner", "home", partner=True) == 1
    limits.end("partner", "home", True)
    assert begun(limits, 1, "one more", "there") == 0
    limits.end("p0", "place 0", False)
    assert begun(limits, 1, "one more", "there") == 1


def floods(limits: CallLimits, peer: str, now: float = 0.0, *, partner: bool = False) -> bool:
    return limits.is_flood(peer, "here", partner, now)


def test_who_goes_on_after_it_was_refused_is_a_flood() -> None:
    limits = CallLimits()
    assert begun(limits, PEER_A_MINUTE + FLOOD - 1, "a", "here") == OF_PEER and not floods(limits, "a")
    begun(limits, 1, "a", "here")
    assert floods(limits, "a") and not floods(limits, "b")
    assert begun(limits, 1, "b", "here") == 1, "its place is not charged with what was refused"
    begun(limits, 1, "a", "here", now=60.0)
    assert not floods(limits, "a", 60.0)


def test_a_flood_is_seen_while_time_passes() -> None:
    """What a peer may call again meanwhile kept it from ever owing a whole number of calls."""
    limits, calls = CallLimits(), 0
    while calls < 2 * PEER_A_MINUTE and not floods(limits, "a", calls / 1000):
        begun(limits, 1, "a", "here", now=calls / 1000)
        calls += 1
    assert PEER_A_MINUTE + FLOOD <= calls < 1.1 * (PEER_A_MINUTE + FLOOD)


def test_identities_of_a_place_that_goes_on_are_shut_out_one_after_the_other() -> None:
    """Each new one had hundreds of calls to be refused."""
    limits = CallLimits()
    assert begun(limits, 1, "served", "here") == 1
    refused = [floods(limits, f"p{number // 50}") for number in range(2 * REFUSED_A_MINUTE)]
    assert refused == [False] * REFUSED_A_MINUTE + [True] * REFUSED_A_MINUTE
    assert not floods(limits, "served") and not floods(limits, "partner", partner=True)
    assert not floods(limits, "p1", now=60.0)


def test_calls_a_minute() -> None:
    limits, made = CallLimits(), 0
    for tenth in range(1200):  # two minutes, 5 calls a second from each of 20 peers of one place
        for peer in range(tenth % 2, 20, 2):
            if limits.begin(f"p{peer}", "here", False, tenth / 10):
                limits.end(f"p{peer}", "here", False)
                made += 1
    assert 2.9 * PLACE_A_MINUTE < made <= 3 * PLACE_A_MINUTE, "what it had saved, and two minutes"


def test_calls_that_are_given_back_are_not_counted() -> None:
    limits, made = CallLimits(), 0
    for hundredth in range(12_000):  # two minutes, 100 a second
        if limits.begin("a", "here", False, hundredth / 100):
            made += 1
            limits.end("a", "here", False)
            limits.give_back("a", "here", False)
    assert made == 12_000
    assert begun(limits, PEER_A_MINUTE + FLOOD, "a", "here", now=120.0) == OF_PEER, "it has saved nothing"
    assert floods(limits, "a", 120.0)
    limits.give_back("unknown", "there", False)
    assert begun(limits, 1, "unknown", "there") == 1


def test_a_peer_that_never_stops_calling_has_what_it_had_saved() -> None:
    limits, made = CallLimits(), 0
    for hundredth in range(6000):
        if limits.begin("a", "here", False, hundredth / 100):
            limits.end("a", "here", False)
            made += 1
    assert PEER_A_MINUTE <= made < 1.2 * PEER_A_MINUTE


def test_a_flood_of_identities_does_not_make_its_place_forgotten() -> None:
    limits, answered = CallLimits(), 0
    for number in range(2 * MAX_REMEMBERED):
        if limits.begin(f"p{number}", "here", False, 0.0):
            limits.end(f"p{number}", "here", False)
            answered += 1
    assert answered == PLACE_A_MINUTE
    assert len(limits._left) <= MAX_REMEMBERED
    assert not limits._at_once
