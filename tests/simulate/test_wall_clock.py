"""The modelled clock of a large run."""

import json
import math

import pytest
from test_simulate_command import QUICK, simulated

from noloco_node.errors import UsageError
from noloco_node.simulate.settings import Curve
from noloco_node.simulate.wallclock import Large, loss_after, seconds_to, timed

LARGE = Large(parameters=1e9, step_s=3.0, bytes_per_parameter=0.5)


def test_a_swap_is_as_long_as_its_vector_on_the_link() -> None:
    assert LARGE.swap_s(10) == 400
    assert LARGE.simulated("eager", 10) == "delay=134"
    assert LARGE.simulated("blocking", 10) == "blocking"


def test_only_blocking_waits_and_for_all_that_is_sent() -> None:
    curve = Curve("diloco", 1, [0, 50, 100], bytes_sent_per_param=[0, 0.5, 2.0])
    assert LARGE.clock("eager", 10, curve) == [0, 150, 300]
    assert LARGE.clock("blocking", 10, curve) == [0, 550, 1900]
    assert LARGE.clock("blocking", 1000, curve) == [0, 154, 316]


def test_losses_between_points() -> None:
    points = [(0.0, 4.0), (10.0, 2.0), (20.0, 2.5), (30.0, 1.0)]
    assert [loss_after(points, s) for s in (0, 5, 10, 15, 99)] == [4, 3, 2, 2.25, 1]
    assert [seconds_to(points, goal) for goal in (5.0, 3.0, 2.0, 1.75, 0.5)] == [0, 5, 10, 25, math.inf]


def test_each_way_finds_its_curve_and_seeds_are_averaged() -> None:
    def curve(name: str, seed: int, last: float) -> Curve:
        losses = [5.0, last]
        return Curve(
            name, seed, [0, 50], averaged_model_loss=losses, bytes_sent_per_param=[0, 0.5], bytes_per_param=0.5
        )

    curves = [curve("noloco blocking", 1, 2.0), curve("noloco delay=14", 1, 2.1), curve("noloco blocking", 2, 3.0)]
    ways = {("eager", 100.0): "delay=14", ("blocking", 100.0): "blocking"}
    eager, blocking = timed(curves, ways, LARGE)
    assert (eager.overlap, eager.losses, eager.seconds) == ("eager", [5.0, 2.1], [0, 150])
    assert (blocking.losses, blocking.seconds) == ([5.0, 2.5], [0, 190])


# ---- as it is typed ----
def test_a_table_of_links(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--codec", "bf16", "--links", "10,1000", "--overlap", "eager,blocking", "--no-defences", "--json"
    assert simulated(*QUICK, *words) == 0
    document = json.loads(capsys.readouterr().out)
    assert [curve["algorithm"] for curve in document["curves"]] == [
        "noloco delay=534", "noloco blocking", "noloco delay=6"
    ]  # fmt: skip
    ways = document["wall_clock"]
    assert [(way["overlap"], way["mbit_s"]) for way in ways] == [
        ("eager", 10), ("blocking", 10), ("eager", 1000), ("blocking", 1000)
    ]  # fmt: skip
    assert ways[0]["seconds"][-1] == ways[2]["seconds"][-1] == 6.0
    assert ways[1]["losses"] == ways[3]["losses"] and ways[1]["seconds"][-1] > 3200


def test_a_table_in_a_file_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--codec", "bf16", "--links", "10", "--no-defences", "--algorithms", "noloco:alpha=0.2:beta=0.9"
    assert simulated(*QUICK, *words) == 0
    table = capsys.readouterr().out
    assert "bytes/param" in table and "…" not in table


def test_rivals_wait_on_every_link(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--codec", "bf16", "--links", "10,1000", "--overlap", "eager", "--algorithms", "noloco,diloco", "--json"
    assert simulated(*QUICK, *words) == 0
    ways = json.loads(capsys.readouterr().out)["wall_clock"]
    assert [(way["algorithm"], way["overlap"], way["mbit_s"]) for way in ways] == [
        ("noloco", "eager", 10), ("diloco", "blocking", 10), ("noloco", "eager", 1000), ("diloco", "blocking", 1000)
    ]  # fmt: skip
    assert [way["seconds"][-1] - 6 for way in ways] == pytest.approx([0, 3200, 0, 32])


@pytest.mark.parametrize(
    "words",
    [
        ["--links", "0"],
        ["--links", "10", "--overlap", "delay=3"],
        ["--links", "10", "--modelled-step", "0"],
        ["--links", "nan"],
        ["--links", "10", "--plot", "out.png"],
        ["--overlap", "eager,lazy"],
    ],
)
def test_what_cannot_be_modelled(words: list[str]) -> None:
    with pytest.raises(UsageError):
        simulated(*QUICK, *words)
