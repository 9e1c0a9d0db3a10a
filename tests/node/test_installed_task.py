"""A run whose task the volunteers have installed: trained by a real node, refused by one that lacks it."""

import pytest
from real_nodes import QUICK, ROOT, RealNodes, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(real_nodes: RealNodes) -> str:
    model = {"task": "paced", "options": {"step_s": 0.06, "bad": [60, 70]}}
    return str(real_nodes.tables(rounds=1000, model=model, inner={"steps": 2, "batch_tokens": 8}, outer=QUICK))


def test_a_node_trains_an_installed_task(real_nodes: RealNodes, run: str) -> None:
    """And after ten bad batches in a row it goes back to its last checkpoint."""
    node = real_nodes.node("author", "start", run, "--rounds", "40", "--linger", "60", "--micro-batch", "4")
    until(lambda: node.ask("status").get("state") == "finished", "forty rounds")
    status = node.ask("status")
    assert status["round"] == 40 and status["tokens"] == (40 * 2 + 10 - 1) * 8
    assert status["eval_loss"] < status["eval_loss_first"]
    (rolled,) = node.events("RolledBack")
    assert rolled["round"] == 30 and 10 <= rolled["weights_of"] <= 30
    assert "the weights are those of the checkpoint of round" in status["last_error"]
    assert status["rounds"]["by_reason"]["rolled_back"] == 1, "what it offered then was void, and the next offer is not"
    node.kill()


def test_a_node_without_the_task_says_what_is_missing(real_nodes: RealNodes, run: str) -> None:
    real_nodes.environ["PYTHONPATH"] = str(ROOT)
    node = real_nodes.node("other", "start", run)
    assert node.ended(60) == 12
    assert node.printed(r"trains the task paced, which is not installed here \((no task is installed)\)")
