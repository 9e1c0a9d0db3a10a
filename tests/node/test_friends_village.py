"""A rendezvous that is gone, with real processes: who knew peers before comes back by them, and islands merge."""

import json
import time
from collections.abc import Iterator

import pytest
from village import ROOT, Node, Village, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

RUN = """\
name = "friends"
rounds = 10000
[model]
task = "paced"
options = { step_s = 0.05 }
[inner]
steps = 40
batch_tokens = 8
"""


@pytest.fixture(scope="module")
def village() -> Iterator[Village]:
    village = Village()
    village.environ["PYTHONPATH"] += f":{ROOT / 'tests' / 'tasks'}"
    (village.root / "run.toml").write_text(RUN)
    yield village
    village.close()


def address(node: Node) -> str:
    return until(lambda: node.ask("status").get("addresses"), "its address")[0]


def knows(node: Node, *others: Node) -> bool:
    path = node.home / "peers.json"
    wanted = {other.ask("status")["peer_id"] for other in others}
    return path.exists() and wanted <= json.loads(path.read_text()).keys()


def test_a_dead_rendezvous_is_missed_by_nobody_who_knew_a_peer(village: Village) -> None:
    rendezvous = Node(village, "rendezvous", "bootstrap")
    village.nodes.append(rendezvous)
    door = address(rendezvous)
    one = village.node("one", "start", str(village.root / "run.toml"), "--bootstrap", door)
    until(lambda: one.ask("status").get("round"), "its training")
    two = village.node("two", "join", "--bootstrap", door)
    until(lambda: one.committed() >= 1 and two.committed() >= 1, "a round together", 90)
    until(lambda: knows(two, one), "one in the cache of two", 60)
    rendezvous.kill()
    before = one.committed()
    until(lambda: one.committed() >= before + 3, "rounds without a rendezvous", 60)

    assert village.run("leave", "--home", str(two.home)).returncode == 0
    two.process.wait(15)
    again = village.node("two", "join", "--bootstrap", door)
    until(lambda: again.committed() >= 1, "a round after coming in by a cached peer", 90)
    assert again.said("(no bootstrap address answers)")

    began = time.monotonic()
    stranger = village.node("stranger", "join", "--bootstrap", door)
    assert stranger.process.wait(20) == 10
    assert time.monotonic() - began < 20
    assert stranger.said("(cannot reach the swarm.*)")
    newcomer = village.node("stranger", "join", "--bootstrap", door, "--bootstrap", address(one))
    until(lambda: newcomer.committed() >= 1, "a round after coming in by the other address", 90)
    for node in (one, again, newcomer):
        node.kill()


def test_two_islands_that_know_each_other_by_a_cache_merge(village: Village) -> None:
    islands = [village.node(name, "start", str(village.root / "run.toml")) for name in ("north", "south")]
    north, south = islands
    for node in islands:
        until(lambda node=node: node.ask("status").get("round"), "its training")
    peer_id = south.ask("status")["peer_id"]
    assert not north.ask("peers")["peers"]
    entry = {peer_id: {"seen": time.time(), "addresses": south.ask("status")["addresses"]}}
    assert village.run("leave", "--home", str(north.home)).returncode == 0
    north.process.wait(15)
    (north.home / "peers.json").write_text(json.dumps(entry))
    north = village.node("north", "start", str(village.root / "run.toml"))
    until(lambda: north.committed() >= 1 and south.committed() >= 1, "a round of the two islands", 90)
