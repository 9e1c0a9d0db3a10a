"""Which peers of the next stage are not asked any more, and what a held-out loss is, by what several say: pure."""

import random

import pytest

from noloco_node.stages.agreement import FADES, LEFT_OUT_S, MOST_PEERS, PROVEN, Agreement, Likeness, believed, lying


@pytest.mark.parametrize(
    ("apart", "ratio", "losses", "alike"),
    [
        (0.06, 1.2, (1.0, 1.09), True),
        (1.0, 1.0, (1.0, 1.0), False),
        (2.0, 1.0, (1.0, 1.0), False),
        (0.01, 12.0, (1.0, 1.0), False),
        (0.01, 1 / 12, (1.0, 1.0), False),
        (0.01, 1.0, (1.0, 3.0), False),
        (0.01, 0.0, (1.0, 1.0), False),
        (0.01, 1.0, (0.0, 0.0), True),
    ],
)
def test_answers_are_alike_in_direction_length_and_loss(
    apart: float, ratio: float, losses: tuple[float, float], *, alike: bool
) -> None:
    assert Agreement().are_alike(Likeness(apart, ratio, losses)) is alike


def test_what_is_alike_follows_from_what_most_honest_pairs_are() -> None:
    there, far = Agreement(), Agreement()
    for n in range(30):
        for apart in (0.02 + 0.002 * (n % 10), 0.36, 0.36):  # two of three pairs are with the hostile one
            there.are_alike(Likeness(apart, 1.0, (1.0, 1.0)))
        assert far.are_alike(Likeness(0.2 + 0.004 * n, 1.0, (1.0, 1.0))), "replicas that seldom average"
    assert not there.are_alike(Likeness(0.36, 1.0, (1.0, 1.0)))
    assert there.are_alike(Likeness(0.1, 1.0, (1.0, 1.0)))


def proven(*peers: str) -> Agreement:
    there = Agreement()
    for _ in range(PROVEN):
        there.alike(*peers)
    return there


def test_who_answered_like_others_some_times_is_proven_until_it_answers_otherwise() -> None:
    there = proven("a", "b")
    assert there.is_proven("a") and not there.is_proven("c")
    assert not there.alone("a", 0.0), "once may be an accident"
    assert not there.is_proven("a") and there.is_proven("b")


def test_who_is_alone_twice_is_left_out_for_a_while_and_then_at_once() -> None:
    there = proven("a")
    assert [there.alone("a", 0.0) for _ in range(2)] == [False, True]
    assert there.left_out(1.0) == ["a"] and there.left_out(LEFT_OUT_S + 1) == []
    assert not there.is_proven("a")
    assert there.alone("a", LEFT_OUT_S + 1), "one more is enough"


@pytest.mark.parametrize(("lies", "found"), [(1 / 5, True), (1 / 12, True), (1 / 500, False)])
def test_who_lies_in_a_share_of_its_answers_is_found_and_who_errs_seldom_is_not(lies: float, *, found: bool) -> None:
    there, chance = Agreement(), random.Random(1)
    seen = False
    for _ in range(300):
        if chance.random() < lies:
            seen |= there.alone("a", 0.0)
        else:
            there.alike("a")
    assert seen is found and 0 < FADES < 1


def test_liars_are_remembered_longer_than_others() -> None:
    there = Agreement()
    for _ in range(2):
        there.alone("liar", 0.0)
    for n in range(2 * MOST_PEERS):
        there.alike(str(n))
    assert there.left_out(1.0) == ["liar"]


def test_the_middle_of_three_losses_is_believed_or_two_that_are_close() -> None:
    assert believed([2.0]) is None and believed([2.0, 4.0]) is None
    assert believed([2.0, 2.01]) == pytest.approx(2.005), "a third one need not come"
    assert believed([2.0, 2.1, 100.0]) == 2.1 and believed([2.0, 2.1, 0.0]) == 2.0
    assert believed([2.0, 2.15], close=0.1) == pytest.approx(2.075)
    assert lying({"a": 2.0, "b": 2.1, "c": 100.0}, 2.1) == ["c"]
