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
    Action,
    BeginTraining,
    Boundary,
    CaughtUp,
    DirectoryEntered,
    Diverged,
    Event,
    Failed,
    Finished,
    LastRoundOver,
    Leave,
    Lifecycle,
    Limits,
    ModelReady,
    PauseRounds,
    PauseTraining,
    ResumeRounds,
    ResumeTraining,
    RolledBack,
    Saved,
    StartCatchUp,
    StopCatchUp,
    StopRounds,
    WaitsFor,
    WorkDone,
)

NONE, PAUSE, SPENT = Limits(None), Limits(PAUSED, "`noloco-node resume`"), Limits(QUOTA)


def told(life: Lifecycle, *events: Event) -> list[Action]:
    return [action for event in events for action in life.handle(event)]


def trains(*events: Event) -> Lifecycle:
    life = Lifecycle()
    told(life, ModelReady(resumed=False), CaughtUp(), *events)
    return life


def test_from_the_start_to_the_last_checkpoint() -> None:
    life = Lifecycle()
    assert (life.state, life.waiting_for) == (NodeState.STARTING, NETWORK)
    assert told(life, WaitsFor("data and model to be ready"), NONE, ModelReady(resumed=False)) == []
    assert told(life, WaitsFor("state from brisk-heron")) == []
    assert (life.state, life.waiting_for, life.at_work) == (NodeState.JOINING, "state from brisk-heron", False)
    assert told(life, CaughtUp()) == [BeginTraining()]
    assert (life.state, life.waiting_for, life.at_work) == (NodeState.TRAINING, None, True)
    assert told(life, WorkDone()) == []
    assert (life.state, life.waiting_for) == (NodeState.TRAINING, LAST_PARTNER)
    assert told(life, LastRoundOver(), Finished()) == [StopRounds()]
    assert (life.state, life.waiting_for, life.at_work) == (NodeState.FINISHED, None, True)
    assert told(life, PAUSE, NONE, Saved(), Leave()) == [PauseTraining()]
    assert (life.state, life.at_work) == (NodeState.LEAVING, False)


def test_a_rendezvous() -> None:
    life = Lifecycle()
    assert told(life, DirectoryEntered(), PAUSE, CaughtUp()) == []
    assert (life.state, life.waiting_for) == (NodeState.RENDEZVOUS, None)


def test_a_pause() -> None:
    life = trains()
    assert told(life, PAUSE, PAUSE) == [PauseRounds(PAUSED), PauseTraining()]
    assert (life.state, life.waiting_for) == (NodeState.PAUSED, "`noloco-node resume`")
    assert told(life, Diverged()) == []
    assert told(life, NONE) == [ResumeRounds(), ResumeTraining()]
    assert (life.state, life.waiting_for) == (NodeState.TRAINING, None)


def test_a_spent_quota_ends_rounds_and_no_training() -> None:
    life = trains()
    assert told(life, SPENT, Diverged()) == [PauseRounds(QUOTA)]
    assert life.state is NodeState.SOLO
    assert told(life, PAUSE) == [PauseRounds(PAUSED), PauseTraining()]
    assert told(life, SPENT) == [PauseRounds(QUOTA), ResumeTraining()]
    assert told(life, NONE) == [ResumeRounds()]


@pytest.mark.parametrize(
    ("limits", "state", "actions"),
    [
        (PAUSE, NodeState.PAUSED, [PauseRounds(PAUSED), PauseTraining(), BeginTraining()]),
        (SPENT, NodeState.SOLO, [PauseRounds(QUOTA), BeginTraining()]),
    ],
)
def test_limits_at_the_start_hold_before_the_first_step(
    limits: Limits, state: NodeState, actions: list[Action]
) -> None:
    life = Lifecycle()
    assert told(life, limits, ModelReady(resumed=True)) == []
    assert life.state is NodeState.STARTING, "what it has costs no traffic"
    assert told(life, CaughtUp()) == actions
    assert life.state is state
    new = Lifecycle()
    told(new, limits, ModelReady(resumed=False))
    assert new.state is NodeState.JOINING, "it has nothing to begin with"


def test_a_long_pause_ends_in_catching_up() -> None:
    life = trains(PAUSE)
    assert told(life, Limits(None, behind=True)) == [StartCatchUp(diverged=False)], "both are paused already"
    assert (life.state, life.waiting_for) == (NodeState.JOINING, None)
    assert told(life, Limits(None, behind=True), NONE) == []
    assert told(life, CaughtUp()) == [StopCatchUp(), ResumeRounds(), ResumeTraining()]
    assert life.state is NodeState.TRAINING
    assert told(trains(SPENT), Limits(None, behind=True)) == [ResumeRounds()], "it went on training"


def test_weights_that_diverged_are_replaced() -> None:
    life = trains()
    assert told(life, Diverged(), Diverged()) == [PauseRounds(DIVERGED), PauseTraining(), StartCatchUp(diverged=True)]
    assert (life.state, told(life, WaitsFor("state from dry-falcon"))) == (NodeState.JOINING, [])
    assert life.waiting_for == "state from dry-falcon"
    assert told(life, CaughtUp(), CaughtUp()) == [StopCatchUp(), ResumeRounds(), ResumeTraining()]
    assert life.waiting_for is None


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (PAUSE, [StopCatchUp(), PauseRounds(PAUSED)]),
        (SPENT, [StopCatchUp(), PauseRounds(QUOTA), ResumeTraining()]),
        (Leave(), [StopCatchUp(), StopRounds()]),
    ],
)
def test_catching_up_is_stopped(event: Event, actions: list[Action]) -> None:
    life = trains(Diverged())
    assert told(life, event) == actions
    state = life.state
    assert told(life, CaughtUp()) == [], "too late"
    assert life.state is state


def test_offers_of_weights_that_were_given_up_wait_for_the_next_boundary() -> None:
    life = trains()
    assert told(life, Boundary(), RolledBack()) == [PauseRounds(ROLLED_BACK)]
    assert life.state is NodeState.TRAINING
    assert told(life, Boundary()) == [ResumeRounds()]
    assert told(life, SPENT, RolledBack(), Boundary()) == [
        PauseRounds(QUOTA),
        PauseRounds(ROLLED_BACK),
        PauseRounds(QUOTA),
    ]
    paused = trains(RolledBack(), PAUSE)
    assert told(paused, Boundary(), NONE) == [PauseRounds(ROLLED_BACK), ResumeTraining()]


def test_a_pause_while_the_last_round_waits_for_a_partner() -> None:
    life = trains(WorkDone())
    assert told(life, Diverged()) == [], "there is no more training to go on with"
    assert told(life, PAUSE, LastRoundOver()) == [PauseRounds(PAUSED), PauseTraining(), StopRounds()]
    assert told(life, Limits(None, behind=True)) == [ResumeTraining()]
    assert told(life, Finished()) == []
    assert life.state is NodeState.FINISHED


def test_leaving_is_final() -> None:
    life = trains()
    assert told(life, Leave()) == [StopRounds(), PauseTraining()]
    assert life.at_work
    assert told(life, PAUSE, NONE, Boundary(), CaughtUp(), Diverged(), Finished(), Leave()) == []
    assert told(life, WaitsFor("its last checkpoint")) == []
    assert (life.state, life.waiting_for) == (NodeState.LEAVING, "its last checkpoint")


def test_what_failed_is_not_saved() -> None:
    assert not trains(Failed()).at_work
    assert not trains(Leave(), Failed()).at_work


EVENTS = st.one_of(
    st.sampled_from(
        [
            *(CaughtUp(), Boundary(), Diverged(), RolledBack(), NONE, PAUSE, SPENT, Limits(None, behind=True)),
            *(ModelReady(resumed=False), ModelReady(resumed=True), WorkDone(), LastRoundOver(), Finished()),
            *(WaitsFor("data"), DirectoryEntered(), Saved(), Failed(), Leave()),
        ]
    ),
    st.sampled_from([CaughtUp(), Boundary(), Diverged(), RolledBack(), NONE, PAUSE, SPENT, Limits(None, behind=True)]),
)


@given(st.booleans(), st.lists(EVENTS, max_size=40))
@settings(max_examples=500, deadline=None)
def test_whatever_happens(begun: bool, events: list[Event]) -> None:
    life = trains() if begun else Lifecycle()
    rounds: Action = ResumeRounds()
    paused, catching_up, began = False, False, begun
    for event in events:
        before = life.state
        for action in life.handle(event):
            match action:
                case PauseRounds() | ResumeRounds() | StopRounds():
                    assert action != rounds, "told twice"
                    assert rounds != StopRounds(), "stopped is stopped"
                    rounds = action
                case PauseTraining() | ResumeTraining():
                    assert paused == isinstance(action, ResumeTraining), "each hold has one release"
                    paused = not paused
                case BeginTraining():
                    assert not began
                    began = True
                case StartCatchUp() | StopCatchUp():
                    assert catching_up == isinstance(action, StopCatchUp)
                    catching_up = not catching_up
        state = life.state
        assert state in NodeState
        assert before is not NodeState.LEAVING or state is NodeState.LEAVING
        assert paused == (catching_up or state in (NodeState.PAUSED, NodeState.LEAVING))
        assert (rounds == StopRounds()) >= (state in (NodeState.LEAVING, NodeState.FINISHED))
        assert not catching_up or (state is NodeState.JOINING and rounds != ResumeRounds())
        assert not (rounds == ResumeRounds() and state in (NodeState.PAUSED, NodeState.SOLO))
        assert began or state not in {*AT_WORK, NodeState.PAUSED, NodeState.FINISHED}
        assert not life.at_work or began
