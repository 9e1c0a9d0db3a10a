"""Whether a swap did harm, by the losses with and without it and by the replica's own course."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies

from noloco_node.core.verdict import Course, Losses, Verdict


def course(*losses: float) -> Course:
    made = Course()
    for loss in losses:
        made.passed(loss)
    return made


def judge(
    with_it: float,
    partner: float,
    own: float = 2.0,
    losses: tuple[float, ...] = (3.0, 2.0, 2.0, 2.0),
) -> Verdict:
    return course(*losses).judge(Losses(2.0, 2.0), Losses(with_it, own), lambda: Losses(partner, own))


@pytest.mark.parametrize(
    ("with_it", "partner", "harmful", "a_lie"),
    [
        (1.95, 9.0, False, False),  # better
        (2.01, 9.0, False, False),  # as in an honest swap
        (2.1, 2.3, True, False),  # what was sent is worse than the middle: it has trained less, or is a little lie
        (2.1, 3.5, True, True),  # ... and worse than we ever were
        (2.1, 2.02, False, False),  # the partner is as good: two halves that trained apart
        (math.nan, 2.0, True, False),
        (5.5, math.nan, True, True),
    ],
)
def test_verdicts(with_it: float, partner: float, harmful: bool, a_lie: bool) -> None:
    judged = judge(with_it, partner)
    assert (judged.harmful, judged.harmful and judged.a_lie) == (harmful, a_lie)


FALLING = (3.0, 2.7, 2.43, 2.2, 2.0)


def test_a_swap_may_cost_what_a_phase_gains() -> None:
    assert not judge(2.15, 2.4, losses=FALLING).harmful
    assert judge(2.3, 2.6, losses=FALLING).harmful
    assert judge(2.15, 2.4, losses=(2.0, 2.0, 2.0)).harmful


def test_a_loss_below_zero_gains_as_one_above() -> None:
    def judged(*losses: float) -> Verdict:
        last = losses[-1]
        worse = Losses(last + 0.08, last)
        return course(*losses).judge(Losses(last, last), worse, lambda: Losses(last + 0.2, last))

    assert course(-2.0, -2.2, -2.42).gain == pytest.approx(0.1)
    assert not judged(-2.0, -2.2, -2.42).harmful
    assert judged(-2.42, -2.42, -2.42).harmful
    assert course(0.0, -1.0).gain == 0.0


@pytest.mark.parametrize(("partner", "harmful"), [(5.5, False), (5.8, True), (math.nan, True)])
def test_what_is_worse_than_untrained_weights_is_no_slow_replicas(partner: float, harmful: bool) -> None:
    def judged(course: Course) -> Verdict:
        return course.judge(Losses(2.9, 2.0), Losses(3.1, 2.0), lambda: Losses(partner, 2.0))

    began = Course()
    began.passed(5.6, untrained=True)
    began.passed(2.9)
    assert (judged(began).harmful, judged(began).harmful and judged(began).a_lie) == (harmful, harmful)
    came_later = course(5.6, 2.9)
    assert judged(came_later).harmful is math.isnan(partner), "it does not know what the run began with"


def test_what_half_a_phase_does_not_gain_is_counted() -> None:
    assert judge(2.15, 2.5, losses=FALLING).excess == pytest.approx(0.020, abs=0.003)


def test_what_momentum_will_make_of_it_counts() -> None:
    def judged(grows: float) -> Verdict:
        lost = Losses(2.12, 2.0)
        return course(*FALLING).judge(Losses(2.0, 2.0), lost, lambda: Losses(2.6, 2.0), grows)

    assert not judged(1.0).harmful
    assert judged(2.0).harmful
    assert judged(2.0).excess - judged(1.0).excess == pytest.approx(0.06)


def test_what_no_held_out_example_shows_the_own_batch_does() -> None:
    usual = judge(2.0, 9.0, own=2.18)
    assert not usual.harmful and usual.own_excess < 0, "with data of its own a replica fits its own"
    often = judge(2.0, 9.0, own=2.3)
    assert not often.harmful and often.own_excess == pytest.approx(0.04), "it is counted"
    assert judge(2.0, 9.0, own=2.8).harmful


def test_who_sees_few_classes_may_lose_of_its_own_until_that_is_above_the_held_out_loss() -> None:
    def judged(own: float, held_out: float) -> Verdict:
        return course(3.0).judge(Losses(held_out, 0.1), Losses(0.97 * held_out, own), lambda: Losses(3.0, own))

    honest = judged(0.2, 3.0)
    assert not honest.harmful and honest.excess < 0
    assert judged(4.0, 3.0).harmful
    assert judged(0.2, 0.05).harmful, "a partner that fits the held-out examples gains nothing by it"


def hidden(judging: Course, rise: float, *source: str, over: bool = True) -> Verdict:
    """A swap by which the own batch's loss rises, and the held-out data show nothing."""

    def partner() -> Losses:
        return Losses(1.5, 2.0 * (1 + 2 * rise))

    swapped = Losses(1.5, 2.0 * (1 + rise))
    return judging.judge(Losses(1.5, 2.0), swapped, partner, 1.0, frozenset(source), over=over)


def among_friends(*rises: float) -> Course:
    judging = course(3.0, 2.0)
    for number, rise in enumerate(rises):
        hidden(judging, rise, f"friend {number}", f"place {number}")
    return judging


def test_what_the_held_out_data_do_not_show_is_compared_with_swaps_with_others() -> None:
    judging = course(3.0, 2.0)
    for rise in (0.06, 0.05, 0.06, 0.07):
        assert not hidden(judging, rise, "a liar", "its host").harmful, "it is compared with nothing"
    for rise in (0.001, 0.0):
        hidden(judging, rise, "a friend", "elsewhere")
    assert not hidden(judging, 0.06, "a liar", "its host").harmful, "two are not enough"
    hidden(judging, 0.002, "another friend", "there")
    for source in (("a liar", "its host"), ("a liar", "its other address"), ("its other name", "its host")):
        caught = hidden(judging, 0.06, *source)
        assert caught.harmful and caught.own_excess == pytest.approx(0.06 - 0.001 - 0.005), "swap after swap"
    little = hidden(judging, 0.02, "a liar", "its host")
    assert not little.harmful and little.own_excess == pytest.approx(0.014), "that is counted"
    assert not hidden(judging, 0.003, "a friend", "elsewhere").harmful


def test_half_of_the_others_cannot_set_what_is_usual() -> None:
    judging = among_friends(0.0, 0.0, 0.0, 0.06, 0.06, 0.06)
    assert hidden(judging, 0.06, "one more").harmful


def test_gifts_on_the_held_out_data_allow_nothing() -> None:
    judging = among_friends(0.0, 0.0, 0.001)
    judging.judge(Losses(2.0, 2.0), Losses(1.7, 1.7), lambda: Losses(1.7, 1.7), 1.0, frozenset({"a liar"}))
    assert hidden(judging, 0.06, "a liar").harmful


def test_what_is_taken_back_for_its_held_out_loss_allows_nothing() -> None:
    judging = course(4.0, 1.0, 1.0, 1.0)
    for friend in ("a", "b", "c"):
        hidden(judging, 0.001, friend)
    for _ in range(2):
        decoy = judging.judge(Losses(1.0, 1.5), Losses(1.06, 1.5), lambda: Losses(2.0, 1.5), 1.0, frozenset({"a liar"}))
        assert decoy.harmful and not decoy.a_lie
    assert hidden(judging, 0.06, "a liar").harmful


def test_as_long_as_nothing_was_measured_it_is_not_known_what_chance_does() -> None:
    judging = course(3.0, 2.0)
    for friend in ("a", "b", "c"):
        judging.judge(Losses(2.0), Losses(2.0, 1.9), lambda: Losses(2.0), 1.0, frozenset({friend}))
    assert not hidden(judging, 0.06, "one more").harmful


@pytest.mark.parametrize("own", [2.0, -math.inf])
def test_swaps_that_hide_nothing_do_not_tell_how_far_chance_goes(own: float) -> None:
    """Where the own batch's loss is below the held-out one: what is not known counts as no rise."""
    judging = among_friends(-0.03, 0.03, 0.0)
    for number in range(30):
        shown = Losses(2.0, 1.9)
        judging.judge(Losses(2.0, own), shown, lambda: Losses(2.0, 1.9), 1.0, frozenset({f"peer {number}"}))
    assert not hidden(judging, 0.06, "one more").harmful


def test_where_each_sees_data_of_its_own_a_tenth_is_nothing() -> None:
    judged = hidden(among_friends(0.02, 0.2, 0.1, 0.15, 0.04, 0.12), 0.15, "one more")
    assert not judged.harmful and judged.own_excess < 0.05


def test_only_swaps_that_are_over_and_no_lies_are_a_measure() -> None:
    judging = course(3.0, 2.0)
    for _ in range(5):
        hidden(judging, 0.0, "a friend", over=False)
        assert judging.judge(Losses(2.0, 2.0), Losses(2.0, 3.0), lambda: Losses(9.0, 9.0)).a_lie
    assert not hidden(judging, 0.06, "one more").harmful


def test_a_partner_as_good_as_we_are_does_no_harm_by_the_own_batch_either() -> None:
    """The way between two good ones may be worse than both."""
    judged = among_friends(0.0, 0.0, 0.0).judge(Losses(2.0, 2.0), Losses(2.0, 2.1), lambda: Losses(2.0, 2.0))
    assert not judged.harmful


def test_other_weights_are_compared_anew() -> None:
    judging = among_friends(0.0, 0.0, 0.0)
    judging.restart()
    assert not hidden(judging, 0.06, "one more").harmful


LOSS = strategies.floats(0.1, 9.0)


@given(with_it=LOSS, own_share=strategies.floats(0.1, 1.0), without=LOSS, own=LOSS, last=LOSS)
def test_an_own_loss_below_the_held_out_one_is_not_needed_without_the_swap(
    with_it: float, own_share: float, without: float, own: float, last: float
) -> None:
    tried, judging = Losses(with_it, own_share * with_it), course(3.0, last)
    known, unknown = (
        judging.judge(each, tried, lambda: Losses(9.0)) for each in (Losses(without, own), Losses(without))
    )
    assert replace(unknown, own_excess=0.0) == replace(known, own_excess=0.0)
    assert known.own_excess <= unknown.own_excess < 0


def test_small_harms_are_counted() -> None:
    assert judge(2.016, 9.0).excess == pytest.approx(0.008 - 0.002)
    assert judge(1.99, 9.0).excess == pytest.approx(-0.005 - 0.002)


def test_a_replica_that_is_broken_already_blames_nobody() -> None:
    broken = Losses(math.nan, math.nan)
    assert not course().judge(broken, broken, lambda: broken).harmful


def test_without_a_course_nobody_is_blamed() -> None:
    judged = course().judge(Losses(2.0, 2.0), Losses(3.0, 2.0), lambda: Losses(9.0, 9.0))
    assert judged.harmful and not judged.a_lie


def test_the_partner_is_evaluated_only_where_it_decides() -> None:
    def never() -> Losses:
        raise AssertionError

    assert not course(2.0).judge(Losses(2.0, 2.0), Losses(1.9, 2.0), never).harmful
