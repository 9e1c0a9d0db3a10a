"""What a node says of its checkpoints: room beforehand, what became of the last one, and from which it went on."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from noloco_node.base import atomic_files
from noloco_node.checkpoints import checkpoint
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.core.state import State
from noloco_node.errors import DiskFull, NolocoError, UsageError
from noloco_node.terminal.text import print_status
from noloco_node.views.status import StatusView

RUN, LAYOUT = "ab" * 32, bytes(32)
PARAMETERS = 1_000_000


def a_state(round: int = 7, **given: Any) -> State:
    outer = {"phi": torch.randn(3), "delta": torch.zeros(3)}
    return State(round, 10 * round, {"a": outer["phi"]}, outer, {}, **given)


def room(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(atomic_files, "free_bytes", lambda _: free)


def save_fails(keeper: CheckpointKeeper, state: State, kind: type[NolocoError] = DiskFull) -> None:
    with pytest.raises(kind) as failed:
        keeper.save(state, LAYOUT)
    keeper.not_saved(state.round, failed.value)  # as the node does, whatever it was that failed


def test_a_warning_until_two_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = CheckpointKeeper(tmp_path, RUN)
    for free in (None, 40_000_000):
        room(monkeypatch, free)
        assert keeper.health(PARAMETERS) == ()
    room(monkeypatch, 39_999_999)
    (finding,) = keeper.health(PARAMETERS)
    assert (finding.level, finding.text) == ("warning", "disk: 40.0 MB left, a checkpoint needs 20.0 MB")


@pytest.mark.parametrize(
    ("free", "level", "said"),
    [
        (40_000_000, "INFO", "a checkpoint takes 20.0 MB, the disk has 40.0 MB left"),
        (20_000_000, "INFO", "a checkpoint takes 20.0 MB, the disk has 20.0 MB left"),
        (None, "INFO", "a checkpoint takes 20.0 MB, the disk has - left"),
        (
            19_999_999,
            "WARNING",
            "a checkpoint takes 20.0 MB, the disk has 20.0 MB left: what is trained cannot be saved. "
            "Free some, or move NOLOCO_HOME",
        ),
    ],
)
def test_a_disk_too_small_for_one_is_said_at_the_start(
    free: int | None, level: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room(monkeypatch, free)
    caplog.set_level("INFO")
    CheckpointKeeper(Path("/nowhere"), RUN).say_room(PARAMETERS)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, said)


def test_what_was_not_saved_says_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = CheckpointKeeper(tmp_path, RUN)
    for round, saved in ((7, "and no earlier one is"), (9, "the last that is saved is round 8")):
        room(monkeypatch, 1)
        save_fails(keeper, a_state(round))
        assert isinstance(keeper.unsaved, DiskFull)
        assert str(keeper.unsaved).startswith(f"round {round} is not saved, {saved}: the disk is full")
        room(monkeypatch, None)
        keeper.save(a_state(8), LAYOUT)
        assert keeper.unsaved is None


def test_a_disk_that_takes_nothing_is_an_error_whatever_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is read-only after errors."""
    keeper = CheckpointKeeper(tmp_path, RUN)

    def fails(*_: object) -> None:
        raise UsageError("cannot write there: Read-only file system. Move NOLOCO_HOME")

    monkeypatch.setattr(checkpoint, "save", fails)
    save_fails(keeper, a_state(), UsageError)
    (finding,) = keeper.health(PARAMETERS)
    assert finding.level == "error" and "round 7 is not saved" in finding.text
    assert keeper.unsaved is not None and keeper.unsaved.exit_code == 20


def test_an_error_from_one_that_did_not_fit_to_one_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = CheckpointKeeper(tmp_path, RUN)
    room(monkeypatch, 1)
    save_fails(keeper, a_state())
    room(monkeypatch, None)
    (finding,) = keeper.health(PARAMETERS)
    assert finding.level == "error" and finding.text.endswith("and the last one was not written")
    keeper.save(a_state(), LAYOUT)
    assert keeper.health(PARAMETERS) == ()
    assert keeper.view(PARAMETERS).saved_round == 7


def test_what_a_kill_left_half_written_is_gone_when_room_is_spoken_of(tmp_path: Path) -> None:
    (left := tmp_path / ".writing-abc").mkdir()
    (left / "model.safetensors").write_bytes(bytes(100))
    assert CheckpointKeeper(tmp_path, RUN).resume(LAYOUT) is None
    assert not list(tmp_path.iterdir())


def test_status_says_where_it_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CheckpointKeeper(tmp_path, RUN).resume(LAYOUT) is None
    CheckpointKeeper(tmp_path, RUN).save(a_state(), LAYOUT)
    keeper = CheckpointKeeper(tmp_path, RUN)
    assert keeper.last_good(LAYOUT) is not None and keeper.view(PARAMETERS).resumed_round is None
    assert keeper.resume(LAYOUT) is not None
    keeper.save(a_state(9), LAYOUT)
    room(monkeypatch, 3_000_000_000)
    view = StatusView(peer_id="p", name="n", version="0", state="training", checkpoint=keeper.view(PARAMETERS))
    out = io.StringIO()
    print_status(view, Console(file=out, width=200))
    resumed = "resumed from the checkpoint of round 7 · saved at round 9"
    assert f"{resumed} · a checkpoint takes 20.0 MB, 3.0 GB left on the disk\n" in out.getvalue()


def used(
    tmp_path: Path, losses: Sequence[tuple[float | None, float | None]], data: Sequence[str | None] = (None, None, None)
) -> tuple[int, int]:
    """Of checkpoints that were taken at these losses, on held-out data and in training: the step at which a start
    resumes, and the step to which a roll-back goes."""
    for number, ((eval_loss, loss), on) in enumerate(zip(losses, data, strict=True), start=1):
        state = a_state(number, eval_loss=eval_loss, loss=loss, measured_on=on)
        checkpoint.save(tmp_path, state, RUN, LAYOUT)
    keeper = CheckpointKeeper(tmp_path, RUN)
    start, back = keeper.resume(LAYOUT), keeper.last_good(LAYOUT)
    assert start and back
    return start.step, back.step


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "resumes_at", "rolls_back_to"),
    [
        ([(3.0, 3.1), (2.0, 2.1), (1.5, 1.4)], 30, 30),  # as it should be
        ([(1.5, 1.4), (1.55, 1.5), (1.6, 1.7)], 30, 30),  # rises a little
        ([(1.5, 1.4), (1.4, 1.4), (1.4, 2.0)], 30, 20),  # the evaluation was before the harm
        ([(1.5, 1.4), (5.5, 1.4), (5.5, 5.5)], 10, 10),  # ln 256: nothing is left of the model
        ([(2.5, 2.5), (4.1, 4.1), (2.4, 2.4)], 30, 30),  # mended since
        ([(1.5, None), (2.1, None), (2.1, None)], 30, 10),  # worse, but a start loses more by going back
        ([(1.5, 1.4), (None, None), (None, None)], 30, 30),  # not known
        ([(1.5, 1.4), (1.5, 1.4), (NAN, 1.4)], 20, 20),
        ([(1.5, 1.4), (1.5, INF), (1.5, 1.4)], 30, 30),
        ([(NAN, NAN), (NAN, NAN), (NAN, NAN)], 30, 30),  # no choice
        ([(0.01, 0.01), (0.01, 0.01), (0.03, 0.05)], 30, 30),  # small losses vary more
        ([(-5.0, -5.0), (-5.0, -5.0), (-5.1, -4.9)], 30, 30),  # densities
        ([(-5.0, -5.0), (-5.0, -5.0), (1.0, 1.0)], 20, 20),
    ],
)
def test_the_newest_that_was_not_harmed(
    tmp_path: Path, losses: list[tuple[float | None, float | None]], resumes_at: int, rolls_back_to: int
) -> None:
    assert used(tmp_path, losses) == (resumes_at, rolls_back_to)


@pytest.mark.parametrize(
    ("data", "resumes_at", "rolls_back_to"),
    [
        (["a", "a", "a"], 20, 20),
        (["a", "a", "b"], 30, 30),  # as after `--data` named another language
        (["a", "b", "b"], 20, 20),  # harmed since then
        (["b", "a", "b"], 20, 20),  # the newest of those that no other shows to be worse
        ([None, None, "b"], 30, 30),  # an older version did not write it
        ([None, None, None], 20, 20),
    ],
)
def test_losses_on_other_data_are_not_compared(
    tmp_path: Path, data: list[str | None], resumes_at: int, rolls_back_to: int
) -> None:
    assert used(tmp_path, [(1.5, 1.4), (1.5, 1.4), (5.5, 5.5)], data) == (resumes_at, rolls_back_to)


def test_a_harmed_one_is_named_and_used_where_the_others_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert used(tmp_path, [(1.5, 1.4), (1.5, 1.4), (5.5, 5.5)]) == (20, 20)
    assert "checkpoint 30 is skipped: its loss is far above that of checkpoint 20" in caplog.text
    for step in (10, 20):
        (tmp_path / str(step) / "inner.pt").unlink()
    found = CheckpointKeeper(tmp_path, RUN).resume(LAYOUT)
    assert found and found.step == 30


def test_a_start_knows_that_it_lost_what_was_trained(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, RUN)
    assert keeper.resume(LAYOUT) is None and not keeper.none_usable, "there was nothing"
    keeper.save(a_state(), LAYOUT)
    assert keeper.resume(LAYOUT) and not keeper.none_usable
    (tmp_path / "70" / "inner.pt").unlink()
    assert keeper.resume(LAYOUT) is None and keeper.none_usable


def test_one_without_losses_is_read_as_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_state(), RUN, LAYOUT)
    about = json.loads((tmp_path / "70" / "state.json").read_text())
    del about["loss"], about["eval_loss"], about["measured_on"]
    (tmp_path / "70" / "state.json").write_text(json.dumps(about))
    found = CheckpointKeeper(tmp_path, RUN).resume(LAYOUT)
    assert found and found.step == 70
