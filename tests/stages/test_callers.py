"""From whose micro-batches a stage learns, and whose held-out data it keeps: pure."""

from collections import Counter
from random import Random

import pytest

from noloco_node.stages.callers import (
    COUNTED,
    GONE_S,
    HEARD_S,
    LEAST,
    MOST_CALLERS,
    SHARE,
    SHARED_S,
    TRIED,
    WORSE,
    Callers,
    Turns,
)
from noloco_node.stages.held import MOST_CALLERS as MOST_KEPT
from noloco_node.stages.held import Kept

TOKENS = 64


def turns(there: Callers, times: int, now: float = 0.0, **losses: float) -> Counter[str]:
    """Micro-batches of these callers that count, one of each in turn."""
    counted = Counter[str]()
    for _ in range(times):
        for caller, loss in losses.items():
            counted[caller] += there.counts(caller, loss, TOKENS, now)
    return counted


def test_honest_callers_all_count_also_with_data_of_another_kind() -> None:
    there = Callers()
    assert turns(there, 50, a=1.6, b=1.5, c=1.9) == {"a": 50, "b": 50, "c": 50}
    assert there.not_believed(0.0) == []


def test_wrong_targets_do_not_count_as_soon_as_the_others_are_better() -> None:
    there = Callers()
    assert turns(there, 5, a=3.4, b=3.4, liar=3.4)["liar"] == 5, "nobody knows anything yet"
    counted = turns(there, 60, a=1.6, b=1.6, liar=3.5)
    assert counted["a"] == counted["b"] == 60 and counted["liar"] < 20
    assert there.not_believed(0.0) == ["liar"]
    assert turns(there, 20, a=1.6, b=1.6, liar=3.5)["liar"] == 0
    assert turns(there, 60, a=1.6, b=1.6, liar=1.6)["liar"] > 20, "it counts again when it is as good"


def test_lies_in_a_share_do_not_count_each() -> None:
    there = Callers()
    turns(there, 20, a=1.6, b=1.6, liar=1.6)
    assert not there.counts("liar", 3.5, TOKENS, 0.0)
    assert there.counts("liar", 1.6, TOKENS, 0.0), "the others of it do"


def test_a_liar_with_small_losses_does_not_shut_out_the_others() -> None:
    there = Callers()
    assert turns(there, 60, a=1.6, b=1.6, liar=0.0)["a"] == 60


def test_of_two_callers_nobody_is_the_odd_one() -> None:
    assert turns(Callers(), 40, a=1.6, b=3.5) == {"a": 40, "b": 40}


def test_who_has_gone_is_no_measure() -> None:
    there = Callers()
    turns(there, 20, a=1.6, b=1.6, c=1.6)
    assert turns(there, 20, HEARD_S + 1, c=5.0)["c"] == 20


def test_what_one_that_left_had_holds_the_last_one_back_for_a_moment() -> None:
    """One micro-batch a second of each; then one of them leaves."""
    there, before = Callers(), 0
    for second in range(100):
        counted = turns(there, 1, float(second), a=1.6, b=1.6)
        before += counted["a"]
    assert before == 100
    after = [there.counts("b", 1.6, TOKENS, 100.0 + second) for second in range(60)]
    assert all(after[int(GONE_S) :]), after


def test_a_few_large_micro_batches_are_no_larger_share() -> None:
    there, counted = Callers(), Counter[str]()
    for step in range(400):
        large = [("large", 1000 * TOKENS)] if step % 20 == 0 else []
        for caller, tokens in [("a", TOKENS), ("b", TOKENS), *large]:
            counted[caller] += tokens * there.counts(caller, 3.0, tokens, step * 0.1)
    assert counted["a"] == counted["b"] == 400 * TOKENS and counted["large"] <= 2 * counted["a"]


def test_a_caller_gets_no_more_than_its_share_while_others_call() -> None:
    there, counted = Callers(), Counter[str]()
    for n in range(600):
        caller = "ab"[n // 10 % 2] if n % 10 == 0 else "flood"
        counted[caller] += there.counts(caller, 1.6, TOKENS, n / 600)
    assert counted["a"] + counted["b"] == 60
    assert counted["flood"] <= SHARE * counted["a"] + COUNTED**0.5, counted


def test_who_is_alone_has_all() -> None:
    there = Callers()
    turns(there, 100, a=1.6, b=1.6)
    assert turns(there, 100, SHARED_S + 1, a=1.6)["a"] == 100


def passes_on(there: Callers, times: int, now: float, *callers: str) -> Counter[str]:
    passed = Counter[str]()
    for _ in range(times):
        for caller in callers:
            passed[caller] += there.passes_on(caller, 1, False, now)
    return passed


def test_a_stage_in_the_middle_sends_nothing_on_of_whom_it_does_not_believe() -> None:
    there = Callers()
    assert passes_on(there, 50, 0.0, "a", "liar") == {"a": 50, "liar": 50}, "of two, nobody is the odd one"
    turns(there, 20, a=1.6, b=1.6, c=2.0, liar=3.5)
    assert passes_on(there, 50, 0.0, *"abc", "liar") == {"a": 50, "b": 50, "c": 50, "liar": 0}
    assert there.passes_on("c", 1, True, 0.0) and not there.passes_on("liar", 1, True, 0.0)
    later = HEARD_S + 1
    turns(there, 20, later, a=1.6, b=1.6)
    assert 0 < passes_on(there, 50, later, "a", "b", "liar")["liar"] < 50, "it is tried again"
    turns(there, LEAST, later, liar=1.6)
    assert passes_on(there, 50, later, "liar")["liar"] == 50
    assert passes_on(there, 50, 3 * later, "liar")["liar"] == 50, "who is alone is passed on, whatever it was"


def test_who_stays_unknown_as_it_hangs_up_each_time_is_a_small_part_of_what_is_sent_on() -> None:
    there = Callers()
    turns(there, LEAST, a=1.6, b=1.6)
    passed = passes_on(there, 100, 0.0, "a", "b", "liar", "liar")
    assert passed["a"] == passed["b"] == 100
    assert passed["liar"] <= passed.total() / 4, "where it takes a third, this stage is not believed any more"


@pytest.mark.parametrize(("honest", "unknown"), [(1, 64), (16, 1), (16, 16)])
def test_of_whom_a_stage_in_the_middle_does_not_know_it_sends_on_less_however_large_they_are(
    honest: int, unknown: int
) -> None:
    there, micro_batches = Callers(), Counter[str]()
    turns(there, LEAST, a=1.6, b=1.6)
    for n in range(140):
        now = n * 0.2
        for caller, examples in [("a", honest), ("b", honest), *8 * [("unknown", unknown)]]:
            micro_batches[caller] += there.passes_on(caller, examples, False, now)
    assert micro_batches["a"] == micro_batches["b"] == 140 and micro_batches["unknown"] > 0
    assert micro_batches["unknown"] <= 140 * TRIED + LEAST
    assert micro_batches["unknown"] * unknown <= 140 * honest * TRIED + LEAST * honest + unknown


def test_a_stage_in_the_middle_is_believed_whatever_one_of_its_callers_sends() -> None:
    """One caller floods one of three nodes with wrong targets; losses come back ten micro-batches later."""
    middle, last, under_way = Callers(), Callers(), list[tuple[str, float]]()
    turns(last, 2 * LEAST, mid2=2.0, mid3=2.0)
    for n in range(400):
        now = n * 0.1
        for caller, loss in (("a", 2.0), ("b", 2.0), *2 * [("liar", 4.0)]):
            if middle.passes_on(caller, 1, False, now):
                last.counts("mid1", loss, TOKENS, now)
                under_way.append((caller, loss))
        turns(last, 1, now, mid2=2.0, mid3=2.0)
        while len(under_way) > 10:
            caller, loss = under_way.pop(0)
            middle.counts(caller, loss, TOKENS, now)
    assert middle.not_believed(40.0) == ["liar"] and last.not_believed(40.0) == []


def test_the_middle_of_the_others_is_the_same_for_all_at_once_as_for_each() -> None:
    for several in range(8):
        for seed in range(20):
            there, chance = Callers(), Random(f"{several} {seed}")
            turns(there, LEAST, **{f"peer{n}": chance.choice([1.0, 1.2, 1.5, 3.0]) for n in range(several)})
            expected = [who for who, each in there._callers.items() if each.mean > WORSE * there._others(who, 0.0)]
            assert there.not_believed(0.0) == expected


def test_callers_are_forgotten() -> None:
    there = Callers()
    for n in range(2 * MOST_CALLERS):
        there.counts(str(n), 1.0, TOKENS, 0.0)
    assert len(there._callers) == MOST_CALLERS


def test_held_out_data_of_each_caller_are_kept_and_nobody_fills_the_store() -> None:
    kept = Kept[str]()
    for n in range(8):
        kept.keep("a", f"a{n}", 4, 24)
    assert [len(each) for each in kept.of_each()] == [6], "who is alone has all"
    kept.keep("b", "b0", 4, 24)
    for n in range(30):
        kept.keep("liar", f"x{n}", 4, 24)
    kept.keep("liar", "far too much", 1000, 24)
    assert sorted(map(len, kept.of_each())) == [1, 2, 2]
    kept.keep("c", "c0", 4, 24)
    assert len(list(kept.of_each())) == MOST_KEPT


def test_who_sends_many_lets_the_others_have_their_turn() -> None:
    there = Turns[str]()
    for n in range(6):
        there.put("flood", f"f{n}", 1)
    there.put("a", "a0", 1)
    there.put("b", "b0", 1)
    assert [there.next() for _ in range(9)] == ["f0", "a0", "b0", "f1", "f2", "f3", "f4", "f5", None]


def done(there: Turns[tuple[str, int]], times: int, **sizes: int) -> Counter[str]:
    """Examples of each, of so many micro-batches, where what is through is followed by the next of its caller. Of each
    that is named here two more wait."""
    found = Counter[str]()
    for caller, size in 2 * [*sizes.items()]:
        there.put(caller, (caller, size), size)
    for _ in range(times):
        caller, size = there.next() or ("", 0)
        found[caller] += size
        there.put(caller, (caller, size), size)
    return found


def test_who_sends_large_ones_gets_no_more_than_the_others() -> None:
    found = done(Turns(), 16 * 33, a=4, b=4, large=64)
    assert found["a"] == found["b"] and abs(found["large"] - found["a"]) <= 2 * 64, found


def test_who_comes_back_has_saved_up_nothing_and_owes_nothing() -> None:
    there = Turns[tuple[str, int]]()
    there.put("pauses", ("pauses", 4), 4)
    assert there.next()
    done(there, 1000, a=4, b=4)
    found = done(there, 90, pauses=4)
    assert all(abs(found[each] - 120) <= 8 for each in ("a", "b", "pauses")), found
    there = Turns()
    done(there, 1000, alone=4)
    found = done(there, 90, new=4)
    assert abs(found["alone"] - found["new"]) <= 8, found


def test_new_names_do_not_keep_the_others_out() -> None:
    """Of as many as may wait here at once."""
    there, found = Turns[str](), Counter[str]()
    for caller in 4 * ["honest", "new"]:
        there.put(f"{caller} {len(there._due)}" if caller == "new" else caller, caller, 4)
    for n in range(80):
        caller = there.next() or ""
        found[caller] += 1
        there.put(f"{caller} {n}" if caller == "new" else caller, caller, 4)
    assert found["honest"] >= 80 // 5 and len(there._due) <= 5, found
