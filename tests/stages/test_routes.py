"""Who gets a micro-batch, how many are under way, how large what comes may be: pure."""

import random
from collections import Counter

import pytest

from noloco_node.stages.routes import MOST_BACK_OFF_S, Routes
from noloco_node.stages.usual_size import HEARD_S, LEAST, MOST, REMEMBERED, UsualSize
from noloco_node.stages.window import MOST as MOST_UNDER_WAY
from noloco_node.stages.window import TRIAL_S, Window


def routes(*peers: str) -> Routes:
    made = Routes(random.Random(1))
    made.candidates(peers)
    return made


def test_all_are_drawn_alike_while_all_are_free() -> None:
    there = routes("a", "b", "c")
    there.ended("a", 1000, 0.0)
    drawn = Counter(there.draw(0.0) for _ in range(3000))
    assert set(drawn) == {"a", "b", "c"} and min(drawn.values()) > 900, "who claims more places gains nothing"


def test_who_has_fewer_places_is_drawn_less_often_and_who_has_none_not() -> None:
    there = routes("a", "b")
    there.sent("b")
    there.ended("b", 1, 0.0)
    drawn = Counter(there.draw(0.0) for _ in range(1000))
    assert 0.12 < drawn["b"] / 1000 < 0.28
    there.sent("b")
    there.full("b", 0.0)
    assert {there.draw(0.1) for _ in range(100)} == {"a"}
    assert "b" in {there.draw(1.0) for _ in range(100)}, "it is tried again"


def test_who_does_not_answer_is_left_out_longer_each_time() -> None:
    there = routes("a")
    now, waits = 0.0, []
    for _ in range(8):
        there.sent("a")
        there.ended("a", None, now)
        began = now
        while there.draw(now) is None:
            now += 0.25
        waits.append(now - began)
    assert waits == sorted(waits) and waits[0] <= 1 and waits[-1] == MOST_BACK_OFF_S
    there.ended("a", 2, now)
    assert there.draw(now) == "a"


def test_what_was_under_way_when_a_peer_went_is_one_failure() -> None:
    """As where its network daemon ends: it is back in three seconds, and was left out for thirty."""
    there = routes("a")
    for _ in range(8):
        there.sent("a")
    for at in range(8):
        there.ended("a", None, at / 100)
    assert there.draw(0.5) is None and there.draw(1.1) == "a"


def test_a_fixed_route_stays_and_leads_round_who_is_gone() -> None:
    there = routes("a", "b", "c")
    (went,) = there.fixed(1, 0.0)
    assert all(there.fixed(1, 0.0) == [went] for _ in range(9))
    assert {there.fixed(rank, 0.0)[0] for rank in range(3)} == {"a", "b", "c"}, "as many nodes reach as many peers"
    assert there.fixed(1, 0.0, 3) == ["b", "c", "a"]
    there.ended(went, None, 0.0)
    assert went not in there.fixed(1, 0.0, 3) and len(there.fixed(1, 0.0, 3)) == 2
    assert routes().draw(0.0) is None and routes().fixed(1, 0.0) == []


def run(window: Window, rate: float, seconds: float, now: float, *, waits: bool = True) -> float:
    """As many micro-batches a second as the link and the window let through."""
    for _ in range(int(seconds * rate)):
        now += 1 / rate
        if waits:
            window.waited()
        window.passed(now)
    return now


def test_the_window_grows_while_more_comes_through() -> None:
    window, now = Window(2), 0.0
    for _ in range(40):
        now = run(window, min(window.size, 6) * 5.0, TRIAL_S + 1, now)
    assert 6 <= window.size <= 7, "more than six at once are no faster"


def test_the_window_stays_where_the_stage_never_waits_and_where_it_is_given() -> None:
    calm, given = Window(4), Window(3, fixed=True)
    run(calm, 20.0, 20 * TRIAL_S, 0.0, waits=False)
    run(given, 20.0, 20 * TRIAL_S, 0.0)
    given.lost()
    assert calm.size == 4 and given.size == 3


def test_losses_make_the_window_smaller_and_it_has_an_end() -> None:
    window, now = Window(4), 0.0
    for _ in range(3):
        window.lost()
    assert window.size == 1
    for _ in range(100):
        now = run(window, window.size * 5.0, TRIAL_S + 1, now)
    assert window.size == MOST_UNDER_WAY


def sent(usual: UsualSize, size: float, sender: str = "", now: float = 0.0) -> float:
    """For training."""
    factor = usual.factor(size, now)
    usual.counts(size, sender, now)
    return factor


def test_what_is_much_larger_than_usual_counts_as_a_long_one() -> None:
    usual = UsualSize()
    assert all(sent(usual, 1.0 + n % 3) == 1.0 for n in range(LEAST))
    for _ in range(30):
        assert sent(usual, 1e9) * 1e9 <= MOST * MOST * 3.0
        assert sent(usual, 2.0) == 1.0
    assert sent(usual, 0.0) == 1.0


def test_what_overflows_counts_for_nothing_from_the_first_on() -> None:
    usual = UsualSize()
    for size in (float("inf"), float("nan")):
        assert [sent(usual, size) for _ in range(LEAST)] == [0.0] * LEAST
    assert all(sent(usual, 1.0) == 1.0 for _ in range(LEAST))
    assert sent(usual, 1e9) * 1e9 <= MOST, "and it has not moved what is usual"


@pytest.mark.parametrize("small", [0.0, 1e-20])
def test_one_that_sends_next_to_nothing_does_not_keep_the_others_out(small: float) -> None:
    usual = UsualSize()
    for _ in range(REMEMBERED):
        sent(usual, small, "small")
    honest = [sent(usual, 1.0, "honest") for _ in range(2 * LEAST)]
    assert honest[LEAST:] == [1.0] * LEAST


def test_zeros_move_nothing() -> None:
    usual = UsualSize()
    for size in [1.0] * LEAST + [MOST] + [0.0] * REMEMBERED:
        sent(usual, size)
    assert usual.factor(2 * MOST) == 0.5


def test_a_sender_that_came_first_and_stays_keeps_nobody_out() -> None:
    usual, answered = UsualSize(), 0
    for second in range(3600):
        if second < LEAST or second % 100 == 0:
            sent(usual, 1e-6, "small", second)
        if second >= LEAST:
            answered += sum(sent(usual, 1.0, each, second) == 1.0 for each in "abc")
    assert answered >= 3 * (3600 - LEAST) - 3 * LEAST


def test_more_small_senders_than_others_count_until_they_are_gone() -> None:
    usual = UsualSize()
    for now in range(20):
        assert all(sent(usual, 1.0, sender, now) == 1.0 for sender in "abc")
    for k in range(4):
        for _ in range(LEAST):
            sent(usual, 1e-6, f"small {k}", 20.0)
    assert sent(usual, 1.0, "a", 20.0) < 1
    assert usual.factor(1.0, 21.0 + HEARD_S) == 1.0
