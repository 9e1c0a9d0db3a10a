"""Three real nodes: an author starts a run, and two volunteers join it by its address.

The tests below build on each other, because each process takes seconds to start: the nodes swap, one is killed and the
others go on, it restarts from its checkpoint, and all leave. Each may also run alone.
"""

import signal
import time

import pytest
from patience import PATIENCE
from real_nodes import Node, RealNodes, until

from noloco_node.base.identity import Identity
from noloco_node.run import invitation

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def author(real_nodes: RealNodes) -> Node:
    return real_nodes.node("author", "start", str(real_nodes.paced(seconds=0.5, learning_rate=0.0002)))


@pytest.fixture(scope="module")
def line(author: Node) -> list[str]:
    return author.invitation()


@pytest.fixture(scope="module")
def volunteers(real_nodes: RealNodes, author: Node, line: list[str]) -> list[Node]:
    return [real_nodes.node("one", "join", "--bootstrap", author.address()), real_nodes.node("two", *line)]


@pytest.fixture(scope="module")
def again(real_nodes: RealNodes, author: Node, volunteers: list[Node]) -> Node:
    """The first volunteer, killed and started again."""
    if volunteers[0].process.poll() is None:
        until(lambda: volunteers[0].committed() >= 1, "a round with somebody")
        volunteers[0].kill()
    return real_nodes.node("one", "join", "--bootstrap", author.address())


def test_the_line_names_run_and_author(author: Node, line: list[str]) -> None:
    assert line[0] == "join" and len(line) == 2 and len(f"noloco-node {' '.join(line)}") < 160
    invited, status = invitation.read(line[1]), author.ask("status")
    assert status["run_id"].startswith(invited.run) and invited.author == status["peer_id"]
    assert [str(address) for address in invited.addresses] == status["addresses"]
    assert status["join"] == f"noloco-node join {line[1]}"


def test_all_three_exchange(author: Node, volunteers: list[Node]) -> None:
    for node in (author, *volunteers):
        until(lambda node=node: len(node.ask("status").get("partners", {})) >= 2, "a round with both others")
    status = volunteers[0].ask("status")
    assert status["state"] == "training"
    assert status["rounds"]["committed"] == sum(status["partners"].values())
    assert status["bytes"]["per_param_round"] == pytest.approx(0.45, abs=0.08), "3 bits, all included"


def test_everybody_sees_the_same_others(author: Node, volunteers: list[Node]) -> None:
    nodes = [author, *volunteers]
    everybody = {node.ask("status")["peer_id"] for node in nodes}
    assert len(everybody) == 3
    for node in nodes:
        others = dict.fromkeys(everybody - {node.ask("status")["peer_id"]}, "training")
        seen = lambda node=node: {row["peer_id"]: row["state"] for row in node.ask("peers").get("peers", [])}  # noqa: E731
        until(lambda seen=seen, others=others: seen() == others, f"all others are seen, not {seen()}", 40)


def test_a_newcomer_begins_where_the_others_are(author: Node, volunteers: list[Node]) -> None:
    first = author.events("Evaluated")[0]["eval_loss"]
    for node in volunteers:
        round_ = node.received_state()
        began = node.ask("status")["eval_loss_first"]
        there = min(author.events("Evaluated"), key=lambda event: abs(event["round"] - round_))["eval_loss"]
        assert began == pytest.approx(there, rel=0.05), "as far as the others"
        assert began < first, "not a fresh model"


def test_who_trusted_on_first_use_says_so(volunteers: list[Node]) -> None:
    assert volunteers[0].printed("trusting (12D3Koo[A-Za-z0-9]+) as the author")
    assert not volunteers[1].printed("trusting (12D3Koo)"), "the author was named"


def test_a_killed_node_leaves_nothing_and_the_others_go_on(author: Node, volunteers: list[Node]) -> None:
    victim, survivor = volunteers
    until(lambda: victim.ask("status").get("round", 0) >= 12, "a checkpoint, which comes every ten rounds")
    family = victim.processes()
    victim.kill()
    until(lambda: not (family & alive()), "its children are gone", 5)
    until(lambda: not [path for path in victim.home.iterdir() if path.is_socket()], "its socket is gone", 5)

    before = {node: node.committed() for node in (author, survivor)}
    for node in (author, survivor):
        until(lambda node=node: node.committed() >= before[node] + 3, "the others go on committing rounds", 60)


@pytest.mark.slow
def test_a_killed_node_disappears_within_its_time_to_live(author: Node, volunteers: list[Node]) -> None:
    victim, survivor = volunteers
    peer_id = Identity.load_or_create(victim.home / "identity.key").peer_id
    if victim.process.poll() is None:
        until(lambda: victim.committed() >= 1, "a round with somebody")
        victim.kill()
    gone = lambda node: peer_id not in {row["peer_id"] for row in node.ask("peers")["peers"]}  # noqa: E731
    until(lambda: gone(author) and gone(survivor), "it disappears", 75)


def test_it_comes_back_from_its_checkpoint(again: Node) -> None:
    until(
        lambda: again.printed("(going on from the checkpoint|received the state)"), "its checkpoint, or a peer's state"
    )
    until(lambda: again.committed() >= 1, "a round with somebody")
    assert again.ask("status")["last_error"] is None


def test_all_leave_cleanly_and_nothing_is_left(
    real_nodes: RealNodes, author: Node, volunteers: list[Node], again: Node
) -> None:
    for node in (author, volunteers[1], again):
        until(lambda node=node: node.committed() >= 1, "a round of each")
    began = time.monotonic()
    volunteers[1].process.send_signal(signal.SIGTERM)
    again.process.send_signal(signal.SIGINT)
    author.command("leave")
    for node in (author, volunteers[1], again):
        assert node.ended(12) == 0, node.log.read_text()[-2000:]
    assert time.monotonic() - began < 15 * PATIENCE
    for node in (author, volunteers[1], again):
        assert list(node.home.glob("runs/*/checkpoints/*/state.json")), "what was trained is kept"
    until(lambda: not real_nodes.left_over(), "nothing is left", 5)


def alive() -> set[int]:
    import psutil

    # with their status, so that one that is just going is passed over
    return {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE}
