"""A peer that is frozen for half a minute and one behind a slow link: the others' steps are as many as before.

The task is paced and the codec exact, so a swap over the slow link takes 13 s of phases of 3 s, and as it is one
fragment, nothing of it gets on meanwhile: while others wait, it is given up after two phases. The slow peer is in a
network namespace of its own; the others and their p2pd are together on the other side of the link.
"""

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from fault_points import Phase, Point, at, freeze
from namespaces import slow_link, why_not
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

SLOW_BITS_S = 256e3
FROZEN_S = 30.0
SEED = 8
PHASES = 10
"""That a rate is measured over."""


def rate(node: Node, after: float, before: float) -> float:
    """Steps a second of whole phases in that time."""
    done = [event for event in node.events("PhaseDone") if after <= event["at"] <= before]
    return (done[-1]["steps"] - done[0]["steps"]) / (done[-1]["at"] - done[0]["at"])


def wait_for_phases(node: Node, count: int) -> None:
    since = len(node.events("PhaseDone"))
    until(lambda: len(node.events("PhaseDone")) >= since + count, f"{count} phases", 120)


def test_a_frozen_peer_and_one_behind_a_slow_link_cost_no_step(figure: Callable[[str], None]) -> None:
    if why := why_not("tc"):
        pytest.skip(why)
    with slow_link("slow", SLOW_BITS_S) as ((here, near), (there, far)), RealNodes() as group:
        run = group.paced(step_s=0.3, steps=10, outer={"codec": "fp32"}, learning_rate=0.0001)
        words, inside = ("ip", "netns", "exec"), (here, near)
        first = group.node("n0", "start", str(run), within=(*words, inside[0]), at=inside[1])
        line = first.invitation()
        others = [group.node(f"n{n}", *line, within=(*words, inside[0]), at=inside[1]) for n in (1, 2)]
        watched = [first, others[0]]
        for node in (first, *others):
            until(node.committed, "a round with somebody", 180)
        began = time.time()
        wait_for_phases(first, PHASES)
        calm = time.time()

        slow = group.node("slow", *line, within=(*words, there), at=far)
        until(slow.round, "its training", 240)
        tried = lambda: [e for e in slow.events("WentSolo") if e["partner"]] or slow.committed()  # noqa: E731
        until(tried, "a swap over the slow link", 240)
        joined = time.time()
        wait_for_phases(first, PHASES)
        beside = time.time()

        frozen = others[1]
        at(frozen, Point.drawn(random.Random(SEED), frozen.round() + 1, Phase.TRAINING))
        freeze(frozen, FROZEN_S)
        thawed = time.time()
        until(
            lambda: frozen.committed() and any(e["at"] > thawed for e in frozen.events("RoundCommitted")),
            "it is back",
            90,
        )
        spans = {"calm": (began, calm), "slow link": (joined, beside), "frozen": (beside, thawed)}
        rates = {name: [rate(node, *span) for node in watched] for name, span in spans.items()}
        ended = Counter(event["reason"] for event in slow.events("WentSolo") if event["partner"])
    calm_rates, slow_rates, frozen_rates = (" and ".join(f"{r:.2f}" for r in rates[name]) for name in spans)
    figure(
        f"steps a second: {calm_rates}, beside a peer at {SLOW_BITS_S / 1000:.0f} kbit/s (its swaps: {dict(ended)}, "
        f"{slow.committed()} whole) {slow_rates}, beside a frozen one {frozen_rates}"
    )
    for name in ("slow link", "frozen"):
        assert all(now >= 0.95 * then for now, then in zip(rates[name], rates["calm"], strict=True)), name
