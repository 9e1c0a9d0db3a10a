"""Six real nodes are cut into two halves for a minute: each half trains on, and then they swap with each other again.

A network namespace for each half, and a link between them that is cut: what is sent is dropped without a word,
so that connections hang as they do when a cable is pulled somewhere. All six joined by the same node, on one side.

    half 1: 10.85.0.1, .2, .3 ──── 10.85.0.101, .102, .103 :half 2

How far the halves are apart is measured on checkpoints: the distance of their mean φ, relative to the mean of all.
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from namespaces import cut_link, half_address, inside, two_halves, why_not
from real_nodes import Node, RealNodes, until
from safetensors.torch import load_file

from noloco_node.checkpoints import listing

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

CUT_S = 60.0
MEND_S = 60.0
MEASURE_S = 15.0
"""Long enough for each node to write a checkpoint, which comes every ten rounds of a second."""
Half = list[Node]


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    if why := why_not("tc"):
        pytest.skip(why)
    with two_halves(), RealNodes() as real_nodes:
        yield real_nodes


def begin(real_nodes: RealNodes) -> tuple[Half, Half]:
    # few examples a step, and a rate at which nobody arrives within these minutes: who does not average drifts apart
    run = real_nodes.paced(step_s=0.1, steps=10, batch_tokens=2, learning_rate=0.0001)
    first = real_nodes.node("a", "start", str(run), within=inside("half1"), at=half_address(1, 1))
    line = first.invitation()
    one = [first, *(real_nodes.node(f"a{n}", *line, within=inside("half1"), at=half_address(1, n)) for n in (2, 3))]
    other = [real_nodes.node(f"b{n}", *line, within=inside("half2"), at=half_address(2, n)) for n in (1, 2, 3)]
    for node in (*one, *other):
        until(lambda node=node: len(node.ask("status").get("partners", ())) >= 4, "partners on both sides", 120)
    return one, other


def peer_ids(half: Half) -> set[str]:
    return {node.ask("status")["peer_id"] for node in half}


def swaps(half: Half, begin: float, end: float, among: set[str]) -> list[float]:
    """When one of this half committed a round with one of `among`."""
    found = (e for node in half for e in node.events("RoundCommitted") if begin < e["at"] < end)
    return sorted(event["at"] for event in found if event["partner"] in among)


def distance(one: Half, other: Half) -> float:
    """Measured from the next checkpoints."""
    begun = {node: node.ask("status")["round"] for node in (*one, *other)}

    def saved(node: Node) -> dict[str, torch.Tensor]:
        kept = (path for folder in node.home.glob("runs/*/checkpoints") for path in listing.kept(folder))
        newest = next(kept, None)
        fresh = newest and json.loads((newest / "state.json").read_text())["round"] > begun[node]
        return load_file(newest / "outer.safetensors") if newest and fresh else {}

    def mean(half: Half) -> torch.Tensor:
        kept = [until(lambda node=node: saved(node), "a checkpoint", 4 * MEASURE_S) for node in half]
        return torch.stack([outer["phi"] for outer in kept]).mean(0)

    here, there = mean(one), mean(other)
    return float((here - there).norm() / ((here + there) / 2).norm())


def test_two_halves_go_on_and_find_together_again(real_nodes: RealNodes, figure: Callable[[str], None]) -> None:
    one, other = begin(real_nodes)
    ids = peer_ids(one), peer_ids(other)
    before = distance(one, other)
    cut_link(cut=True)
    cut = time.time()
    until(lambda: time.time() > cut + CUT_S - MEASURE_S, "most of a minute", CUT_S)
    apart = distance(one, other)
    until(lambda: time.time() > cut + CUT_S, "a minute", CUT_S)
    cut_link(cut=False)
    healed = time.time()
    within = [swaps(half, cut + 5, healed, own) for half, own in zip((one, other), ids, strict=True)]
    across = until(lambda: swaps(one, healed, time.time(), ids[1]), "a round of both halves", MEND_S + 10)
    until(lambda: time.time() > healed + MEND_S, "a minute", MEND_S + 5)
    after = distance(one, other)
    again = swaps(one, healed, time.time(), ids[1])
    figure(
        f"in {healed - cut:.0f} s apart the halves committed {len(within[0])} and {len(within[1])} rounds of "
        f"a node; the first one across {across[0] - healed:.0f} s after healing, {len(again)} within a minute; "
        f"they were {before:.4f} apart before, {apart:.4f} at the end, {after:.4f} a minute later"
    )
    assert not swaps(one, cut + 5, healed, ids[1]), "nothing goes across while the link is cut"
    assert min(map(len, within)) >= 3 * CUT_S / 2
    assert across[0] - healed < MEND_S
    assert apart > 1.5 * before
    assert after < 0.8 * apart
    for node in (*one, *other):
        assert not node.printed("(broke the protocol)")
