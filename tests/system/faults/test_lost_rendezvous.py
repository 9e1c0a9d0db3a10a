"""A rendezvous that is gone, with real processes: nodes reconnect through cached peers, and separate swarms merge."""

import json
import time

import pytest
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def run(real_nodes: RealNodes) -> str:
    return str(real_nodes.paced(steps=40, warmup=0.005))


def knows(node: Node, *others: Node) -> bool:
    path = node.home / "peers.json"
    wanted = {other.ask("status")["peer_id"] for other in others}
    return path.exists() and wanted <= json.loads(path.read_text()).keys()


def test_a_dead_rendezvous_is_missed_by_nobody_who_knew_a_peer(real_nodes: RealNodes, run: str) -> None:
    rendezvous = real_nodes.rendezvous()
    door = rendezvous.address()
    one = real_nodes.node("one", "start", run, "--bootstrap", door)
    until(one.round, "its training")
    two = real_nodes.node("two", "join", "--bootstrap", door)
    until(lambda: one.committed() >= 1 and two.committed() >= 1, "a round together", 90)
    until(lambda: knows(two, one), "one in the cache of two", 60)
    rendezvous.kill()
    before = one.committed()
    until(lambda: one.committed() >= before + 3, "rounds without a rendezvous", 60)

    two.leave()
    again = real_nodes.node("two", "join", "--bootstrap", door)
    until(lambda: again.committed() >= 1, "a round after coming in by a cached peer", 90)
    assert again.printed("(no bootstrap address answers)")
    assert again.log.read_text().count("met here for the first time") <= 1, "an author is known by all ways in"

    began = time.monotonic()
    stranger = real_nodes.node("stranger", "join", "--bootstrap", door)
    assert stranger.process.wait(20) == 10
    assert time.monotonic() - began < 20
    assert stranger.printed("(cannot reach the swarm.*)")
    newcomer = real_nodes.node(
        "stranger", "join", "--bootstrap", door, "--bootstrap", one.ask("status")["addresses"][0]
    )
    until(lambda: newcomer.committed() >= 1, "a round after coming in by the other address", 90)
    for node in (one, again, newcomer):
        node.kill()


def test_two_islands_that_know_each_other_by_a_cache_merge(real_nodes: RealNodes, run: str) -> None:
    islands = [real_nodes.node(name, "start", run) for name in ("north", "south")]
    north, south = islands
    for node in islands:
        until(node.round, "its training")
    peer_id = south.ask("status")["peer_id"]
    assert not north.ask("peers")["peers"]
    entry = {peer_id: {"seen": time.time(), "addresses": south.ask("status")["addresses"]}}
    north.leave()
    (north.home / "peers.json").write_text(json.dumps(entry))
    north = real_nodes.node("north", "start", run)
    until(lambda: north.committed() >= 1 and south.committed() >= 1, "a round of the two islands", 90)
