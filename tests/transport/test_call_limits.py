"""How many calls a caller, its place and all strangers may have."""

from noloco_node.transport.call_limits import (
    FOR_STRANGERS,
    MAX_CALLS,
    MAX_REMEMBERED,
    OF_PEER,
    OF_PLACE,
    PEER_A_MINUTE,
    PLACE_A_MINUTE,
    CallLimits,
)


def begun(limits: CallLimits, calls: int, peer: str, place: str, now: float = 0.0, *, partner: bool = False) -> int:
    return sum(limits.begin(peer, place, partner, now) for _ in range(calls))


def test_a_peer_and_a_place_have_few_calls_at_once() -> None:
    limits = CallLimits()
    assert begun(limits, 99, "a", "here") == OF_PEER
    limits.end("a", "here", False)
    assert begun(limits, 99, "a", "here") == 1
    assert sum(begun(limits, 99, f"b{number}", "here") for number in range(9)) == OF_PLACE - OF_PEER
    assert begun(limits, 1, "c", "elsewhere") == 1


def test_strangers_from_everywhere_leave_calls_for_partners() -> None:
    limits = CallLimits()
    assert sum(begun(limits, 1, f"p{number}", f"place {number}") for number in range(MAX_CALLS)) == FOR_STRANGERS
    assert begun(limits, 1, "partner", "home", partner=True) == 1
    limits.end("partner", "home", True)
    assert begun(limits, 1, "one more", "there") == 0
    limits.end("p0", "place 0", False)
    assert begun(limits, 1, "one more", "there") == 1


def test_calls_a_minute() -> None:
    limits, made, place_made = CallLimits(), 0, 0
    for tenth in range(1200):  # two minutes, 100 calls a second from one peer, 1000 from its place
        now = tenth / 10
        for peer in range(10):
            for _ in range(10):
                if limits.begin(f"p{peer}", "here", False, now):
                    limits.end(f"p{peer}", "here", False)
                    made += peer == 0
                    place_made += 1
    assert PEER_A_MINUTE / 2 < made <= 3 * PEER_A_MINUTE
    assert 2.9 * PLACE_A_MINUTE < place_made <= 3 * PLACE_A_MINUTE, "what it had saved, and two minutes"


def test_a_flood_of_identities_does_not_make_its_place_forgotten() -> None:
    limits, answered = CallLimits(), 0
    for number in range(2 * MAX_REMEMBERED):
        if limits.begin(f"p{number}", "here", False, 0.0):
            limits.end(f"p{number}", "here", False)
            answered += 1
    assert answered == PLACE_A_MINUTE
    assert len(limits._left) <= MAX_REMEMBERED
    assert not limits._at_once
