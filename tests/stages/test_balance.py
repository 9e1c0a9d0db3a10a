"""Which node moves to a thinner stage, and when: alone, and many with views of their own, in virtual time."""

import random
from collections import Counter
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from noloco_node.stages.balance import APART, HOLD_S, TURN_S, Balance
from noloco_node.stages.part import Position

FIRST = Position(0, 2)
LOOK_S, SEEN_S = 5.0, 12.0
"""How often a node looks; how long it takes at most until others see what it has done, their look left out."""


def first_move(others: dict[str, int], *, name: str = "a", seconds: int = 300, at: Position = FIRST, **allow):
    """When a node that sees these moves, and where to."""
    known, may_take = allow.get("known", lambda _: True), allow.get("may_take", lambda _stage, nodes: nodes > 0)
    balance = Balance(name)
    for now in range(seconds):
        if to := balance.moves_to(float(now), at, others, known, may_take):
            return now, to
    return None


def test_it_moves_once_the_look_has_held_and_it_is_its_turn():
    assert first_move({"b": 1, "c": 1, "d": 2}) == (HOLD_S, 2)
    assert first_move({"a": 1, "b": 1, "d": 2}, name="c") == (HOLD_S + 2 * TURN_S, 2)
    assert first_move({"b": 1, "d": 2}) is None, "one more is as good as even"
    assert first_move({"b": 2, "c": 2, "d": 2}) is None, "its own is the thin one"
    assert first_move({"b": 1, "c": 1, "d": 1, "e": 2, "f": 2, "g": 3}, at=Position(0, 3))[1] == 3, "the thinnest"


def test_a_change_begins_the_wait_anew():
    balance, everybody = Balance("a"), {"b": 1, "c": 1, "d": 2}
    ask = lambda now, others: balance.moves_to(now, FIRST, others, lambda _: True, lambda *_: True)  # noqa: E731
    assert ask(0.0, everybody) is None
    assert ask(HOLD_S - 1, {**everybody, "e": 1}) is None
    assert ask(HOLD_S + 1, {**everybody, "e": 1}) is None
    assert ask(2 * HOLD_S, {"b": 1, "d": 2}) is None
    assert ask(2 * HOLD_S + 1, {**everybody, "e": 1}) is None
    assert ask(3 * HOLD_S + 1, {**everybody, "e": 1}) == 2


def test_made_up_nodes_move_nobody():
    crowd = {f"x{number}": 1 for number in range(30)}
    assert first_move({"b": 1, "d": 2, **crowd}, known=lambda peer: peer == "b") is None
    assert first_move({"b": 1, "c": 1, "d": 2}, known=lambda peer: peer in "bc")


def test_an_empty_stage_is_taken_only_by_who_can_fill_it():
    assert first_move({"b": 1}) is None, "nobody has its weights"
    assert first_move({"b": 1}, may_take=lambda stage, nodes: stage == 2) == (HOLD_S, 2)
    assert first_move({}, may_take=lambda stage, nodes: True) is None, "the last one of a stage stays"


counts = st.lists(st.integers(0, 6), min_size=2, max_size=4)


@given(counts, st.integers(0, 1 << 16), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
@example([3, 1], 0, 1.0)
@example([6, 6, 0, 1], 0, 1.0)
@example([2, 4, 3, 6], 4, 1.0)  # turns that begin as late as one sees a move and another does not yet
def test_moves_end_and_empty_no_stage(sizes: list[int], seed: int, movable: float):
    """Nodes look at moments of their own, and see what others did some time later."""
    chance = random.Random(seed)
    names = [f"{chance.getrandbits(64):016x}" for _ in range(sum(sizes))]
    stages = [stage for stage, size in enumerate(sizes, 1) for _ in range(size)]
    holds = dict(zip(names, stages, strict=True))
    moves_itself = {name for name in names if chance.random() < movable}
    balances = {name: Balance(name) for name in names}
    looks = {name: chance.uniform(0, LOOK_S) for name in names}
    done: list[tuple[float, str, int, int]] = []
    quiet_from = now = 0.0
    while now - quiet_from < 2 * HOLD_S + TURN_S * len(names) and names:
        name = min(looks, key=looks.__getitem__)
        now, looks[name] = looks[name], looks[name] + LOOK_S
        others = dict(holds)
        for at, mover, before, _ in done:
            if now < at + chance.uniform(0, SEEN_S):
                others[mover] = before
        del others[name]
        if name not in moves_itself:
            continue
        own = Position(holds[name] - 1, len(sizes))
        if to := balances[name].moves_to(now, own, others, lambda _: True, lambda _stage, nodes: nodes > 0):
            before = Counter(holds.values())
            assert before[own.number] >= before[to] + APART
            done.append((now, name, own.number, to))
            holds[name], balances[name], quiet_from = to, Balance(name), now
    assert all(later[0] - sooner[0] > SEEN_S for sooner, later in pairwise(done)), "one at a time"
    assert len(done) <= sum(sizes)
    after = Counter(holds.values())
    assert {stage for stage, size in enumerate(sizes, 1) if size} == after.keys()
    for stage in after:
        if any(holds[name] == stage for name in moves_itself):
            assert after[stage] <= min(after.values()) + 1
