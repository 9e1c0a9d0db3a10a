"""Real nodes that hold a stage each: what they learn is what one process learns; one that is killed stops nobody.

Minutes each on two cores, so they are run by --slow; tests/stages/test_passes.py has the first one without a network.
"""

import json
import time
from itertools import pairwise
from statistics import fmean

import pytest
from real_nodes import Node, RealNodes, until
from replicas import train

from noloco_node.data.tokens import BYTES
from noloco_node.run import toml
from noloco_node.run.schema import Manifest
from noloco_node.stages.part import Position, part_model, whole_model
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LLAMA = {
    "architecture": "LlamaConfig",
    "config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    },
}


def with_stages(real_nodes: RealNodes, **run: object) -> Manifest:
    inner = {"batch_tokens": 256, "clip": 1000.0, "warmup": 0.0, "learning_rate": 0.003, **run.pop("inner", {})}
    tables = {"model": LLAMA, "data": {"sequence_length": 64}, "stages": {"count": 2, "activations": "fp32"}}
    return toml.load(real_nodes.tables(**{**tables, "inner": inner, **run}))


def whole(run: Manifest, peer: str) -> Replica:
    """One process, with the first weights that the stages have."""
    replica = build_replica(run.model_copy(update={"stages": None}), peer, device="cpu", threads=1, micro_batch=1)
    parts = [part_model(run, BYTES.vocabulary, Position(stage, 2)) for stage in range(2)]
    replica.module.load_state_dict(whole_model(run, BYTES.vocabulary, parts).state_dict())
    replica.phi.copy_(replica.theta)
    return replica


def test_two_nodes_learn_what_one_process_learns(real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]) -> None:
    run = with_stages(real_nodes, rounds=10, inner={"steps": 5, "warmup": 0.1, "learning_rate": 0.001})
    path = str(real_nodes.root / "run.toml")
    second = real_nodes.node("a", "start", path, "--stage", "2", "--linger", "60")
    until(lambda: second.ask("status").get("state") == "training", "that it waits for micro-batches: none is lost")
    first = real_nodes.node("b", *second.invitation(), "--stage", "1", "--in-flight", "1", "--linger", "60")
    for node in (first, second):
        until(lambda node=node: node.ask("status").get("state") == "finished", "50 steps", 400)
    ours = [[event["loss"] for event in node.events("PhaseDone")] for node in (first, second)]
    steps = train(whole(run, first.ask("status")["peer_id"]), 50)
    plain = [fmean(steps[start : start + 5]) for start in range(0, 50, 5)]
    with capsys.disabled():
        worst = max(abs(a - b) for mine in ours for a, b in zip(mine, plain, strict=True))
        print(f"\n  50 steps: loss {plain[0]:.4f} to {plain[-1]:.4f}, largest difference {worst:.1e}")  # noqa: T201
    for mine in ours:
        assert mine == pytest.approx(plain, abs=1e-5)
    for node in (first, second):
        node.leave()
    until(lambda: not real_nodes.left_over(), "nothing is left", 10)


def test_four_nodes_swap_within_their_stages_and_go_on_without_one(
    real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    with_stages(real_nodes, rounds=100_000, inner={"steps": 20, "clip": 1.0})
    first = real_nodes.node("one", "start", str(real_nodes.root / "run.toml"), "--stage", "1")
    words = first.invitation()
    nodes = [
        first,
        *(
            real_nodes.node(name, *words, "--stage", stage)
            for name, stage in (("two", "2"), ("three", "1"), ("four", "2"))
        ),
    ]
    for node in nodes:
        until(lambda node=node: node.committed() >= 2, "two rounds with the other of its stage", 400)
    ids = {node: node.ask("status")["peer_id"] for node in nodes}
    other = {nodes[0]: nodes[2], nodes[2]: nodes[0], nodes[1]: nodes[3], nodes[3]: nodes[1]}
    for node in nodes:
        status = node.ask("status")
        assert set(status["partners"]) == {ids[other[node]]}, "only with who holds the same stage"
        until(lambda node=node: node.ask("status")["stage"]["nodes"] == [2, 2], "it has seen all four", 60)
    for node in nodes:
        until(lambda node=node: falls(node), "its eval loss falls", 300)

    victim = nodes[3]
    family = victim.processes()
    before = {node: passed(node) for node in nodes[:3]}
    victim.kill()
    killed = time.monotonic()
    for node in nodes[:3]:
        until(lambda node=node: passed(node) > before[node] + 5, "it goes on", 20)
    went_on_s = time.monotonic() - killed
    newcomer = real_nodes.node("five", *words)
    until(lambda: newcomer.ask("status").get("state") == "training", "a newcomer trains", 120)
    took_s = time.monotonic() - killed
    assert newcomer.ask("status")["stage"]["number"] == 2, "the thin one"
    until(lambda: newcomer.committed() >= 1, "a round with the one that was left", 300)
    with capsys.disabled():
        print(  # noqa: T201
            f"\n  after kill -9: the others went on within {went_on_s:.1f} s, a newcomer trained {took_s:.0f} s later"
        )
    assert not family & alive()
    whole = real_nodes.root / "whole"
    done = first.run("export", "--average", "1", "--to", str(whole), "--json", within_s=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval_loss"] < first.events("Evaluated")[0]["eval_loss"], "the parts fit together"
    for node in (*nodes[:3], newcomer):
        node.leave()
    until(lambda: not real_nodes.left_over(), "nothing is left", 10)


def test_three_and_one_become_two_and_two(real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]) -> None:
    with_stages(real_nodes, rounds=100_000, inner={"steps": 20, "clip": 1.0})
    first = real_nodes.node("one", "start", str(real_nodes.root / "run.toml"))
    words = first.invitation()
    second = real_nodes.node("two", *words, "--stage", "2")
    others = [real_nodes.node(name, *words, "--stage", "1") for name in ("three", "four")]
    for node in (first, *others):
        until(lambda node=node: node.committed() >= 1, "a round with another one of its stage", 200)
    until(lambda: falls(first), "its eval loss falls", 300)
    for node in others:
        node.leave()
    others = [real_nodes.node(node.home.name, *words, "--stage", "none") for node in others]  # anywhere
    for node in others:
        until(lambda node=node: node.ask("status").get("state") == "training", "it is back", 120)
    began = time.monotonic()
    for node in others:
        status = node.ask("status")
        assert status["stage"]["number"] == 1, "the stage of its checkpoint, though the other one is thinner"
        assert status["checkpoint"]["resumed_round"] > 0
    before, best = passed(first), min(event["eval_loss"] for event in first.events("Evaluated"))

    nodes = [first, second, *others]
    until(lambda: all(nodes_at_stages(node) == [2, 2] for node in nodes), "two and two", 200)
    took_s = time.monotonic() - began
    (moved,) = (node for node in others if node.ask("status")["stage"]["number"] == 2)
    assert moved.process.poll() is None, "in the same process"
    (run_folder,) = (moved.home / "runs").iterdir()
    assert list(run_folder.glob("checkpoints-of-stage-1/*/state.json")), "nothing that it trained is lost"
    state_of = moved.received_state()
    until(lambda: moved.committed() >= 1, "a round in its new stage", 120)
    assert set(moved.ask("status")["partners"]) == {second.ask("status")["peer_id"]}
    assert passed(first) > before + 10, "training went on"
    until(lambda: first.events("Evaluated")[-1]["eval_loss"] < best, "and the loss goes on falling", 200)
    assert [node for node in nodes if node.printed(r"moving from (stage 1 to stage 2)")] == [moved], "one is enough"
    with capsys.disabled():
        print(f"\n  3 + 1 became 2 + 2 within {took_s:.0f} s, with a state of round {state_of}")  # noqa: T201
    for node in nodes:
        node.leave()
    until(lambda: not real_nodes.left_over(), "nothing is left", 10)


def test_an_empty_stage_is_held_again_by_the_node_that_held_it(real_nodes: RealNodes) -> None:
    with_stages(real_nodes, rounds=100_000, inner={"steps": 5, "clip": 1.0})
    first = real_nodes.node("one", "start", str(real_nodes.root / "run.toml"))
    words = first.invitation()
    second = real_nodes.node("two", *words)
    until(lambda: saved(second) > 0, "a checkpoint", 300)
    assert second.ask("status")["stage"]["number"] == 2
    second.kill()
    nobody = "stage 2 of 2: nobody holds it, so nothing is trained"
    until(lambda: nobody in [each["text"] for each in first.ask("status").get("health", ())], "it says so", 120)
    stood = passed(first)
    second = real_nodes.node("two", *words)
    until(lambda: second.ask("status").get("state") == "training", "it is back", 120)
    status = second.ask("status")
    assert (status["stage"]["number"], status["checkpoint"]["resumed_round"] > 0) == (2, True)
    until(lambda: passed(first) > stood + 10, "training goes on", 120)
    for node in (first, second):
        node.leave()
    until(lambda: not real_nodes.left_over(), "nothing is left", 10)


def test_all_end_with_the_run_though_some_had_fewer_micro_batches_than_others(real_nodes: RealNodes) -> None:
    """Of two in the middle stage hardly ever both have had enough for their own rounds; and none lingers."""
    model = {"architecture": "LlamaConfig", "config": LLAMA["config"] | {"num_hidden_layers": 3}}
    stages = {"count": 3, "activations": "fp32"}
    with_stages(real_nodes, rounds=12, inner={"steps": 10, "clip": 1.0}, model=model, stages=stages)
    way_in = ("--bootstrap", real_nodes.rendezvous().address())
    second = real_nodes.node("two", "start", str(real_nodes.root / "run.toml"), "--stage", "2", *way_in)
    words = second.invitation()
    nodes = [
        second,
        *(real_nodes.node(name, *words, "--stage", stage) for name, stage in (("three", "2"), ("four", "3"))),
    ]
    for node in nodes:
        until(lambda node=node: node.ask("status").get("state") == "training", "it waits for micro-batches")
    for node in (real_nodes.node("one", *words, "--stage", "1"), *nodes):
        assert node.ended(300) == 0, node.log.read_text()[-2000:]
        assert node.printed("(finished) "), "and not that it has left"
    assert any([*node.home.glob("runs/*/ended.json")] for node in nodes)
    for node in nodes:  # one asks whether its author has given the run more rounds
        again = real_nodes.node(node.home.name, "join")
        assert again.ended(120) == 0, again.log.read_text()[-2000:]
        assert again.printed("(is over)")


def saved(node: Node) -> int:
    return (node.ask("status").get("checkpoint") or {}).get("saved_round") or 0


def nodes_at_stages(node: Node) -> list[int]:
    return (node.ask("status").get("stage") or {}).get("nodes", [])


def passed(node: Node) -> int:
    return (node.ask("status").get("stage") or {}).get("passed", 0)


def falls(node: Node) -> bool:
    measured = [event["eval_loss"] for event in node.events("Evaluated")]
    return len(measured) >= 4 and sum(b < a for a, b in pairwise(measured[-4:])) >= 2 and measured[-1] < measured[0]


def alive() -> set[int]:
    import psutil

    return {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE}
