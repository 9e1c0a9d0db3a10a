"""A real node that trains, and a peer that sends it garbage, claims without end, and streams without number.

The peer is a program of its own (tests/helpers/garbage_peer.py) with an honest transport, so that everything comes to
the node as from any other peer. FAULT_MESSAGES=500 makes a short test of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from bad_peer import run_as_everybody_knows_it
from fault_points import daemon
from real_nodes import ROOT, Node, RealNodes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MESSAGES = int(os.environ.get("FAULT_MESSAGES", "10000"))
SEED = 14
GROWTH_MIB = 64
PEER = ROOT / "tests" / "helpers" / "garbage_peer.py"
CLOSED_S = {"garbage": 1.0, "a frame of 16 MiB": 1.0, "a message of 4 GiB": 1.0, "a field of 1 TiB": 1.0}
CLOSED_S |= {"nothing": 12.0, "one byte a second": 12.0}
"""What claims too much is ended within a second: its call, or the connection. What trickles within ten, and two for a
busy machine."""


@pytest.fixture(scope="module")
def nodes(real_nodes: RealNodes) -> list[Node]:
    first = real_nodes.node("n0", "start", str(real_nodes.paced(step_s=0.1, steps=10, learning_rate=0.0001)))
    nodes = [first, real_nodes.node("n1", *first.invitation())]
    for node in nodes:
        until(node.committed, "a round together", 300)
    return nodes


def memory_mib(node: Node) -> float:
    """Of the node and its p2pd."""
    processes = [node.process.pid, daemon(node)]
    return sum(psutil.Process(pid).memory_info().rss for pid in processes if pid) / (1 << 20)


def send(group: RealNodes, victim: Node, what: str, **told: Any) -> dict[str, Any]:
    """Each kind is a peer of its own: who has just flooded a node has no streams for a minute."""
    door = victim.ask("status")["addresses"][0]
    known = run_as_everybody_knows_it(group)
    told = {"what": what, "door": door, "key": str(group.root / f"{what}.key"), "seed": SEED, **known, **told}
    words = [sys.executable, str(PEER), json.dumps(told)]
    done = subprocess.run(words, env=group.environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def goes_on(nodes: list[Node]) -> None:
    for node in nodes:
        assert node.process.poll() is None, node.log.read_text()[-2000:]
        before = node.committed()
        until(lambda node=node, before=before: node.committed() > before + 1, "rounds go on", 60)
        assert "Traceback" not in (node.home / "node.log").read_text()
        assert node.ask("status")["network_restarts"] == 0


def test_garbage_on_each_service(real_nodes: RealNodes, nodes: list[Node], figure: Callable[[str], None]) -> None:
    before = memory_mib(nodes[0])
    ended = send(real_nodes, nodes[0], "garbage", count=MESSAGES)
    grown = memory_mib(nodes[0]) - before
    kinds = {method: max(counts, key=counts.get) for method, counts in ended.items()}
    figure(f"{MESSAGES} messages each (seed {SEED}), memory {grown:+.0f} MiB; most ended as: {kinds}")
    assert all(sum(counts.values()) == MESSAGES for counts in ended.values()), ended
    assert not any({"INTERNAL", "UNIMPLEMENTED"} & {*counts} for counts in ended.values()), ended
    goes_on(nodes)
    assert grown < GROWTH_MIB


def test_frames_without_end_and_streams_without_number(
    real_nodes: RealNodes, nodes: list[Node], figure: Callable[[str], None]
) -> None:
    before = memory_mib(nodes[0])
    closed = send(real_nodes, nodes[0], "raw")
    opened = send(real_nodes, nodes[0], "streams", count=MESSAGES)
    grown = memory_mib(nodes[0]) - before
    after = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in closed.items())
    figure(
        f"ended after: {after}; of {MESSAGES} streams {opened['opened']} were opened in {opened['seconds']:.0f} s; "
        f"memory {grown:+.0f} MiB"
    )
    goes_on(nodes)
    assert grown < GROWTH_MIB
    late = {name: closed[name] for name, limit in CLOSED_S.items() if closed[name] > limit}
    assert not late
