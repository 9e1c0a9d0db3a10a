"""Two real nodes on a link so slow that a swap takes half a phase: training does not wait for it, with eager overlap.

Each node lives in a network namespace of its own; a veth pair joins them, held at a rate by tc's token bucket in both
directions. The task's steps take a fixed time and hardly any CPU and phases go by time, so that the ratio of swap and
phase does not depend on how fast this machine is, nor on what else it does. Eager and blocking overlap are measured at
the same time, each on a link of its own.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import pytest
from namespaces import slow_link, why_not
from real_nodes import Node, RealNodes, until

PHASE_S = 5.0
SWAP_S = PHASE_S / 2
WATCHED_S = 45.0
PARAMETERS = 257 * 384
"""Of the paced task."""
OVERHEAD = 1.1
"""TCP, libp2p's encryption and framing, and the other messages of the two."""


@dataclass
class Measured:
    busy: list[float]
    minute: list[float]
    stall_ms: float
    swap_s: float
    apart: float
    """How far the two's boundaries are apart, as a share of a phase: 0.5 is the most."""
    committed: int
    losses: list[list[tuple[float, float]]]
    """Of each node: seconds since the first one began to train, held-out loss."""

    def loss_after(self, seconds: float) -> float:
        return fmean(at(points, seconds) for points in self.losses)

    def seconds_to(self, loss: float) -> float:
        """When the mean of the two comes down to this loss."""
        moments = sorted(second for points in self.losses for second, _ in points if second > 0)
        return next((second for second in moments if self.loss_after(second) <= loss), float("inf"))


def at(points: list[tuple[float, float]], second: float) -> float:
    """The loss at this second, on a line between two evaluations; after the last one it is what it was."""
    for (before, loss), (after, later) in pairwise(points):
        if before <= second <= after:
            return loss + (later - loss) * (second - before) / (after - before)
    return points[-1][1]


def measure(overlap: str) -> Measured:
    with slow_link(overlap[0], 8 * 4 * PARAMETERS * OVERHEAD / SWAP_S) as ends, RealNodes() as real_nodes:
        return watch(*start_two(real_nodes, overlap, ends))


def start_two(real_nodes: RealNodes, overlap: str, ends: list[tuple[str, str]]) -> tuple[list[Node], float]:
    """The two nodes, and when the first one began to train: half a phase before the second."""
    (here, one), (there, other) = ends
    outer = {"overlap": overlap, "codec": "fp32"}
    run = real_nodes.paced(seconds=PHASE_S, batch_tokens=64, learning_rate=0.0001, outer=outer)
    for name in "ab":
        (real_nodes.root / name).mkdir(mode=0o700)
        (real_nodes.root / name / "paused").touch()  # as its user left it
    first = real_nodes.node("a", "start", str(run), within=("ip", "netns", "exec", here), at=one)
    until(lambda: first.ask("status").get("state") == "paused", "the first node, ready but paused")
    second = real_nodes.node("b", *first.invitation(), within=("ip", "netns", "exec", there), at=other)
    until(lambda: second.ask("status").get("state") == "paused", "the second node, with the first one's state")
    until(lambda: all(node.ask("status").get("peers_seen") for node in (first, second)), "that they see each other")
    took_s = resume(first)
    began = time.time()
    until(lambda: time.time() > began + PHASE_S / 2 - took_s, "half a phase")
    resume(second)
    return [first, second], began


def resume(node: Node) -> float:
    asked = time.monotonic()
    node.command("resume")
    return time.monotonic() - asked


def watch(nodes: list[Node], began: float) -> Measured:
    until(lambda: time.time() > began + WATCHED_S, "the end", WATCHED_S + 5)
    views = [node.ask("status") for node in nodes]
    swaps = nodes[1].events("RoundCommitted")
    boundaries = [[event["at"] for event in node.events("PhaseDone")] for node in nodes]
    evaluated = [[(max(0.0, e["at"] - began), e["eval_loss"]) for e in node.events("Evaluated")] for node in nodes]
    return Measured(
        busy=[view["busy_fraction"] for view in views],
        minute=[view["busy_fraction_minute"] for view in views],
        stall_ms=fmean(e["stall_ms"] for node in nodes for e in node.events("PhaseDone")),
        swap_s=fmean(e["seconds"] for e in swaps),
        apart=fmean(min(abs(moment - other) for other in boundaries[0]) for moment in boundaries[1]) / PHASE_S,
        committed=len(swaps),
        losses=evaluated,
    )


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nobody_waits_for_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    if why := why_not("tc"):
        pytest.skip(why)
    with ThreadPoolExecutor(2) as both:
        eager, blocking = both.map(measure, ("eager", "blocking"))
    goal = blocking.loss_after(WATCHED_S)
    with capsys.disabled():
        for name, m in (("eager", eager), ("blocking", blocking)):
            print(  # noqa: T201
                f"\n  {name}: busy {m.busy[0]:.3f} and {m.busy[1]:.3f} (last minute {m.minute[0]:.3f} and "
                f"{m.minute[1]:.3f}), {m.committed} swaps of {m.swap_s:.1f} s in phases of {PHASE_S:.0f} s, boundaries "
                f"{m.apart:.2f} of a phase apart, {m.stall_ms:.1f} ms of training a round; held-out loss "
                f"{m.loss_after(WATCHED_S):.4f} after {WATCHED_S:.0f} s, {goal:.4f} after {m.seconds_to(goal):.1f} s"
            )
    assert 0.3 * PHASE_S < eager.swap_s < 0.8 * PHASE_S
    assert eager.apart > 0.25
    assert min(eager.committed, blocking.committed) >= 3
    assert min(eager.busy + eager.minute) >= 0.97
    assert max(blocking.busy) < 0.8
    assert eager.seconds_to(goal) < 0.95 * blocking.seconds_to(goal)
