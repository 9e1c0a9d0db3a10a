"""A donor sends a large state, without a limit on its rate, and trains on.

The task is paced, so rates mean something, and has so many parameters that to copy, hash and send them is real work.
"""

import re
import time
from statistics import median
from typing import Any

import pytest
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

STEP_S, STEPS = 0.25, 8
"""The computation of a step takes a small part of that, on a busy machine too: a lower rate is what sending costs."""
OUTPUTS = 32_768
STATE_BYTES = 8 * 257 * OUTPUTS
"""Slow weights and outer momentum of a linear map of 256 inputs: 67 MB."""
DOWNLOADS = 3


def logged_at(node: Node, pattern: str) -> list[float]:
    """The times of the log lines that match."""
    lines = (node.home / "node.log").read_text().splitlines()
    return [_time(line) for line in lines if re.search(pattern, line)]


def _time(line: str) -> float:
    second, milliseconds = line[:23].split(",")
    return time.mktime(time.strptime(second, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000


def phases(node: Node) -> list[dict[str, Any]]:
    return node.events("PhaseDone")


def test_a_large_state_is_given_without_holding_up_the_training(
    real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = real_nodes.paced(step_s=STEP_S, outputs=OUTPUTS, steps=STEPS)
    donor = real_nodes.node("donor", "start", str(run))
    line = donor.invitation()
    until(lambda: len(phases(donor)) >= 8, "the donor's usual pace", 120)
    usual = median(STEPS / phase["seconds"] for phase in phases(donor)[3:])

    given, took = [], []
    for number in range(DOWNLOADS):
        newcomer = real_nodes.node(f"newcomer-{number}", *line)
        newcomer.received_state()
        (ended,) = logged_at(newcomer, "received the state of")
        newcomer.kill()
        began = logged_at(donor, r"sending \S+ the state of round")[-1]
        took.append(ended - began)
        until(lambda ended=ended: phases(donor)[-1]["at"] > ended, "the end of that phase", 60)
        # the copy is made in the phase before it is given
        given += [p for p in phases(donor) if p["at"] > began - STEP_S * STEPS and p["at"] - p["seconds"] < ended]

    rate = STEPS * len(given) / sum(phase["seconds"] for phase in given)
    with capsys.disabled():
        print(  # noqa: T201
            f"\n  a donor's steps a second while it gives {STATE_BYTES / 1e6:.0f} MB in {median(took):.1f} s: "
            f"{rate:.2f}, usually {usual:.2f}"
        )
    assert rate >= 0.9 * usual
