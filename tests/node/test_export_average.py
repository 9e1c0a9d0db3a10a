"""`export --average N` with real nodes: the mean of their weights, and the error when the donors have left."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from real_nodes import Node, RealNodes, until

from noloco_node.publish.weights import find
from noloco_node.training import model

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

LOOKS = 10
"""After so many polls without traffic the last swap has ended."""


@pytest.fixture(scope="module")
def nodes(real_nodes: RealNodes) -> list[Node]:
    """Three paused nodes, whose weights differ."""
    author = real_nodes.node("author", "start", str(real_nodes.manifest()))
    nodes = [author, *(real_nodes.node(name, *author.invitation()) for name in ("one", "two"))]
    for node in nodes:
        until(lambda node=node: node.committed() >= 3, "three rounds with a partner")
        until(lambda node=node: len(node.ask("peers").get("peers", [])) == 2, "two peers in sight")
    for node in nodes:
        node.command("pause")
    sent: list[int] = []
    until(lambda: sent.append(sum(map(traffic, nodes))) or (len(sent) > LOOKS and sent[-LOOKS] == sent[-1]), "silence")
    return nodes


def traffic(node: Node) -> int:
    sent = node.ask("status")["bytes"]
    return int(sent["sent"] + sent["received"])


def export(node: Node, peers: int, to: Path) -> subprocess.CompletedProcess[str]:
    return node.run("export", "--to", str(to), "--average", str(peers), "--json", "--threads", "1", within_s=120)


def exported_at(author: Node, to: Path, standing: list[int]) -> list[int] | None:
    """The rounds of an export, if they are those: a donor may send a copy that is up to 20 s old."""
    shutil.rmtree(to, ignore_errors=True)
    done = export(author, 2, to)
    assert done.returncode == 0, done.stderr
    rounds = [state["round"] for state in json.loads(done.stdout)["states"]]
    return rounds if sorted(rounds) == sorted(standing) else None


def phi(place: Path) -> torch.Tensor:
    """The slow weights in an export, or in the newest checkpoint of a home."""
    found = find(place)
    run = found.file.run
    return found.slow(model.build(run.model, 256, run.seed, run.data.sequence_length)).phi


def test_the_mean_of_what_the_nodes_hold(real_nodes: RealNodes, nodes: list[Node]) -> None:
    """`leave` writes each node's weights as a checkpoint, which the export is compared with."""
    author, to = nodes[0], real_nodes.root / "mean"
    standing = [node.ask("status")["round"] for node in nodes]
    rounds = until(lambda: exported_at(author, to, standing), "donors' copies that are no older than the pause")
    assert rounds[0] == standing[0]
    assert f"3 replicas, at rounds {rounds[0]}, {rounds[1]} and {rounds[2]}," in (to / "README.md").read_text()
    assert not [*(author.home / "gathered").glob("*")], "what was fetched is gone"
    for node in nodes[1:]:
        node.leave()

    alone = export(author, 1, real_nodes.root / "alone")
    assert alone.returncode == 10 and "no other node sent its state" in alone.stderr
    assert not (real_nodes.root / "alone").exists()
    author.leave()
    held = [phi(node.home) for node in nodes]
    assert torch.allclose(phi(to), sum(held) / 3, atol=1e-7)
    assert not torch.allclose(held[0], held[1], atol=1e-4), "they do differ"
