"""How fast micro-batches pass, for how long none has, and what `status` says where the stages do not train."""

from collections.abc import Collection

import pytest

from noloco_node.peers.record import PeerRecord
from noloco_node.stages.part import Position
from noloco_node.stages.shown import JUDGED, LEAST_JUDGED, RATE_S, MicroBatchRate, health
from noloco_node.views.status import Health


def test_the_time_without_a_micro_batch_is_that_in_which_the_node_worked() -> None:
    rate = MicroBatchRate()
    assert (rate.idle_s, rate.per_s) == (0.0, None)
    for second in range(100):
        rate.note(second, min(second, 50))
    assert rate.idle_s == 49.0
    assert rate.per_s == (50 - min(50, 99 - RATE_S)) / RATE_S
    rate.note(100, 50, works=False)
    rate.note(101, 50)
    assert rate.idle_s == 1.0


def test_a_node_that_stood_still_was_not_idle() -> None:
    """Half of the stage before may have come to the end meanwhile: it would take the rest for gone."""
    rate = MicroBatchRate()
    for second in range(60):
        rate.note(float(second), 5)
    assert rate.idle_s == 59
    rate.note(8 * 3600.0, 5)
    assert rate.idle_s == 0
    rate.note(8 * 3600.0 + 2, 5)
    assert rate.idle_s == 2


def says(*states: str, stage: int = 1, late: Collection[bool] = ()) -> tuple[Health, ...]:
    """What the node at a stage says; `states`: of one node at each stage, which is itself at its own."""
    rest = {"step": 9, "round": 3, "loss": 2.0, "tokens_per_s": 9.0, "addresses": ()}
    now = {"boot": b"b" * 16, "time": 2.0, "version": "1", "peers": 0, "expires": 60.0}
    seen = [
        PeerRecord(peer_id=f"{at}", state=state, stage=at, **rest, **now)
        for at, state in enumerate(states, 1)
        if at != stage
    ]
    return health(Position(stage - 1, 3), seen, states[stage - 1], late)


def test_a_stage_that_nobody_holds_is_an_error_until_somebody_is_on_the_way() -> None:
    (finding,) = says("training", "training")
    assert (finding.level, finding.text) == ("error", "stage 3 of 3: nobody holds it, so nothing is trained")
    assert "`noloco-node join --stage 3 --start-over`" in finding.remedy
    assert says("training", "training", "joining") == ()
    assert says("training", "training", "finished") == ()
    assert says("finished") == (), "the run is over, and it lingers"


def test_a_first_stage_that_has_done_its_rounds_sends_nothing() -> None:
    """As by --rounds, in the middle of a run: who holds the next stage waits for somebody else."""
    (finding,) = says("finished", "training", "training", stage=2)
    assert (finding.level, "--stage 1" in finding.remedy) == ("warning", True)
    assert finding.text == "stage 1 of 3: whoever holds it has done its rounds, so nothing is trained"
    assert says("finished", "training", "finished", stage=3) == () == says("finished", "training", "training")


@pytest.mark.parametrize("state", ["paused", "solo"])
def test_a_stage_whose_nodes_are_held_back_by_their_volunteers_is_not_lost(state: str) -> None:
    """Its weights are there: nobody has to look for a node that held it."""
    (finding,) = says("training", "training", state)
    assert finding.level == "warning" and "whoever holds it pauses or has used up" in finding.text
    assert "noloco-node join --stage 3" in finding.remedy
    (own,) = says(state, "training", "training")
    assert own.text.startswith("stage 1 of 3: whoever holds it")


def test_micro_batches_that_mostly_come_too_late_are_said_with_what_would_help() -> None:
    working, half = 3 * ["training"], JUDGED // 2
    assert says(*working, late=(LEAST_JUDGED - 1) * [True]) == (), "too few to judge by"
    assert says(*working, late=[*half * [True], *half * [False]]) == (), "half of them come"
    (most,) = says(*working, late=[*(half + 1) * [True], *(half - 1) * [False]])
    (all_of_them,) = says(*working, late=JUDGED * [True])
    assert (most.level, all_of_them.level) == ("warning", "error")
    assert f"stage 1 of 3: {half + 1} of its last {JUDGED} micro-batches got no answer in time" in most.text
    assert "--micro-batch" in most.remedy and "fewer stages" in most.remedy
    (middle,) = says(*working, late=JUDGED * [True], stage=2)
    assert "--micro-batch" not in middle.remedy, "how large they are is the first stage's choice"


def test_where_a_stage_does_not_work_that_is_the_reason() -> None:
    (finding,) = says("training", "training", "paused", late=JUDGED * [True])
    assert "pauses" in finding.text
    assert says("training", "training", "joining", late=JUDGED * [True]) == ()
