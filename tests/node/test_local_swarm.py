"""`noloco-node swarm` with real nodes: it trains, reports the result as JSON, and what it left can be exported."""

import json

import pytest
from real_nodes import RealNodes

pytestmark = pytest.mark.timeout(400)


def test_a_swarm_of_two_trains_and_reports(real_nodes: RealNodes) -> None:
    path = real_nodes.manifest(steps=16, rounds=4, learning_rate="3e-3")
    kept = real_nodes.root / "kept"
    done = real_nodes.run("swarm", "--nodes", "2", "--run", str(path), "--keep", str(kept), "--json", within_s=200)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["schema"] == 1
    assert len(result["nodes"]) == 2
    assert result["rounds"] == 4
    for node in result["nodes"]:
        assert node["round"] == 4
        assert node["rounds"]["committed"] >= 1
        assert node["rounds"]["committed"] + node["rounds"]["solo"] == 4, "nobody began before both had joined"
        assert node["bytes"]["per_param_round"] == pytest.approx(0.45, abs=0.08)
        assert node["exit_code"] == 0
        assert 0 < node["busy_fraction"] <= 1
    assert result["eval_loss"]["last"] < result["eval_loss"]["first"] - 0.5
    assert result["eval_loss"]["average_of_weights"] <= result["eval_loss"]["last"] + 0.02
    assert result["loss"]["last"] < result["loss"]["first"]
    evaluated = {}
    for path in kept.rglob("events.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        evaluated[path] = [event for event in events if event["event"] == "Evaluated"][-1]
    assert [event["round"] for event in evaluated.values()] == [4, 4], "the weights that the run leaves behind"
    figures = sorted(node["eval_loss"] for node in result["nodes"])
    assert sorted(event["eval_loss"] for event in evaluated.values()) == figures

    events, last = next(iter(evaluated.items()))
    to, home = real_nodes.root / "model", str(events.parents[2])
    exported = real_nodes.run("export", "--to", str(to), "--home", home, "--threads", "1")
    assert f"held-out loss {last['eval_loss']:.4f}\n" in exported.stdout, exported.stderr
    assert "| round | training loss | held-out loss |" in (to / "README.md").read_text()
