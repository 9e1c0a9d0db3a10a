"""Which candidates are not called for a while."""

import pytest

from noloco_node.core.backoff import MAX_BACKOFF_PHASES, MAX_BACKOFF_S, SILENT, Backoffs


def test_the_wait_doubles_with_each_refusal_up_to_its_bound() -> None:
    waits, backoffs = list[float](), Backoffs()
    for _ in range(12):
        backoffs.failed("b", 100.0, 8.0)
        waits.append(backoffs.until("b") - 100.0)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64, 64, 64] and max(waits) == MAX_BACKOFF_PHASES * 8


def test_short_phases_are_bounded_by_the_clock() -> None:
    backoffs = Backoffs()
    for _ in range(20):
        backoffs.failed("b", 0.0, 0.1)
    assert backoffs.until("b") == MAX_BACKOFF_S
    backoffs.failed("b", 0.0, 0.1, at_least_s=600.0)
    assert backoffs.until("b") == 600.0, "as the peer said itself"


def test_one_silence_counts_as_many_refusals() -> None:
    backoffs = Backoffs()
    backoffs.failed("b", 0.0, 10.0, silent=True)
    assert backoffs.until("b") == 20.0 and backoffs.is_silent("b") and not backoffs.answers("b")
    backoffs.failed("b", 20.0, 10.0)
    assert not backoffs.is_silent("b"), "it answered"
    backoffs.swapped("b")
    assert backoffs.answers("b") and not backoffs.refuses_always("b") and backoffs.until("b") < 0


@pytest.mark.parametrize("silent", [False, True])
def test_who_calls_is_there_again_unless_it_answers_nobody(silent: bool) -> None:
    backoffs = Backoffs()
    for _ in range(SILENT):
        backoffs.failed("b", 0.0, 10.0, silent=silent)
    backoffs.called("b")
    assert backoffs.answers("b") is not silent
    assert backoffs.refuses_always("b"), "only a whole swap shows that it has time"


def test_who_is_no_candidate_any_more_is_forgotten() -> None:
    backoffs = Backoffs()
    backoffs.failed("b", 0.0, 10.0)
    backoffs.failed("c", 0.0, 10.0)
    backoffs.keep({"c"})
    assert (backoffs.since_swap("b"), backoffs.since_swap("c")) == (0, 1)
