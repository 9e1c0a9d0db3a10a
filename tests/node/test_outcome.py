"""The last lines of a node's terminal."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_node import STATUS

from noloco_node.host.home import Home
from noloco_node.node import outcome
from noloco_node.views.status import Checkpoints, Rounds, StageView

DONE = replace(STATUS, round=100, time_s={"step": 3800.0, "other": 40.0, "paused": 99.0})
SAVED = replace(DONE, checkpoint=Checkpoints(12_600_000, saved_round=100))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path))
    return Home(tmp_path)


def test_what_was_reached_where_it_lies_and_what_comes_next(home: Home) -> None:
    assert list(outcome.lines(SAVED, 100, home)) == [
        "finished tiny-3f9a2c81d0e4 at round 100 of 100: 41 rounds (39 together, 2 solo) in 1 h 4 min, "
        "2.1M tokens in all, loss 5.600 → 1.870, on held-out data 5.610 → 1.920",
        f"its checkpoint of round 100 (12.6 MB): {home.root}/runs/{STATUS.run_id}/checkpoints",
        "to take the model out: noloco-node export --to my-model",
        "to let it continue a text: noloco-node sample 'Once upon a time'",
    ]


def test_what_a_node_of_one_stage_has_is_not_the_model(home: Home) -> None:
    *_, saved, others, peers = outcome.lines(replace(SAVED, stage=StageView(number=2, stages=3)), 100, home)
    assert saved.startswith("its checkpoint")
    assert others.endswith("noloco-node export --to my-model --average <a home of each other stage>")
    assert peers.endswith("noloco-node export --to my-model --average 1")


def test_the_commands_name_home_and_run_where_they_must(home: Home, tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / "other home" / "runs" / run).mkdir(parents=True)
    flags = f" --home '{tmp_path}/other home'"
    left = replace(SAVED, round=41, checkpoint=Checkpoints(12_600_000, saved_round=41))
    *_, goes_on, takes_out, sample = outcome.lines(left, 100, Home(tmp_path / "other home"))
    assert goes_on == f"to go on: noloco-node join{flags}"
    assert takes_out.endswith(f"export --to my-model{flags} --run {STATUS.run}")
    assert sample.endswith(f"'Once upon a time'{flags} --run {STATUS.run}")


def test_a_node_that_did_its_own_rounds_can_go_on(home: Home) -> None:
    first, _, goes_on, *_ = outcome.lines(replace(SAVED, rounds_target=100), 500, home)
    assert first.startswith("left tiny-3f9a2c81d0e4 at round 100 of 500: ")
    assert goes_on == "to go on: noloco-node join"


def test_a_loop_goes_on_by_its_script(home: Home) -> None:
    """`join` does not know a task that nobody has installed."""
    left = replace(SAVED, round=41, checkpoint=Checkpoints(12_600_000, saved_round=41))
    assert "to go on: run the script again" in outcome.lines(left, 100, home, "mine", is_loop=True)


def test_what_was_not_saved_is_no_advice(home: Home) -> None:
    lost = replace(DONE, checkpoint=Checkpoints(12_600_000), last_error="disk full: free some")
    assert list(outcome.lines(lost, 100, home))[1:] == [
        "no checkpoint was written: what was trained is lost (disk full: free some)"
    ]


def test_where_only_the_checkpoint_of_before_is_there_it_is_named(home: Home) -> None:
    lost = replace(DONE, checkpoint=Checkpoints(12_600_000, resumed_round=20), last_error="disk full: free some")
    _, since, kept, *advice = outcome.lines(lost, 100, home)
    assert since == "no checkpoint was written: what was trained since round 20 is lost (disk full: free some)"
    assert kept.startswith("its checkpoint of round 20 (12.6 MB)") and advice


def test_a_node_that_did_no_round_of_its_own_says_what_it_has(home: Home) -> None:
    """It took the state of a peer that is at the end of the run."""
    unchanged = replace(SAVED, loss=None, loss_first=None, rounds=Rounds())
    assert list(outcome.lines(unchanged, 100, home)) == [
        "finished tiny-3f9a2c81d0e4 at round 100 of 100, without a round of its own: loss on held-out data 1.920",
        *list(outcome.lines(SAVED, 100, home))[1:],
    ]
    unmeasured, *_ = outcome.lines(replace(unchanged, eval_loss=None), 100, home)
    assert unmeasured == "finished tiny-3f9a2c81d0e4 at round 100 of 100, without a round of its own"


def test_the_round_is_that_of_the_checkpoint_where_one_ended_while_the_node_left(home: Home) -> None:
    first, second, *_ = outcome.lines(replace(SAVED, round=99), 100, home)
    assert first.startswith("finished tiny-3f9a2c81d0e4 at round 100 of 100: ")
    assert second.startswith("its checkpoint of round 100 ")
    unsaved, earlier, *_ = outcome.lines(
        replace(SAVED, round=32, checkpoint=Checkpoints(12_600_000, saved_round=30)), 100, home
    )
    assert unsaved.startswith("left tiny-3f9a2c81d0e4 at round 32 of 100: ")
    assert earlier.startswith("its checkpoint of round 30 ")


def test_a_node_without_weights_says_nothing(home: Home) -> None:
    assert not list(outcome.lines(replace(DONE, loss=None, checkpoint=Checkpoints(12_600_000)), 100, home))


def test_a_model_that_is_the_volunteers_own_is_not_exported(home: Home) -> None:
    *_, last = outcome.lines(SAVED, 100, home, task="mine")
    assert last.startswith("to take the model out: `model.safetensors` in the newest folder there")
