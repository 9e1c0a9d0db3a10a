"""A run that begins with weights that its author has: only who begins it needs their folder."""

import pytest
from real_nodes import Node, RealNodes, until

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
[outer]
codec = "fp32"
"""


@pytest.fixture(scope="module")
def author(real_nodes: RealNodes) -> Node:
    with model.without_bars():
        model.build(ModelSpec(preset="tiny"), 256, seed=7).save_pretrained(real_nodes.root / "mine")  # type: ignore[operator]
    path = real_nodes.root / "run.toml"
    path.write_text(RUN)
    return real_nodes.node("author", "start", str(path), "--bootstrap", real_nodes.rendezvous().address())


def test_who_joins_gets_them_from_a_peer(real_nodes: RealNodes, author: Node) -> None:
    volunteer = real_nodes.node("volunteer", *author.invitation())
    volunteer.received_state()
    until(lambda: volunteer.committed() >= 1, "a swap")
    theirs, ours = (float(node.ask("status")["eval_loss"]) for node in (author, volunteer))
    assert ours == pytest.approx(theirs, abs=0.01), "at this learning rate the weights hardly move"
    volunteer.leave()


def test_who_trains_it_again_needs_them_and_who_has_a_checkpoint_does_not(real_nodes: RealNodes, author: Node) -> None:
    """The author's run of the test above, which it leaves."""
    mine = real_nodes.root / "mine"
    words = [*author.invitation(), "--start-over", "--rounds", "1"]
    until(author.round, "a round")
    author.leave()
    without = real_nodes.node("without", *words)
    assert without.ended(120) == 10, without.log.read_text()[-2000:]
    assert without.printed("(with --start-over and --weights, their folder)")
    again = real_nodes.node("again", *words, "--weights", str(mine))
    assert again.ended(120) == 0, again.log.read_text()[-2000:]

    mine.rename(real_nodes.root / "moved")
    back = real_nodes.node("author", "join", "--rounds", "1")
    assert back.ended(120) == 0, back.log.read_text()[-2000:]
    lost = real_nodes.node("author", "start", str(real_nodes.root / "run.toml"))
    assert lost.ended(60) == 2
    assert lost.printed("(`noloco-node join`)")
