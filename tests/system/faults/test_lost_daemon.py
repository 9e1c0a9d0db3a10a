"""The network daemon of a real node dies or hangs: the node trains on, starts another one, and swaps again.

The tests below build on each other, because each process takes seconds to start. At the end the nodes leave, one of
them told twice.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from fault_points import Phase, Point, at, daemon
from real_nodes import Node, RealNodes, until

from noloco_node.errors import EXIT_INTERRUPTED

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

SEED = 3


@pytest.fixture(scope="module")
def nodes(real_nodes: RealNodes) -> list[Node]:
    """Phases of a second or two: a strike comes at a share of one."""
    author = real_nodes.node("author", "start", str(real_nodes.manifest(steps=16, warmup="0.0")))
    nodes = [author, *(real_nodes.node(name, *author.invitation()) for name in ("one", "two"))]
    for node in nodes:
        until(lambda node=node: len(node.ask("status").get("partners", {})) == 2, "a round with both others")
    return nodes


def troubles(node: Node) -> list[str]:
    return [finding["text"] for finding in node.ask("status").get("health", ())]


def committed_since(node: Node, moment: float) -> list[float]:
    return [event["at"] for event in node.events("RoundCommitted") if event["at"] > moment]


def said(node: Node, pattern: str) -> list[str]:
    return re.findall(pattern, node.log.read_text(errors="replace"))


def strike(node: Node, number: signal.Signals, figure: Callable[[str], None]) -> None:
    """Kill or stop its p2pd at a point drawn from a seed, and check how soon the node notices and swaps again."""
    at(node, Point.drawn(random.Random(SEED), node.round() + 1, Phase.TRAINING))
    identity, addresses = (node.ask("status")[key] for key in ("peer_id", "addresses"))
    lost = "the network daemon is lost"
    before = len(said(node, lost))
    struck = time.time()
    os.kill(until(lambda: daemon(node), "a daemon: 0 would be this process and its whole group"), number)
    until(lambda: len(said(node, lost)) > before, "its loss is noticed", 6)
    noticed = time.time() - struck
    assert noticed < 5.5
    back = until(lambda: committed_since(node, struck + 1), "a round with somebody", 30)[0]
    assert back - struck < 30
    figure(f"noticed after {noticed:.1f} s, a round again after {back - struck:.1f} s")
    status = node.ask("status")
    assert (status["peer_id"], status["addresses"]) == (identity, addresses), "the port too, which others know"
    phases = [event["at"] for event in node.events("PhaseDone") if struck - 5 < event["at"] < back + 1]
    assert max(later - earlier for earlier, later in pairwise(phases)) < 5, "training went on"


def test_a_p2pd_that_is_killed_is_replaced(nodes: list[Node], figure: Callable[[str], None]) -> None:
    strike(nodes[1], signal.SIGKILL, figure)


def test_a_p2pd_that_hangs_is_replaced(nodes: list[Node], figure: Callable[[str], None]) -> None:
    """Of the first node, which has no bootstrap node to ask."""
    strike(nodes[0], signal.SIGSTOP, figure)


def test_a_p2pd_that_dies_before_its_node_trains_is_replaced(real_nodes: RealNodes, nodes: list[Node]) -> None:
    newcomer = real_nodes.node("early", *nodes[0].invitation())
    until(lambda: newcomer.ask("status").get("waiting_for", "the network daemon") != "the network daemon", "p2pd is up")
    assert not newcomer.ask("status").get("step"), "it does not train yet"
    os.kill(until(lambda: daemon(newcomer), "its daemon"), signal.SIGKILL)
    until(newcomer.committed, "a round with somebody", 60)
    assert len(said(newcomer, "the network daemon is lost")) == 1
    newcomer.kill()


def test_status_tells_of_a_p2pd_that_dies_again_and_again(nodes: list[Node]) -> None:
    killed: set[int] = set()

    def kill_again() -> bool:
        pid, starts = daemon(nodes[1]), any("degraded" in text for text in troubles(nodes[1]))
        if pid and pid not in killed and not starts:  # of those that start several may die and count as one
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return len(killed) == 3

    until(kill_again, "three deaths more", 30)
    until(lambda: [text for text in troubles(nodes[1]) if "degraded" in text], "status says so meanwhile", 10)
    many = re.compile(r"p2pd died \d times in 10 minutes")
    until(lambda: any(map(many.search, troubles(nodes[1]))), "and after it", 30)
    assert nodes[1].ask("status")["network_restarts"] >= 3
    until(lambda: committed_since(nodes[1], time.time() - 1), "it exchanges all the same", 30)


def test_a_newcomer_joins_by_the_line_of_before(real_nodes: RealNodes, nodes: list[Node]) -> None:
    newcomer = real_nodes.node("late", *nodes[0].invitation())
    until(newcomer.committed, "a round with somebody")


def test_leaving_is_quick_and_asked_twice_it_is_immediate(real_nodes: RealNodes, nodes: list[Node]) -> None:
    _, one, two = nodes
    others = [node for node in real_nodes.nodes if node not in (one, two) and node.process.poll() is None]
    leaver, seen_by = two.ask("status")["peer_id"], others[-1]
    began = time.monotonic()
    two.process.send_signal(signal.SIGTERM)
    assert two.process.wait(10) == 0, two.log.read_text()[-2000:]
    assert time.monotonic() - began < 10
    assert list(two.home.glob("runs/*/checkpoints/*/state.json")), "what was trained is kept"
    states = lambda: {row["peer_id"]: row["state"] for row in seen_by.ask("peers").get("peers", [])}  # noqa: E731
    until(lambda: states().get(leaver) == "leaving", "its goodbye is heard, before its record ends", 15)

    one.process.send_signal(signal.SIGTERM)
    one.process.send_signal(signal.SIGINT)  # a second SIGTERM might reach it together with the first, as one
    assert one.process.wait(1) == EXIT_INTERRUPTED
    for node in others:
        node.process.send_signal(signal.SIGINT)
    for node in others:
        assert node.process.wait(12) == 0
    until(lambda: not real_nodes.left_over(), "nothing is left", 5)
