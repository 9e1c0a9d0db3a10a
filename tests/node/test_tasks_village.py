"""A run whose task the volunteers have installed: trained by a real node, refused by one that lacks it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from village import ROOT, Village, until

TASKS = ROOT / "tests" / "tasks"

RUN = """\
name = "paced"
rounds = 1000
[model]
task = "paced"
options = { step_s = 0.03, bad = [60, 70] }
[inner]
steps = 2
batch_tokens = 8
"""


@pytest.fixture(scope="module")
def village() -> Iterator[Village]:
    village = Village()
    village.environ["PYTHONPATH"] += f":{TASKS}"
    yield village
    village.close()


@pytest.fixture(scope="module")
def run_toml(village: Village) -> Path:
    path = village.root / "run.toml"
    path.write_text(RUN)
    return path


def test_a_node_trains_an_installed_task(village: Village, run_toml: Path) -> None:
    """And ten bad batches in a row, its data's fault, take it back to its last checkpoint."""
    node = village.node("author", "start", str(run_toml), "--rounds", "40", "--linger", "60", "--micro-batch", "4")
    until(lambda: node.ask("status").get("state") == "finished", "forty rounds")
    status = node.ask("status")
    assert status["round"] == 40 and status["tokens"] == (40 * 2 + 10 - 1) * 8
    assert status["eval_loss"] < status["eval_loss_first"]
    (rolled,) = node.events("RolledBack")
    assert rolled["round"] == 30 and 10 <= rolled["weights_of"] <= 30
    assert "the weights are those of the checkpoint of round" in status["last_error"]
    node.kill()


def test_a_node_without_the_task_says_what_is_missing(village: Village, run_toml: Path) -> None:
    village.environ["PYTHONPATH"] = str(ROOT)
    node = village.node("other", "start", str(run_toml))
    assert node.process.wait(60) == 12
    assert node.said(r"trains the task paced, which is not installed here \((no task is installed)\)")
