"""Real nodes that join: a new one, one whose donor dies, one with a checkpoint, one that is far behind.

The tests below build on each other. The task is paced, so that rates can be compared, and uploads are limited, so that
a download lasts long enough to measure the other nodes meanwhile.
"""

import re
import time
from collections.abc import Callable
from statistics import median

import pytest
from fault_points import Phase, Point, at
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

STEP_S, STEPS = 0.05, 40
UPLOAD = "64kB"
"""A state of 8 bytes for each of 98,688 parameters takes 12 s."""
CATCH_UP_ROUNDS = 10


def begin(real_nodes: RealNodes, name: str, *words: str) -> Node:
    return real_nodes.node(name, *words, "--max-upload", UPLOAD)


@pytest.fixture(scope="module")
def author(real_nodes: RealNodes) -> Node:
    return begin(real_nodes, "author", "start", str(real_nodes.paced(step_s=STEP_S, steps=STEPS, warmup=0.005)))


@pytest.fixture(scope="module")
def line(author: Node) -> list[str]:
    return author.invitation()


@pytest.fixture(scope="module")
def swarm(real_nodes: RealNodes, author: Node, line: list[str]) -> list[Node]:
    nodes = [author, *(begin(real_nodes, name, *line) for name in ("one", "two", "three"))]
    for node in nodes:
        until(lambda node=node: node.committed() >= 1 and node.round() >= 10, "ten rounds of four nodes", 120)
    return nodes


def named(nodes: list[Node], name: str) -> Node:
    return next(node for node in nodes if node.ask("status").get("name") == name)


def took(node: Node) -> tuple[str, int, str]:
    words = until(lambda: node.printed(r"received the state of (\S+ at round \d+ \(version \w+)"), "a peer's state", 90)
    name, _, _, round_, _, version = words.split()
    return name, int(round_), version


def rate(node: Node, begin: float, end: float) -> float:
    """Steps a second of whole phases in that time."""
    at = [event["at"] for event in node.events("PhaseDone") if begin <= event["at"] <= end]
    return STEPS * (len(at) - 1) / (at[-1] - at[0])


def test_a_newcomer_begins_where_its_donor_is(
    real_nodes: RealNodes, swarm: list[Node], line: list[str], figure: Callable[[str], None]
) -> None:
    newcomer = begin(real_nodes, "newcomer", *line)
    until(lambda: "%" in (newcomer.ask("status").get("waiting_for") or ""), "a download with its progress", 60)
    began = time.time()
    name, round_, version = took(newcomer)
    ended = time.time()
    donor = named(swarm, name)
    assert donor.printed(rf"sending \S+ the state of round {round_} \(version ({version})\)"), "the same bytes"
    first = until(lambda: newcomer.ask("status").get("eval_loss_first"), "its first evaluation")
    until(lambda: any(event["round"] > round_ for event in donor.events("Evaluated")), "the donor's next evaluation")
    there = [e["eval_loss"] for e in donor.events("Evaluated") if round_ <= e["round"] <= round_ + 1]
    assert 0.98 * min(there) < first < 1.02 * max(there), "corrections may have come in between"
    until(lambda: newcomer.committed() >= 1, "a round with somebody", 60)

    phase_s = STEP_S * STEPS
    span = began - 2 * phase_s, ended + 2 * phase_s
    rates = {node.home.name: rate(node, *span) for node in swarm}
    others = median(found for who, found in rates.items() if who != donor.home.name)
    figure(
        f"a donor's steps a second while it gives {8 * 98_688 / 1e6:.2f} MB in {ended - began:.0f} s: "
        f"{rates[donor.home.name]:.2f}, others meanwhile {others:.2f}"
    )
    assert rates[donor.home.name] >= 0.9 * others
    newcomer.kill()


def test_who_only_had_a_checkpoint_goes_on_from_it(real_nodes: RealNodes, swarm: list[Node], line: list[str]) -> None:
    leaver = swarm.pop()
    leaver.leave()
    again = begin(real_nodes, leaver.home.name, *line)
    swarm.append(again)
    until(lambda: again.committed() >= 1, "a round with somebody", 90)
    assert again.printed("going on from the (checkpoint)")


@pytest.fixture(scope="module")
def lost() -> list[str]:
    """The names of killed nodes."""
    return []


def test_a_donor_that_dies_half_way_is_replaced(
    real_nodes: RealNodes, swarm: list[Node], line: list[str], lost: list[str]
) -> None:
    newcomer = begin(real_nodes, "orphan", *line)
    seen = at(newcomer, Point(0, Phase.FETCHING, 0.45), within_s=60)["waiting_for"]
    donor, share = re.search(r"state from (\S+), (\d+)%", seen).groups()
    assert int(share) < 80, "there is a part to come"
    first = named(swarm, donor)
    first.kill()
    swarm.remove(first)
    lost.append(first.home.name)
    name, _, _ = took(newcomer)
    assert name != donor
    until(lambda: newcomer.committed() >= 1, "a round with somebody", 60)
    assert newcomer.ask("status")["last_error"] is None
    swarm.append(newcomer)


def test_who_was_away_for_long_takes_a_state_and_is_no_replay(
    real_nodes: RealNodes, swarm: list[Node], lost: list[str]
) -> None:
    dead = next(node for node in real_nodes.nodes if node.home.name == lost[0])
    behind = max(int(path.name.partition("-")[0]) for path in dead.home.glob("runs/*/checkpoints/[0-9]*")) // STEPS
    until(lambda: swarm[-1].round() > behind + CATCH_UP_ROUNDS, "the others to be far ahead", 60)
    again = begin(real_nodes, dead.home.name, "join", "--bootstrap", swarm[-1].ask("status")["addresses"][0])
    assert again.received_state() > behind
    until(lambda: again.committed() >= 1, "a round with somebody", 60)
    for node in (*swarm, again):
        assert "stale" not in node.ask("status").get("rounds", {}).get("by_reason", {})
        assert not node.printed("(broke the protocol)")
