"""Two stages on a link of 200 Mbit/s and 30 ms there and back: how busy they are with so many micro-batches under way,
beside what `noloco-node simulate network --stages` computes."""

import os
import time
from pathlib import Path

import pytest
from delayed_link import delayed_link, why_not
from paced_stage import CODED, FORWARD_S

from noloco_node.bench.workers import START_S, Workers

MBIT, WAY_S = 200.0, 0.015
COMPUTE_S = (4 * FORWARD_S, 3 * FORWARD_S)
HELPERS = Path(__file__).parents[1] / "helpers"


def busy(in_flight: int, seconds: float) -> list[float]:
    environ = {"PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])}
    with delayed_link(MBIT, WAY_S) as hosts, Workers("paced_stage", hosts, environ=environ) as stages:
        each = [{"host": host.address, "stage": stage} for stage, host in enumerate(hosts)]
        addresses = [answer["address"] for answer in stages.ask("start", START_S, each, in_flight=in_flight)]
        stages.ask("connect", 10.0, [{"next_stage": addresses[1:]}, {"next_stage": []}])
        time.sleep(5.0)  # until all that may be under way are, and TCP has found the rate
        before = stages.ask("busy", 10.0)
        time.sleep(seconds)
        after = stages.ask("busy", 10.0)
    return [(a["busy_s"] - b["busy_s"]) / (a["at"] - b["at"]) for b, a in zip(before, after, strict=True)]


def expected(in_flight: int) -> list[float]:
    """The lower of what comes back in time, and what the busier stage does."""
    carried_s = CODED / (MBIT * 1e6 / 8)
    alone_s = sum(COMPUTE_S) + 2 * (carried_s + WAY_S)
    rate = min(in_flight / alone_s, 1 / max(*COMPUTE_S, carried_s))
    return [rate * seconds for seconds in COMPUTE_S]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("in_flight", [1, 2, 4, 8])
def test_busy_with_so_many_under_way(in_flight: int, capsys: pytest.CaptureFixture[str]) -> None:
    found, model = busy(in_flight, 15.0), expected(in_flight)
    with capsys.disabled():
        words = ", ".join(f"{one:.2f} (model {other:.2f})" for one, other in zip(found, model, strict=True))
        print(f"\n  {in_flight} under way: busy {words}")  # noqa: T201
    assert found == pytest.approx(model, rel=0.2)
