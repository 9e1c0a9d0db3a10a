"""State transfer in the rarer cases: the only donor is paused or has no quota left, or a node has diverged."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_nodes import Node, RealNodes, until

from noloco_node.checkpoints import checkpoint, listing
from noloco_node.core.state import State

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    """Each test has its own."""
    with RealNodes() as real_nodes:
        yield real_nodes


def begin(real_nodes: RealNodes, *words: str, step_s: float) -> tuple[Node, list[str]]:
    run = real_nodes.paced(step_s=step_s, steps=20, learning_rate=0.0001, warmup=0.005)
    author = real_nodes.node("author", "start", str(run), *words)
    return author, author.invitation()


def test_a_donor_that_trains_on_its_own_or_pauses_gives_its_state(real_nodes: RealNodes) -> None:
    author, line = begin(real_nodes, "--daily-download", "1MB", step_s=0.05)
    partner = real_nodes.node("partner", *line)
    until(
        lambda: any("training goes on without swaps" in h["text"] for h in author.ask("status").get("health", ())),
        "no quota",
    )
    partner.kill()
    far = author.round()

    late = real_nodes.node("late", *line)
    assert late.received_state() >= far > 0
    until(lambda: late.round() > far, "its training")
    late.kill()

    author.command("pause")
    until(lambda: author.ask("status").get("state") == "paused", "the pause", 10)
    at_rest = author.round()
    later = real_nodes.node("later", *line)
    assert far <= later.received_state() <= at_rest, "for a while a donor sends the same copy to all"
    until(lambda: later.round() > at_rest, "its training")


def test_who_stands_apart_takes_the_state_of_a_peer_and_meets_the_others_again(real_nodes: RealNodes) -> None:
    author, line = begin(real_nodes, step_s=0.2)
    one, two, three = (real_nodes.node(name, *line) for name in ("one", "two", "three"))
    for node in (author, one, two, three):
        until(lambda node=node: len(node.ask("status").get("partners", ())) >= 2, "rounds with two others", 180)
    two.leave()
    carry_off(two.home)

    again = real_nodes.node("two", *line)
    until(lambda: again.printed("(weights have diverged)"), "two partners as one who stands apart", 180)
    again.received_state()
    until(again.committed, "a round with somebody", 60)
    assert again.printed("going on from the (checkpoint)"), "it was not far behind"
    assert again.log.read_text(errors="replace").count("received the state of") == 1
    for node in (author, one, three, again):
        assert not node.printed("(broke the protocol)")
        assert node is again or not node.printed("(weights have diverged)")


def test_a_swarm_that_was_away_whole_goes_on_without_its_author(real_nodes: RealNodes) -> None:
    """As after a power cut: the restarted rendezvous knows no run."""
    rendezvous = real_nodes.rendezvous()
    run = real_nodes.paced(step_s=0.05, steps=20)
    real_nodes.node("author", "start", str(run), "--bootstrap", rendezvous.address())
    volunteers = [real_nodes.node(name, "join", "--bootstrap", rendezvous.address()) for name in ("one", "two")]
    for node in volunteers:
        until(node.committed, "a round with somebody")
        node.leave()
    for node in real_nodes.nodes[:2]:
        node.kill()

    again = real_nodes.rendezvous()
    volunteers = [real_nodes.node(name, "join", "--bootstrap", again.address()) for name in ("one", "two")]
    for node in volunteers:
        until(node.committed, "a round with the other")
    assert any(node.printed(r"nobody has announced a run there: going on with (\S+),") for node in volunteers)


def carry_off(home: Path) -> None:
    """Add noise to the weights of its checkpoint, slow and fast."""
    (folder,) = home.glob("runs/*/checkpoints")
    about = json.loads((listing.kept(folder)[0] / "state.json").read_text())
    run_id, layout = about["run_id"], bytes.fromhex(about["layout"])
    saved = checkpoint.newest(folder, run_id, layout).checkpoint
    assert saved is not None
    away = torch.randn_like(saved.weights["weight"])
    weights = {**saved.weights, "weight": saved.weights["weight"] + away}
    phi = saved.outer["phi"].clone()
    phi[: away.numel()] += away.flatten()
    away_from_all = State(saved.round, saved.step, weights, {**saved.outer, "phi": phi}, saved.inner)
    checkpoint.save(folder, away_from_all, run_id, layout)
