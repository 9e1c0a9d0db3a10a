"""A run that begins with weights that its author has: only who begins it needs their folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_nodes import RealNodes, until

from noloco_node.run.schema import ModelSpec
from noloco_node.training import model

pytestmark = pytest.mark.timeout(300)
RUN = """
name = "further"
rounds = 100_000
[model]
weights = "mine"
[inner]
steps = 5
batch_tokens = 256
learning_rate = 1e-6
"""


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as real_nodes:
        yield real_nodes


def run_toml(real_nodes: RealNodes) -> Path:
    with model.without_bars():
        model.build(ModelSpec(preset="tiny"), 256, seed=7).save_pretrained(real_nodes.root / "mine")  # type: ignore[operator]
    path = real_nodes.root / "run.toml"
    path.write_text(RUN)
    return path


def test_who_joins_gets_them_from_a_peer(real_nodes: RealNodes) -> None:
    path = run_toml(real_nodes)
    address = real_nodes.rendezvous().address()
    author = real_nodes.node("author", "start", str(path), "--bootstrap", address)
    volunteer = real_nodes.node("volunteer", *author.invitation())
    volunteer.received_state()
    until(lambda: volunteer.committed() >= 1, "a swap")
    theirs, ours = (float(node.ask("status")["eval_loss"]) for node in (author, volunteer))
    assert ours == pytest.approx(theirs, abs=0.01), "at this learning rate the weights hardly move"


def test_who_trains_it_again_needs_them_and_who_has_a_checkpoint_does_not(real_nodes: RealNodes) -> None:
    path = run_toml(real_nodes)
    address = real_nodes.rendezvous().address()
    author = real_nodes.node("author", "start", str(path), "--bootstrap", address, "--rounds", "1")
    assert author.ended(120) == 0, author.log.read_text()[-2000:]
    words = [*author.invitation(), "--start-over", "--rounds", "1"]
    without = real_nodes.node("without", *words)
    assert without.ended(120) == 10, without.log.read_text()[-2000:]
    assert without.printed("(with --start-over and --weights, their folder)")
    again = real_nodes.node("again", *words, "--weights", str(path.parent / "mine"))
    assert again.ended(120) == 0, again.log.read_text()[-2000:]

    (path.parent / "mine").rename(path.parent / "moved")
    back = real_nodes.node("author", "join", "--rounds", "1")
    assert back.ended(120) == 0, back.log.read_text()[-2000:]
    lost = real_nodes.node("author", "start", str(path))
    assert lost.ended(60) == 2
    assert lost.printed("(`noloco-node join`)")
