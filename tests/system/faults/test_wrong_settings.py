"""What is wrong with a machine or its settings: the clock, another node's identity, few descriptors, little /dev/shm.

A node's clock is moved inside its process (tests/helpers/inside_node), because nothing else on this machine may move:
its p2pd keeps the machine's, which it needs for no record of ours.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from bad_peer import bad_peer
from fault_points import daemon
from real_nodes import ROOT, Node, RealNodes, until

from noloco_node.errors import ClockTooFarOff, IdentityInUse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INSIDE_NODE = ROOT / "tests" / "helpers" / "inside_node"
DESCRIPTORS = 256
FEW_DESCRIPTORS = ["prlimit", f"--nofile={DESCRIPTORS}", "--"]
LITTLE_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
HOUR_S = 3600.0


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as real_nodes:
        real_nodes.environ["PYTHONPATH"] = f"{INSIDE_NODE}:{real_nodes.environ['PYTHONPATH']}"
        yield real_nodes


def with_clock(group: RealNodes, ahead_s: float, name: str, *words: str) -> Node:
    group.environ["CLOCK_AHEAD_S"] = str(ahead_s)
    try:
        return group.node(name, *words)
    finally:
        del group.environ["CLOCK_AHEAD_S"]


def two(group: RealNodes) -> list[Node]:
    """Two nodes that swap, at two places (base/places.py)."""
    first = group.node("n0", "start", str(group.paced(step_s=0.1, steps=10, learning_rate=0.0001)))
    nodes = [first, group.node("n1", "join", "--bootstrap", first.address(), at="127.0.0.2")]
    for node in nodes:
        until(node.committed, "a round together", 300)
    return nodes


def doors(nodes: list[Node]) -> list[str]:
    return [word for node in nodes for word in ("--bootstrap", node.ask("status")["addresses"][0])]


@pytest.mark.parametrize("ahead_s", [5.0, -5.0, HOUR_S, -HOUR_S])
def test_a_clock_that_is_off(real_nodes: RealNodes, ahead_s: float, figure: Callable[[str], None]) -> None:
    nodes = two(real_nodes)
    node = with_clock(real_nodes, ahead_s, "off", "join", *doors(nodes))
    began = time.monotonic()
    if abs(ahead_s) < HOUR_S:
        until(node.committed, "a round with somebody", 240)
        took = time.monotonic() - began
        status = node.ask("status")
        assert status["skew_s"] == pytest.approx(ahead_s, abs=1.0)
        assert any(finding["text"].startswith("clock: ") for finding in status["health"])
        figure(f"{ahead_s:+.0f} s: a round after {took:.0f} s, with a health line")
    else:
        assert node.process.wait(120) == ClockTooFarOff.exit_code, node.log.read_text()[-2000:]
        said = node.log.read_text().splitlines()[-1]
        assert "synchronise this machine's clock" in said
        figure(f"{ahead_s:+.0f} s: exit {ClockTooFarOff.exit_code} after {time.monotonic() - began:.0f} s")
    before = [each.committed() for each in nodes]
    for each, rounds in zip(nodes, before, strict=True):
        until(lambda each=each, rounds=rounds: each.committed() > rounds, "the others swap on", 60)


def test_a_second_node_with_the_same_identity(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    nodes = two(real_nodes)
    copy = real_nodes.root / "copy"
    copy.mkdir(mode=0o700)
    shutil.copy(nodes[1].home / "identity.key", copy / "identity.key")
    second = real_nodes.node("copy", "join", *doors(nodes[:1]))
    began = time.monotonic()
    assert second.process.wait(120) == IdentityInUse.exit_code, second.log.read_text()[-2000:]
    figure(f"exit {IdentityInUse.exit_code} after {time.monotonic() - began:.0f} s")
    assert second.printed("(is in use by a node that is running)")
    before = nodes[1].committed()
    until(lambda: nodes[1].committed() > before + 2, "the first one swaps on", 60)


def descriptors(node: Node) -> tuple[int, int]:
    """Of its process and of its p2pd."""
    network = daemon(node)
    return psutil.Process(node.process.pid).num_fds(), psutil.Process(network).num_fds() if network else 0


@pytest.mark.system
def test_few_descriptors_and_little_shared_memory(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("prlimit", "unshare"))):
        pytest.skip("needs root, prlimit and unshare")
    nodes = two(real_nodes)
    small = real_nodes.node("small", "join", *doors(nodes), within=[*FEW_DESCRIPTORS, *LITTLE_SHM])
    until(lambda: small.committed() >= 3 or small.process.poll() is not None, "three rounds", 240)
    assert small.process.poll() is None, small.log.read_text()[-2000:]
    limits = psutil.Process(small.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    own, network = descriptors(small)
    figure(f"works with a limit of {limits[0]} descriptors: {own} of the node and {network} of its p2pd are open")
    assert limits[0] == DESCRIPTORS
    assert max(own, network) < DESCRIPTORS / 2


@pytest.mark.system
def test_few_descriptors_and_many_streams(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    """33 identities open four connections each, with a call in each, to a node that may open 256 files."""
    if not shutil.which("prlimit"):
        pytest.skip("needs prlimit")
    run = real_nodes.paced(step_s=0.1, steps=10, learning_rate=0.0001)
    few = real_nodes.node("n0", "start", str(run), within=FEW_DESCRIPTORS)
    other = real_nodes.node("n1", *few.invitation())
    for node in (few, other):
        until(node.committed, "a round together", 300)
    with bad_peer(real_nodes, [few], attack="connections"):
        most, before, ends = 0, few.committed(), time.monotonic() + 30
        while time.monotonic() < ends:
            assert few.process.poll() is None, few.log.read_text()[-2000:]
            most = max(most, *descriptors(few))
            time.sleep(0.5)
        rounds = few.committed() - before
    after = few.committed()
    until(lambda: few.committed() > after + 2, "rounds after it", 90)
    log = (few.home / "node.log").read_text()
    figure(
        f"at most {most} of {DESCRIPTORS} descriptors in 30 s, {rounds} rounds meanwhile, "
        f"{log.count('Too many open')} errors"
    )
    assert rounds >= 5
    assert "Traceback" not in log
