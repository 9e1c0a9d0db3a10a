"""The runs that a home holds: what is said of each, and that only those that are named are removed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from noloco_node.base.identity import Identity
from noloco_node.checkpoints import kept_runs, listing
from noloco_node.errors import NodeAlreadyRunning, UsageError
from noloco_node.host import paths
from noloco_node.host.home import Home
from noloco_node.run import amendment, manifest, signed_file
from noloco_node.run.amendment import Amendment
from noloco_node.run.schema import Manifest


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


def was_in(home: Home, name: str, done: int) -> str:
    run = Manifest(name=name, rounds=10)
    folder = home.run(run.run_id)
    signed_file.keep(folder, manifest.sign(run, Identity.load_or_create(home.identity)))
    state = folder / "checkpoints" / f"{done * 50}" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps(about(run.run_id, done)))
    return run.run_id


def about(run_id: str, done: int) -> dict[str, Any]:
    files = {name: {"sha256": "", "bytes": 1} for name in listing.FILES}
    return {"schema": listing.SCHEMA, "run_id": run_id, "layout": "", "round": done, "step": 50 * done, "files": files}


def test_what_is_said_of_each(home: Home) -> None:
    over, begun = was_in(home, "over", 10), was_in(home, "begun", 3)
    (home.root / "runs" / "x").mkdir()
    there = {run.run_id: run for run in kept_runs.kept(home, held=begun)}
    assert (there[over].label, there[over].round, there[over].rounds) == (f"over-{over[:12]}", 10, 10)
    assert there[over].finished and not there[over].running
    assert there[begun].running and not there[begun].finished
    assert there[over].bytes > 300 and (there[over].saved_at or 0) > 1e9
    assert (there["x"].label, there["x"].rounds, there["x"].saved_at, there["x"].bytes) == ("x", None, None, 0)
    assert all(run.running for run in kept_runs.kept(home, held="")), "a node is starting here, in one of them"


def test_the_round_and_the_time_are_those_of_the_newest_checkpoint(home: Home) -> None:
    """A node that trains, or that was killed, has written its events since."""
    run_id = was_in(home, "begun", 3)
    os.utime(home.run(run_id) / "checkpoints" / "150" / "state.json", (1e9, 1e9))
    (home.run(run_id) / "events.jsonl").write_text("{}")
    (run,) = kept_runs.kept(home, held=run_id)
    assert (run.round, run.saved_at) == (3, 1e9)


def test_a_run_that_its_author_ended_has_as_many_rounds_as_it_came_to(home: Home) -> None:
    run_id, author = was_in(home, "ended", 3), Identity.load_or_create(home.identity)
    amendment.write(home.run(run_id), amendment.sign(Amendment(run=run_id, version=1, ended=True), author))
    (run,) = kept_runs.kept(home, held=None)
    assert (run.finished, run.round, run.rounds) == (True, 3, 3)


def test_a_checkpoint_that_a_node_removes_meanwhile_does_not_count(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = was_in(home, "one", 3)
    old, scandir = home.run(run_id) / "checkpoints" / "100", os.scandir
    old.mkdir()

    def removing(path: Any) -> Any:
        if Path(path) == old:
            old.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert [run.run_id for run in kept_runs.kept(home, None)] == [run_id] and not old.exists()
    assert {item.run_id for item in paths.inventory(home)} == {None, run_id}


def test_only_those_that_are_named_are_removed(home: Home) -> None:
    one, two, three = (was_in(home, name, 3) for name in ("one", "two", "three"))
    there = kept_runs.kept(home, held=three)
    for wanted, error, says in (
        ([one[:8], "none"], UsageError, "'none' names no run in .*: name one of these: "),
        ([""], UsageError, "'' names no run"),
        ([one[:3]], UsageError, r"names no run \(of an id 4 digits are needed\) in .*: name one of these: "),
        ([one, three], NodeAlreadyRunning, f"stop it with `noloco-node leave --home {home.root}`"),
    ):
        with pytest.raises(error, match=says):
            kept_runs.remove(home, there, wanted)
        assert len(kept_runs.kept(home, None)) == 3, "all or none"
    assert [run.run_id for run in kept_runs.remove(home, there, [one[:8], f"two-{two[:12]}", "one"])] == [one, two]
    assert [run.run_id for run in kept_runs.kept(home, None)] == [three]


def test_the_newest_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    assert listing.newest(tmp_path / "none") is None
    whole = {name: json.dumps(about("a", done)) for name, done in (("50", 1), ("900", 2), ("900-1", 3))}
    for name, content in {**whole, "1000": "{"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(content)
    (tmp_path / "2000.part").mkdir()
    (tmp_path / "3000").mkdir()
    newest = listing.newest(tmp_path)
    assert newest and newest.round == 3
