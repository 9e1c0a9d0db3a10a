"""A partner that freezes in the middle of a swap, with real processes: training goes on, nobody waits for it."""

import os
import signal
import time
from statistics import median
from typing import Any

import pytest
from fault_points import Phase, Point, at
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

OUTPUTS = 16_352
VECTOR_BYTES = 2 * 257 * OUTPUTS
"""In bf16, 8.4 MB in five fragments."""
UPLOAD_BYTES_S = 1_200_000
"""A swap takes seven seconds, so that its middle lasts long enough to be seen."""


def step_rates(node: Node, after: float, before: float) -> list[float]:
    phases = [e for e in node.events("PhaseDone") if after < e["at"] < before]
    return [e["tokens"] / e["seconds"] for e in phases]


def test_a_partner_that_freezes_costs_a_round_and_no_step(real_nodes: RealNodes) -> None:
    # in phases of 4 s, so that a frozen swap lives within few of them
    run = real_nodes.paced(step_s=0.25, outputs=OUTPUTS, steps=16, outer={"codec": "bf16"})
    author = real_nodes.node("author", "start", str(run))
    slow = real_nodes.node("slow", "join", "--bootstrap", author.address(), "--max-upload", str(UPLOAD_BYTES_S))

    at(author, Point(0, Phase.SWAPPING, 0.35), swap_bytes=VECTOR_BYTES)
    os.kill(slow.process.pid, signal.SIGSTOP)
    frozen = time.time()
    try:
        broken = until(lambda: _broken(author, frozen), "the end of the swap", 30)
    finally:
        os.kill(slow.process.pid, signal.SIGCONT)
    assert broken["reason"] == "silent", author.events("WentSolo")
    assert 15 < broken["at"] - frozen < 26, "at its deadline"
    assert 1 <= broken["applied"] < 5, "what was applied stays, and counts"
    assert broken["one_sided"] <= 1
    status = author.ask("status")
    assert status["rounds"]["by_reason"]["silent"] == 1
    assert status["rounds"]["by_reason"]["swapping"] >= 3, "rounds went on"

    rates = step_rates(author, frozen + 4, broken["at"])
    usual = step_rates(author, 0, frozen)
    assert len(rates) >= 3
    assert median(rates) >= 0.9 * median(usual), "nothing in training waited"

    back = until(lambda: [e for e in author.events("RoundCommitted") if e["at"] > broken["at"]], "it is back", 40)
    assert back[0]["seconds"] >= 0.8 * VECTOR_BYTES / UPLOAD_BYTES_S, "held at its rate"


def _broken(author: Node, frozen: float) -> dict[str, Any] | None:
    solo = [e for e in author.events("WentSolo") if e["at"] > frozen and e["partner"]]
    return solo[0] if solo else None
