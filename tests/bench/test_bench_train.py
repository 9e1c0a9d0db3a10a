"""`bench train` and `bench scale`: the pace, the curves, and that all systems run here."""

import json
import time
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from noloco_node import cli
from noloco_node.bench import links, train
from noloco_node.bench.rivals import paced, real_nodes
from noloco_node.bench.rivals.local_steps import LocalSteps
from noloco_node.bench.rivals.paced import Setting
from noloco_node.run import toml
from noloco_node.training import model
from noloco_node.training.task import Task

SMALL = Setting(hidden=16, layers=1, length=8, tokens=16, step_s=0.05, held_out=1, every_s=0.0)


def built(setting: Setting, number: int = 0, weights: str | None = None) -> LocalSteps:
    steps = LocalSteps()
    steps.build(setting.options, number, weights)
    return steps


def test_a_step_takes_its_time_and_an_evaluation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = replace(SMALL, step_s=0.5)
    steps = built(pace)
    began = time.monotonic()
    steps.gradient(steps.module)
    assert time.monotonic() - began >= pace.step_s
    assert pace.step_s <= steps.task.step_s <= time.monotonic() - began
    pauses: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", pauses.append)
        steps.evaluate()
    assert not pauses, "an evaluation of a tiny model, without the pace"
    assert len(steps.task.held_out) == pace.held_out, "a node's own would take as long as some thirty steps"


def test_everybody_trains_the_same_model_on_data_of_its_own() -> None:
    one, other = (built(SMALL, number) for number in (0, 1))
    assert isinstance(one.task, Task)
    assert all(torch.equal(*pair) for pair in zip(one.parameters, other.parameters, strict=True))
    (first,), (second,) = (next(paced.batches(steps.task, f"node {n}")) for n, steps in enumerate((one, other)))
    assert first.shape == (2, SMALL.length + 1)
    assert not torch.equal(first, second)


def test_weights_are_left_and_judged_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paced.WEIGHTS, "")  # removed again at the end
    steps = built(SMALL, weights=str(tmp_path))
    optimizer = steps.adamw()
    steps.evaluate()
    assert not list(tmp_path.iterdir()), "nothing was trained yet"
    for _ in range(3):
        steps.gradient(steps.module)
        steps.descend(optimizer)
    began = time.time()
    steps.evaluate()
    evaluated = time.time()
    steps.evaluate()
    assert not list(tmp_path.iterdir()), "they are copied in the next step's pause"
    left = torch.cat([p.detach().flatten() for _, p in model.parameters(steps.module)]).half()
    steps.gradient(steps.module)
    steps.descend(optimizer)
    steps.task._saving.shutdown()
    (file,) = tmp_path.iterdir()
    assert float(file.name) <= evaluated + 0.001 and torch.equal(torch.load(file), left)
    (tmp_path / f".{began:.3f}").write_bytes(b"")  # a node was ended while it wrote
    (at_first, first), (second, loss) = paced.losses(SMALL, tmp_path, began - 60)
    assert at_first == 0
    assert 60 <= round(second, 2) <= 60 + time.time() - began
    assert 3 < loss < first < 6


def test_the_task_is_installed_for_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(paced.install(tmp_path)))
    (found,) = entry_points(group="noloco_node.tasks", name=paced.NAME)
    assert found.load() is paced.Paced


def test_a_node_finds_what_its_user_had_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/site:/more")
    assert real_nodes._path(tmp_path).endswith(":/site:/more")
    monkeypatch.delenv("PYTHONPATH")
    assert not real_nodes._path(tmp_path).endswith(":"), "an empty entry would be the working folder"


def test_the_run_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    model = {"task": paced.NAME, "options": SMALL.options}
    path.write_text(real_nodes._toml({"name": "bench", "model": model, "inner": {**SMALL.inner, "seconds": 2.0}}))
    run = toml.load(path)
    assert run.model.options == SMALL.options
    assert (run.inner.seconds, run.inner.batch_tokens) == (2.0, SMALL.tokens)


def test_seconds_to_a_loss_lie_on_a_line_between_two_points() -> None:
    curve = [(10.0, 4.0), (20.0, 3.0), (30.0, 2.0)]
    assert train.seconds_to(curve, 2.5) == 25.0
    assert train.seconds_to(curve, 3.0) == 20.0
    assert train.seconds_to(curve, 1.0) is None
    assert train.seconds_to([], 5.0) is None


def test_the_mean_of_nodes_lies_on_lines_between_their_points() -> None:
    one, other = [(0.0, 5.0), (10.0, 3.0), (20.0, 2.0)], [(0.0, 5.0), (15.0, 2.0)]
    assert train.mean([one]) == one
    assert train.mean([one, other]) == [(0.0, 5.0), (10.0, 3.0), (15.0, 2.25)]


@pytest.mark.parametrize(
    "words",
    [
        "train --systems eager,sgd",
        "train --nodes 1",
        "train --mbit 0",
        "train --plot picture.txt",
        "scale --real 1",
        "scale --virtual x",
    ],
)
def test_what_is_no_setting_is_refused_before_anything_is_started(words: str) -> None:
    assert cli.main(["bench", *words.split()]) == 2


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words", ["train --nodes 2 --seconds 6", "scale --real 2 --virtual 16"], ids=lambda words: words.split()[0]
)
def test_quick_runs(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if why := links.why_not("tc"):
        pytest.skip(why)
    assert cli.main(["bench", *words.split(), "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert [row["system"] for row in rows] in ([*train.SYSTEMS], ["real nodes", "virtual time"])
    assert all(row["bytes_per_node"] > 0 for row in rows)
    assert not [line for line in links.sh("ip netns list").splitlines() if line.startswith(links.space(""))]
    if document["bench"] == "train":
        assert all(row["steps"] > 3 and row["curve"] for row in rows)
