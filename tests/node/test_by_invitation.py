"""Real nodes in a run by invitation: who may join, who is taken out, and how an amendment reaches everybody."""

import json
import time
from collections.abc import Iterator

import pytest
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
PRESENCE_S = 20.0
VOLUNTEERS = 7


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as real_nodes:
        yield real_nodes


def begin(real_nodes: RealNodes, *words: str, **top: object) -> Node:
    model = {"task": "paced", "options": {"step_s": 0.2, "outputs": 8}}
    run = real_nodes.tables(model=model, inner={"batch_tokens": 8, "steps": 20}, rounds=100_000)
    run.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in top.items()) + run.read_text())
    return real_nodes.node("author", "start", str(run), *words)


def steps(node: Node) -> list[str]:
    return sorted(path.name for path in node.home.glob("runs/*/checkpoints/*") if path.name.isdecimal())


def peer_id(real_nodes: RealNodes, name: str) -> str:
    """A volunteer asks for it before it joins."""
    asked = real_nodes.run("id", "--json", "--home", str(real_nodes.root / name))
    return str(json.loads(asked.stdout)["peer_id"])


def invited(real_nodes: RealNodes, author: Node, name: str) -> list[str]:
    made = author.run("invite", peer_id(real_nodes, name), "--expires", "1h", "--json")
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["join"]).removeprefix("noloco-node ").split()


def test_who_is_invited_joins_with_one_line_and_nobody_else(real_nodes: RealNodes) -> None:
    author = begin(real_nodes, membership="invite")
    line = author.invitation()
    stranger = real_nodes.node("stranger", *line)
    assert stranger.ended(90) == 13, stranger.log.read_text()[-2000:]
    own = peer_id(real_nodes, "stranger")
    assert stranger.printed(f"(only those take part whom its author invites: send your peer id, {own})")

    until(lambda: author.ask("status").get("join"), "the line to join by")
    words = invited(real_nodes, author, "guest")
    assert words[0] == "join" and len(words) == 2
    guest = real_nodes.node("guest", *words)
    until(guest.committed, "a round of the invited one", 120)

    thief = real_nodes.node("thief", *words)
    assert thief.ended(90) == 13
    assert thief.printed("(the token is not for this node)")

    asked = guest.run("run", "amend", "test", "--end-now")
    assert asked.returncode == 2 and "only its author" in asked.stderr
    revoked = author.run("revoke", peer_id(real_nodes, "guest"))
    assert revoked.returncode == 0, revoked.stderr
    assert guest.ended(2 * PRESENCE_S + 30) == 13, guest.log.read_text()[-2000:]
    assert guest.printed("(has taken this node)")
    again = real_nodes.node("guest", "join")
    assert again.ended(90) == 13


def test_an_amendment_reaches_eight_nodes_and_the_one_that_was_away(real_nodes: RealNodes) -> None:
    author = begin(real_nodes)
    line = author.invitation()
    volunteers = [real_nodes.node(f"v{k}", *line) for k in range(VOLUNTEERS)]
    for node in (author, *volunteers):
        until(lambda node=node: node.ask("status").get("peers_seen", 0) >= VOLUNTEERS, "everybody seen", 240)
    away = volunteers.pop()
    away.leave()

    done = author.run("run", "amend", "test", "--rounds", "200000")
    assert done.returncode == 0, done.stderr
    began = time.monotonic()
    nodes = [author, *volunteers]
    at: dict[str, float] = {}

    def all_follow() -> bool:
        for node in nodes:
            if node.home.name not in at and node.ask("status").get("rounds_target") == 200_000:
                at[node.home.name] = time.monotonic() - began
        return len(at) == len(nodes)

    until(all_follow, "everybody with the amendment", 2 * PRESENCE_S)
    print(f"\nfollowed after {sorted(round(s, 1) for s in at.values())} s")  # noqa: T201
    assert "amended (1): 200000 rounds" in author.run("status").stdout

    back = real_nodes.node(away.home.name, "join")
    until(lambda: back.printed("was (amended .1.: 200000 rounds)"), "the amendment on its return", 60)
    until(lambda: back.ask("status").get("rounds_target") == 200_000, "its schedule", 60)

    done = author.run("run", "amend", "test", "--end-now")
    assert done.returncode == 0, done.stderr
    for node in [*nodes, back]:
        assert node.ended(2 * PRESENCE_S + 60) == 0, node.log.read_text()[-2000:]
        assert node.printed("(finished test-)")
    assert back.run("join").stdout.count("is over")


def test_a_run_that_was_ended_is_not_trained_on_after_a_restart(real_nodes: RealNodes) -> None:
    """With a rendezvous it asks whether the run was given more rounds; nobody tells it again that it has ended."""
    words = "--bootstrap", real_nodes.rendezvous().address()
    author = begin(real_nodes, *words)
    until(lambda: author.round() >= 1, "a round")
    author.leave()
    done = author.run("run", "amend", "test", "--end-now")
    assert done.returncode == 0, done.stderr
    before = steps(author)
    for more in ((), ("--linger", "1")):  # with which a container does not look whether the run is over
        again = real_nodes.node("author", "join", *words, *more)
        assert again.ended(60) == 0, again.log.read_text()[-2000:]
        assert again.printed("(finished test-)"), again.log.read_text()[-2000:]
    assert steps(author)[-1] == before[-1]
