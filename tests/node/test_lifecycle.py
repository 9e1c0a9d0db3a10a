"""A node's states and what moves it between them: by lists of events, and by random ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.base.states import AT_WORK, NodeState
from noloco_node.host.limits import PAUSED, QUOTA
from noloco_node.node.lifecycle import (
    DIVERGED,
    LAST_PARTNER,
    NETWORK,
    ROLLED_BACK,
    UNSEEN,
    Action,
    Event,
    Lifecycle,
    Limits,
    ModelReady,
    Order,
    PauseRounds,
    Signal,
    StartCatchUp,
    WaitsFor,
)

NONE, PAUSE, SPENT = Limits(None), Limits(PAUSED, "`noloco-node resume`"), Limits(QUOTA)
BEHIND, SPENT_BEHIND = Limits(None, behind=True), Limits(QUOTA, behind=True)


def told(life: Lifecycle, *events: Event) -> list[Action]:
    return [action for event in events for action in life.handle(event)]


def trains(*events: Event) -> Lifecycle:
    life = Lifecycle()
    told(life, ModelReady(resumed=False), Signal.CAUGHT_UP, *events)
    return life


def test_from_the_start_to_the_last_checkpoint() -> None:
    life = Lifecycle()
    assert (life.state, life.waiting_for) == (NodeState.STARTING, NETWORK)
    assert told(life, WaitsFor("data and model to be ready"), NONE, ModelReady(resumed=False)) == []
    assert told(life, WaitsFor("state from brisk-heron")) == []
    assert (life.state, life.waiting_for, life.at_work) == (NodeState.JOINING, "state from brisk-heron", False)
    assert told(life, Signal.CAUGHT_UP) == [Order.BEGIN_TRAINING]
    assert (life.state, life.waiting_for, life.at_work) == (NodeState.TRAINING, None, True)
    assert told(life, Signal.WORK_DONE) == []
    assert (life.state, life.waiting_for) == (NodeState.TRAINING, LAST_PARTNER)
    assert told(life, Signal.LAST_ROUND_OVER, Signal.FINISHED) == [Order.STOP_ROUNDS]
    assert (life.state, life.waiting_for, life.at_work) == (NodeState.FINISHED, None, True)
    assert told(life, PAUSE, NONE, Signal.SAVED, Signal.LEAVE) == [Order.PAUSE_TRAINING]
    assert (life.state, life.at_work) == (NodeState.LEAVING, False)


def test_a_rendezvous() -> None:
    life = Lifecycle()
    assert told(life, Signal.DIRECTORY_ENTERED, PAUSE, Signal.CAUGHT_UP) == []
    assert (life.state, life.waiting_for) == (NodeState.RENDEZVOUS, None)


def test_a_pause() -> None:
    life = trains()
    assert told(life, PAUSE, PAUSE) == [PauseRounds(PAUSED), Order.PAUSE_TRAINING]
    assert (life.state, life.waiting_for) == (NodeState.PAUSED, "`noloco-node resume`")
    assert told(life, Signal.DIVERGED) == []
    assert told(life, NONE) == [Order.RESUME_ROUNDS, Order.RESUME_TRAINING]
    assert (life.state, life.waiting_for) == (NodeState.TRAINING, None)


def test_a_spent_quota_ends_rounds_and_no_training() -> None:
    life = trains()
    assert told(life, SPENT, Signal.DIVERGED) == [PauseRounds(QUOTA)]
    assert life.state is NodeState.SOLO
    assert told(life, PAUSE) == [PauseRounds(PAUSED), Order.PAUSE_TRAINING]
    assert told(life, SPENT) == [PauseRounds(QUOTA), Order.RESUME_TRAINING]
    assert told(life, NONE) == [Order.RESUME_ROUNDS]


@pytest.mark.parametrize(
    ("limits", "state", "actions"),
    [
        (PAUSE, NodeState.PAUSED, [PauseRounds(PAUSED), Order.PAUSE_TRAINING, Order.BEGIN_TRAINING]),
        (SPENT, NodeState.SOLO, [PauseRounds(QUOTA), Order.BEGIN_TRAINING]),
    ],
)
def test_limits_at_the_start_hold_before_the_first_step(
    limits: Limits, state: NodeState, actions: list[Action]
) -> None:
    life = Lifecycle()
    assert told(life, limits, ModelReady(resumed=True)) == []
    assert life.state is NodeState.STARTING, "what it has costs no traffic"
    assert told(life, Signal.CAUGHT_UP) == actions
    assert life.state is state
    new = Lifecycle()
    told(new, limits, ModelReady(resumed=False))
    assert new.state is NodeState.JOINING, "it has nothing to begin with"


def test_a_long_pause_ends_in_catching_up() -> None:
    life = trains(PAUSE)
    assert told(life, Limits(None, behind=True)) == [StartCatchUp(diverged=False)], "both are paused already"
    assert (life.state, life.waiting_for) == (NodeState.JOINING, None)
    assert told(life, Limits(None, behind=True), NONE) == []
    assert told(life, Signal.CAUGHT_UP) == [Order.STOP_CATCH_UP, Order.RESUME_ROUNDS, Order.RESUME_TRAINING]
    assert life.state is NodeState.TRAINING
    assert told(trains(SPENT), Limits(None, behind=True)) == [Order.RESUME_ROUNDS], "it went on training"


def test_a_node_that_stood_still_and_was_left_behind_catches_up() -> None:
    life = trains()
    assert told(life, BEHIND) == [], "a slow machine, which trains on"
    assert told(life, Signal.STOOD_STILL) == [PauseRounds(UNSEEN)], "a swap would diverge"
    assert told(life, NONE, Signal.BOUNDARY) == []
    assert told(life, Signal.KEPT_UP) == [Order.RESUME_ROUNDS]
    assert told(life, Signal.STOOD_STILL) == [PauseRounds(UNSEEN)]
    assert told(life, Signal.LEFT_BEHIND, Signal.LEFT_BEHIND) == [
        PauseRounds(PAUSED),
        Order.PAUSE_TRAINING,
        StartCatchUp(diverged=False),
    ]
    assert told(life, Signal.CAUGHT_UP) == [Order.STOP_CATCH_UP, Order.RESUME_ROUNDS, Order.RESUME_TRAINING]
    paused = trains(PAUSE)
    assert told(paused, Signal.STOOD_STILL, Signal.LEFT_BEHIND) == [], "the end of the pause will show it"
    assert told(paused, BEHIND) == [StartCatchUp(diverged=False)]
    assert told(trains(Signal.STOOD_STILL, Signal.WORK_DONE), Signal.LEFT_BEHIND) == [Order.RESUME_ROUNDS]


def test_a_node_that_stood_still_while_its_quota_was_used_up_catches_up_when_it_has_some() -> None:
    life = trains(SPENT)
    assert told(life, Signal.STOOD_STILL, Signal.LEFT_BEHIND, SPENT) == [], "no traffic now"
    assert told(life, BEHIND) == [PauseRounds(PAUSED), Order.PAUSE_TRAINING, StartCatchUp(diverged=False)]
    assert told(life, Signal.CAUGHT_UP) == [Order.STOP_CATCH_UP, Order.RESUME_ROUNDS, Order.RESUME_TRAINING]
    kept_up = trains(SPENT, Signal.STOOD_STILL, Signal.KEPT_UP)
    assert told(kept_up, BEHIND) == [Order.RESUME_ROUNDS], "it went on training, on a slow machine"
    unseen = trains(SPENT, Signal.STOOD_STILL)
    assert told(unseen, NONE) == [PauseRounds(UNSEEN)], "until it is seen how far the others are"
    resumed = Lifecycle()
    told(resumed, SPENT, ModelReady(resumed=True), Signal.CAUGHT_UP, Signal.LEFT_BEHIND)
    assert resumed.state is NodeState.SOLO
    assert told(resumed, BEHIND) == [PauseRounds(PAUSED), Order.PAUSE_TRAINING, StartCatchUp(diverged=False)]


def test_a_pause_that_a_spent_quota_follows_may_end_in_catching_up() -> None:
    """As of a node with hours, whose quota is used up when they begin."""
    life = trains(PAUSE, SPENT_BEHIND, SPENT_BEHIND)
    assert told(life, BEHIND) == [PauseRounds(PAUSED), Order.PAUSE_TRAINING, StartCatchUp(diverged=False)]
    assert told(life, Signal.CAUGHT_UP, SPENT_BEHIND, BEHIND)[-1] == Order.RESUME_ROUNDS, "once"


@pytest.mark.parametrize("begun", [Signal.DIVERGED, PAUSE], ids=["diverged", "after a pause"])
def test_a_spent_quota_does_not_stop_catching_up(begun: Event) -> None:
    """The state that it fetches may itself be what used it up, and would be given up each day."""
    life = trains(begun, *([BEHIND] if begun == PAUSE else []))
    assert told(life, SPENT_BEHIND, BEHIND, SPENT_BEHIND) == []
    assert told(life, Signal.CAUGHT_UP) == [Order.STOP_CATCH_UP, PauseRounds(QUOTA), Order.RESUME_TRAINING]
    assert life.state is NodeState.SOLO


def test_a_node_that_resumed_makes_no_swaps_before_it_is_seen_how_far_the_others_are() -> None:
    """Its look-ups may have failed, or it was the first one to be back."""
    life = Lifecycle()
    assert told(life, ModelReady(resumed=True), Signal.LEFT_BEHIND, Signal.CAUGHT_UP) == [
        PauseRounds(UNSEEN),
        Order.BEGIN_TRAINING,
    ]
    assert told(life, Signal.LEFT_BEHIND)[-1] == StartCatchUp(diverged=False)
    kept_up = Lifecycle()
    assert told(kept_up, ModelReady(resumed=True), Signal.KEPT_UP, Signal.CAUGHT_UP) == [Order.BEGIN_TRAINING]


def test_weights_that_diverged_are_replaced() -> None:
    life = trains()
    assert told(life, Signal.DIVERGED, Signal.DIVERGED) == [
        PauseRounds(DIVERGED),
        Order.PAUSE_TRAINING,
        StartCatchUp(diverged=True),
    ]
    assert (life.state, told(life, WaitsFor("state from dry-falcon"))) == (NodeState.JOINING, [])
    assert life.waiting_for == "state from dry-falcon"
    assert told(life, Signal.CAUGHT_UP, Signal.CAUGHT_UP) == [
        Order.STOP_CATCH_UP,
        Order.RESUME_ROUNDS,
        Order.RESUME_TRAINING,
    ]
    assert life.waiting_for is None


def test_divergence_that_is_reported_again_meanwhile_starts_nothing_more() -> None:
    """The pause of the rounds ends one, whose end says again that the weights have diverged."""
    life, done = trains(), list[Action]()

    def perform(event: Event) -> None:
        for action in life.handle(event):
            done.append(action)
            if isinstance(action, PauseRounds):
                perform(Signal.DIVERGED)

    perform(Signal.DIVERGED)
    perform(Signal.DIVERGED)
    assert done.count(StartCatchUp(diverged=True)) == 1
    done.clear()
    perform(Signal.CAUGHT_UP)
    assert done == [Order.STOP_CATCH_UP, Order.RESUME_ROUNDS, Order.RESUME_TRAINING]
    assert PauseRounds(DIVERGED).reason != "diverged", "a round that ends so is no diverged swap"


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (PAUSE, [Order.STOP_CATCH_UP, PauseRounds(PAUSED)]),
        (Signal.LEAVE, [Order.STOP_CATCH_UP, Order.STOP_ROUNDS]),
    ],
)
def test_catching_up_is_stopped(event: Event, actions: list[Action]) -> None:
    life = trains(Signal.DIVERGED)
    assert told(life, event) == actions
    state = life.state
    assert told(life, Signal.CAUGHT_UP) == [], "too late"
    assert life.state is state


def test_offers_of_weights_that_were_given_up_wait_for_the_next_boundary() -> None:
    life = trains()
    assert told(life, Signal.BOUNDARY, Signal.ROLLED_BACK) == [PauseRounds(ROLLED_BACK)]
    assert life.state is NodeState.TRAINING
    assert told(life, Signal.BOUNDARY) == [Order.RESUME_ROUNDS]
    assert told(life, SPENT, Signal.ROLLED_BACK, Signal.BOUNDARY) == [
        PauseRounds(QUOTA),
        PauseRounds(ROLLED_BACK),
        PauseRounds(QUOTA),
    ]
    paused = trains(Signal.ROLLED_BACK, PAUSE)
    assert told(paused, Signal.BOUNDARY, NONE) == [PauseRounds(ROLLED_BACK), Order.RESUME_TRAINING]


def test_a_pause_while_the_last_round_waits_for_a_partner() -> None:
    life = trains(Signal.WORK_DONE)
    assert told(life, Signal.DIVERGED) == [], "there is no more training to go on with"
    assert told(life, PAUSE, Signal.LAST_ROUND_OVER) == [PauseRounds(PAUSED), Order.PAUSE_TRAINING, Order.STOP_ROUNDS]
    assert told(life, Limits(None, behind=True)) == [Order.RESUME_TRAINING]
    assert told(life, Signal.FINISHED) == []
    assert life.state is NodeState.FINISHED


def test_leaving_is_final() -> None:
    life = trains()
    assert told(life, Signal.LEAVE) == [Order.STOP_ROUNDS, Order.PAUSE_TRAINING]
    assert life.at_work
    assert (
        told(life, PAUSE, NONE, Signal.BOUNDARY, Signal.CAUGHT_UP, Signal.DIVERGED, Signal.FINISHED, Signal.LEAVE) == []
    )
    assert told(life, WaitsFor("its last checkpoint")) == []
    assert (life.state, life.waiting_for) == (NodeState.LEAVING, "its last checkpoint")


def test_what_failed_is_not_saved() -> None:
    assert not trains(Signal.FAILED).at_work
    assert not trains(Signal.LEAVE, Signal.FAILED).at_work


OFTEN = [Signal.CAUGHT_UP, Signal.BOUNDARY, Signal.DIVERGED, Signal.ROLLED_BACK, NONE, PAUSE, SPENT, BEHIND]
EVENTS = st.one_of(
    st.sampled_from([*Signal, *OFTEN[4:], ModelReady(resumed=False), ModelReady(resumed=True), WaitsFor("data")]),
    st.sampled_from(OFTEN),
)


@given(st.booleans(), st.lists(EVENTS, max_size=40))
@settings(max_examples=500, deadline=None)
def test_whatever_happens(begun: bool, events: list[Event]) -> None:
    life = trains() if begun else Lifecycle()
    rounds: Action = Order.RESUME_ROUNDS
    paused, catching_up, began = False, False, begun
    for event in events:
        before = life.state
        for action in life.handle(event):
            match action:
                case PauseRounds() | Order.RESUME_ROUNDS | Order.STOP_ROUNDS:
                    assert action != rounds, "told twice"
                    assert rounds != Order.STOP_ROUNDS, "stopped is stopped"
                    rounds = action
                case Order.PAUSE_TRAINING | Order.RESUME_TRAINING:
                    assert paused == (action is Order.RESUME_TRAINING), "each hold has one release"
                    paused = not paused
                case Order.BEGIN_TRAINING:
                    assert not began
                    began = True
                case StartCatchUp() | Order.STOP_CATCH_UP:
                    assert catching_up == (action is Order.STOP_CATCH_UP)
                    catching_up = not catching_up
        state = life.state
        assert state in NodeState
        assert before is not NodeState.LEAVING or state is NodeState.LEAVING
        assert paused == (catching_up or state in (NodeState.PAUSED, NodeState.LEAVING))
        assert (rounds == Order.STOP_ROUNDS) >= (state in (NodeState.LEAVING, NodeState.FINISHED))
        assert not catching_up or (state is NodeState.JOINING and rounds != Order.RESUME_ROUNDS)
        assert not (rounds == Order.RESUME_ROUNDS and state in (NodeState.PAUSED, NodeState.SOLO))
        assert began or state not in {*AT_WORK, NodeState.PAUSED, NodeState.FINISHED}
        assert not life.at_work or began
