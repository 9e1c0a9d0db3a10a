"""A real node of an earlier state of this package beside one of today, and one that speaks another protocol.

No version is released so far, and protocol 1 changes until then. The earlier state is the first one whose messages are
those of today.
"""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from real_nodes import ROOT, Node, RealNodes, until

from noloco_node.errors import Incompatible
from noloco_node.version import PROTOCOL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BEFORE = "4e93443"
ENDED_S = 90.0
INSIDE_NODE = ROOT / "tests" / "helpers" / "inside_node"


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    with RealNodes() as real_nodes:
        yield real_nodes


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The earlier state, as a folder."""
    archive = ["git", "-C", str(ROOT), "archive", BEFORE, "noloco_node", "tests/tasks"]
    packed = subprocess.run(archive, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the history with {BEFORE} is not here")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=packed.stdout, check=True)
    return tmp_path


def elsewhere(group: RealNodes, changes: dict[str, str], name: str, *words: str) -> Node:
    usual = dict(group.environ)
    group.environ.update(changes)
    try:
        return group.node(name, *words)
    finally:
        group.environ.clear()
        group.environ.update(usual)


@pytest.mark.parametrize("author_is_older", [False, True], ids=["it joins", "it began the run"])
def test_the_version_before_swaps_with_this_one(
    real_nodes: RealNodes, before: Path, author_is_older: bool, figure: Callable[[str], None]
) -> None:
    old = {"PYTHONPATH": f"{before}:{before / 'tests' / 'tasks'}", "PYTHONSAFEPATH": "1"}  # not the one in this folder
    run = str(real_nodes.paced(step_s=0.1, steps=10, learning_rate=0.0001))
    first = elsewhere(real_nodes, old if author_is_older else {}, "n0", "start", run)
    until(first.round, "its training", 240)
    (door,) = first.ask("status")["addresses"]
    second = elsewhere(real_nodes, {} if author_is_older else old, "n1", "join", "--bootstrap", door)
    began = time.monotonic()
    for node in (first, second):
        until(lambda node=node: node.committed() >= 5, "five rounds together", 240)
    assert second.printed(r"received the state of \S+ at round (\d+)")
    faults = {
        name: Counter(event["reason"] for event in node.events("PeerFaulted"))
        for name, node in (("the author", first), ("who joined", second))
    }
    which = "began the run" if author_is_older else "joins"
    figure(
        f"the older one {which}: five rounds together after {time.monotonic() - began:.0f} s; breaches seen by {faults}"
    )
    for node in (first, second):
        assert "Traceback" not in (node.home / "node.log").read_text()
    assert not any(faults.values()), faults


def test_another_protocol_is_said(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    first = real_nodes.node("n0", "start", str(real_nodes.paced(step_s=0.1, steps=10)))
    until(first.round, "its training", 240)
    other = {
        "PYTHONPATH": f"{INSIDE_NODE}:{real_nodes.environ['PYTHONPATH']}",
        "SPEAKS_PROTOCOL": str(PROTOCOL + 1),
    }
    second = elsewhere(real_nodes, other, "n1", *first.invitation())
    began, code = time.monotonic(), None
    with suppress(subprocess.TimeoutExpired):
        code = second.process.wait(ENDED_S)
    said = second.log.read_text().splitlines()[-1]
    figure(f"exit {code} after {time.monotonic() - began:.0f} s: {said}")
    assert code == Incompatible.exit_code, said
