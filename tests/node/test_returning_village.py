"""Whose state a real node takes in the rarer cases: the only donor rests, or the node has come to stand apart."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from village import ROOT, Node, Village, until

from noloco_node import checkpoint

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

RUN = """\
name = "returning"
rounds = 10000
[model]
task = "paced"
options = {{ step_s = {step_s} }}
[inner]
steps = 20
batch_tokens = 8
learning_rate = 0.0001
"""


@pytest.fixture
def village() -> Iterator[Village]:
    village = Village()
    village.environ["PYTHONPATH"] += f":{ROOT / 'tests' / 'tasks'}"
    yield village
    village.close()


def begin(village: Village, *words: str, step_s: float) -> tuple[Node, list[str]]:
    (village.root / "run.toml").write_text(RUN.format(step_s=step_s))
    author = village.node("author", "start", str(village.root / "run.toml"), *words)
    return author, until(lambda: author.said(r"others join with: noloco-node (.*)"), "the line to join with").split()


def round_of(node: Node) -> int:
    return node.ask("status").get("round") or 0


def took(node: Node) -> int:
    return int(until(lambda: node.said(r"took the state of \S+ at round (\d+)"), "a peer's state"))


def test_a_donor_that_trains_on_its_own_or_pauses_gives_its_state(village: Village) -> None:
    author, line = begin(village, "--daily-download", "1MB", step_s=0.05)
    partner = village.node("partner", *line)
    until(
        lambda: any("training goes on alone" in h["text"] for h in author.ask("status").get("health", ())), "no quota"
    )
    partner.kill()
    far = round_of(author)

    late = village.node("late", *line)
    assert took(late) >= far > 0
    until(lambda: round_of(late) > far, "its training")
    late.kill()

    assert village.run("pause", "--home", str(author.home)).returncode == 0
    until(lambda: author.ask("status").get("state") == "paused", "the pause", 10)
    at_rest = round_of(author)
    later = village.node("later", *line)
    assert took(later) == at_rest
    until(lambda: round_of(later) > at_rest, "its training")


def test_who_stands_apart_takes_the_state_of_a_peer_and_meets_the_others_again(village: Village) -> None:
    author, line = begin(village, step_s=0.2)
    one, two = village.node("one", *line), village.node("two", *line)
    for node in (author, one, two):
        until(lambda node=node: len(node.ask("status").get("partners", ())) == 2, "a round with both others", 120)
    assert village.run("leave", "--home", str(two.home)).returncode == 0
    two.process.wait(15)
    carry_off(two.home)

    again = village.node("two", *line)
    until(lambda: again.said("(standing apart from the others)"), "three rounds as one who stands apart", 180)
    took(again)
    until(again.committed, "a round with somebody", 60)
    assert again.said("going on from the (checkpoint)"), "it was not far behind"
    for node in (author, one, again):
        assert not node.said("(broke the protocol)")


def carry_off(home: Path) -> None:
    """Its weights, slow and fast, are somewhere else entirely."""
    (folder,) = home.glob("runs/*/checkpoints")
    about = json.loads((checkpoint.kept(folder)[0] / "state.json").read_text())
    run_id, layout = about["run_id"], bytes.fromhex(about["layout"])
    saved = checkpoint.newest(folder, run_id, layout).checkpoint
    assert saved is not None
    away = torch.randn_like(saved.weights["weight"])
    weights = {**saved.weights, "weight": saved.weights["weight"] + away}
    phi = saved.outer["phi"].clone()
    phi[: away.numel()] += away.flatten()
    checkpoint.save(folder, replace(saved, weights=weights, outer={**saved.outer, "phi": phi}), run_id, layout)
