"""Links so slow that a swap takes three phases, or more than eight, in virtual time.

Each node carries a small outer state of the real kind: φ and δ move by core/outer.py with a random Δ of its own in each
phase, and a correction lands as late as the link makes it.
"""

from collections import Counter
from statistics import fmean
from typing import Any

import pytest
import torch
import virtual_nodes
from virtual_clock import run_virtual
from virtual_nodes import FRAGMENTS, Node, VirtualSwarm

from noloco_node.core import outer
from noloco_node.core.round import TOO_SLOW
from noloco_node.host.traffic import Traffic

PHASE_S, ROUNDS, NODES = 60.0, 48, 8
RATE = 32_000.0
HYPER = outer.OuterSettings(alpha=0.3, beta=1.0, gamma=0.7)


class Replica(Node):
    """`u` is of the boundary before its local step, as in the daemon."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.phi, self.delta, self.u = (torch.zeros(FRAGMENTS) for _ in range(3))
        self.theta = self.phi.clone()
        self.late: Counter[int] = Counter()
        self.at_the_end: list[torch.Tensor] = []

    def end_phase(self) -> None:
        self.theta += torch.tensor([self.rng.gauss(0, 1) for _ in range(FRAGMENTS)])
        outer.snapshot(self.theta, self.phi, HYPER, self.u)
        outer.local_step(self.theta, self.phi, self.delta, HYPER)
        self.at_the_end.append(self.phi.clone())

    def vector(self) -> list[float]:
        return self.u.tolist()

    def correct(self, index: int, correction: float, offered_round: int) -> None:
        part, late = slice(index, index + 1), self.steps - offered_round
        c = torch.tensor([correction])
        outer.correct(self.theta[part], self.phi[part], self.delta[part], c, HYPER, late)
        self.late[late] += 1


def swarm(monkeypatch: pytest.MonkeyPatch, phases: float, nodes: int, rounds: int) -> VirtualSwarm:
    """Run, with a swap taking so many phases."""
    monkeypatch.setattr(virtual_nodes, "PAYLOAD", b"\0" * int(phases * PHASE_S * RATE / FRAGMENTS))
    paces = {k: Traffic(upload_bytes_s=RATE, day=lambda: "2031-12-24") for k in range(nodes)}
    made = VirtualSwarm([PHASE_S] * nodes, paces=paces, kind=Replica)
    run_virtual(made.run(rounds))
    return made


def spread(nodes: list[Replica]) -> float:
    """Mean variance of φ between the nodes, over the second half of the rounds."""
    rounds = range(ROUNDS // 2, ROUNDS)
    return fmean(float(torch.stack([n.at_the_end[k] for n in nodes]).var(0).mean()) for k in rounds)


def test_swaps_of_three_phases_complete_and_keep_replicas_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = swarm(monkeypatch, 3.0, NODES, ROUNDS)
    seconds = [e.seconds for n in slow.nodes for e in n.committed]
    assert min(seconds) > 2.9 * PHASE_S and max(seconds) < 4 * PHASE_S
    reasons = sum((n.solo for n in slow.nodes), Counter())
    assert reasons["swapping"] >= 2.5 * len(seconds), "two or three boundaries lie within each"
    assert not set(reasons) & {TOO_SLOW, "hung_up", "silent"}, "none broke"
    assert all(len(n.committed) >= ROUNDS / 6 for n in slow.nodes)
    assert {1, 2, 3} <= set(slow.nodes[0].late), "a fragment lands as soon as it is there"

    quick = swarm(monkeypatch, 0.3, NODES, ROUNDS)
    alone = VirtualSwarm([PHASE_S] * NODES, loss=1.0, kind=Replica)
    run_virtual(alone.run(ROUNDS))
    found = {name: spread(made.nodes) for name, made in (("quick", quick), ("slow", slow), ("alone", alone))}
    with capsys.disabled():
        shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
        print(f"\n  variance of φ between {NODES} replicas, links {shown}")  # noqa: T201
    assert found["quick"] < found["slow"] < found["alone"] / 3


def test_swaps_of_more_than_eight_phases_end_as_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = swarm(monkeypatch, 12.0, 2, 10)
    assert not any(n.committed for n in slow.nodes)
    assert [n.solo[TOO_SLOW] for n in slow.nodes] == [1, 1], "whichever end gave up, both know why"
    assert all(n.late for n in slow.nodes), "what was applied stays"
