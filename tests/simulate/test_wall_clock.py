"""The modelled clock of a large run, and the plain delayed outer step that it compares with."""

import json
import math
import random

import pytest
import torch
from test_simulate_command import QUICK, simulated

from noloco_node.errors import UsageError
from noloco_node.simulate.rivals import Deferred, Outer, PaperNoLoCo
from noloco_node.simulate.settings import Curve, Settings, choice
from noloco_node.simulate.wallclock import Large, loss_after, seconds_to, timed

LARGE = Large(parameters=1e9, step_s=3.0, bytes_per_parameter=0.5)
PLAIN = choice("noloco:alpha=0.5:beta=0.7:gamma=0.7")


def test_a_swap_is_as_long_as_its_vector_on_the_link() -> None:
    assert LARGE.swap_s(10) == 400
    assert LARGE.simulated("eager", 10) == "delay=134"
    assert LARGE.simulated("deferred", 1000) == "deferred=2"
    assert LARGE.simulated("blocking", 10) == "blocking"


def test_only_blocking_waits_and_once_a_round() -> None:
    steps = [0, 50, 100]
    assert LARGE.clock("eager", 10, steps) == LARGE.clock("deferred", 10, steps) == [0, 150, 300]
    assert LARGE.clock("blocking", 10, steps) == [0, 550, 1100]


def test_losses_between_points() -> None:
    points = [(0.0, 4.0), (10.0, 2.0), (20.0, 2.5), (30.0, 1.0)]
    assert [loss_after(points, s) for s in (0, 5, 10, 15, 99)] == [4, 3, 2, 2.25, 1]
    assert [seconds_to(points, goal) for goal in (5.0, 3.0, 2.0, 1.75, 0.5)] == [0, 5, 10, 25, math.inf]


def test_each_way_finds_its_curve_and_seeds_are_averaged() -> None:
    def curve(name: str, seed: int, last: float) -> Curve:
        return Curve(name, seed, [0, 50], [0, 1], [5.0, last], [5, last], [0, 0], [0, 1], 1, 0, 1)

    curves = [curve("noloco blocking", 1, 2.0), curve("noloco delay=14", 1, 2.1), curve("noloco blocking", 2, 3.0)]
    ways = {("eager", 100.0): "delay=14", ("blocking", 100.0): "blocking"}
    eager, blocking = timed(curves, ways, LARGE)
    assert (eager.overlap, eager.losses, eager.seconds) == ("eager", [5.0, 2.1], [0, 150])
    assert (blocking.losses, blocking.seconds) == ([5.0, 2.5], [0, 190])


# ---- the plain delayed variant ----
def moved(outer: Outer, seed: int) -> None:
    outer.theta += torch.randn(outer.theta.shape, generator=torch.Generator().manual_seed(seed))


def test_at_once_it_is_the_papers_step_with_half_the_bytes() -> None:
    ones, others = (Outer.start(torch.ones(4, 8)) for _ in range(2))
    paper = PaperNoLoCo(PLAIN.alpha, PLAIN.beta, PLAIN.gamma, 4.0, random.Random(1))
    plain = Deferred(PLAIN, Settings(overlap="deferred=0"), 4.0, random.Random(1))
    for phase in range(5):
        for rule, outer in ((paper, ones), (plain, others)):
            moved(outer, phase)
            rule.boundary(outer)
    assert torch.allclose(ones.theta, others.theta, atol=1e-5) and torch.allclose(ones.delta, others.delta, atol=1e-5)
    assert plain.sent == paper.sent / 2


def test_late_it_keeps_what_was_trained_since() -> None:
    """Steps that are the same whatever the weights: when all has landed, only the moment of landing was different."""
    at_once, late = (Outer.start(torch.ones(4, 8)) for _ in range(2))
    rules = [Deferred(PLAIN, Settings(overlap=f"deferred={steps}"), 4.0, random.Random(1)) for steps in (0, 7)]
    for rule, outer in zip(rules, (at_once, late), strict=True):
        moved(outer, 1)
        rule.boundary(outer)
    before = late.theta.clone()
    rules[1].between(late, 6)
    assert torch.equal(late.theta, before), "not yet"
    for outer in (at_once, late):
        moved(outer, 2)
    rules[1].between(late, 7)
    assert torch.allclose(at_once.theta, late.theta, atol=1e-5) and torch.allclose(at_once.phi, late.phi, atol=1e-5)


def test_a_phase_that_ends_before_it_has_landed_makes_no_step() -> None:
    outer = Outer.start(torch.ones(4, 8))
    rule = Deferred(PLAIN, Settings(overlap="deferred=70"), 4.0, random.Random(1))
    for phase in (1, 2):
        moved(outer, phase)
        rule.boundary(outer)
        assert torch.equal(outer.phi, torch.ones(4, 8))
    rule.between(outer, 19)
    assert torch.equal(outer.phi, torch.ones(4, 8))
    rule.between(outer, 20)
    assert not torch.equal(outer.phi, torch.ones(4, 8)) and rule.sent == 4.0, "70 steps after the first boundary"


# ---- as it is typed ----
def test_a_table_of_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(*QUICK, "--codec", "bf16", "--links", "10,1000", "--overlap", "eager,blocking", "--json") == 0
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


def test_several_overlaps_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(*QUICK, "--algorithms", "noloco", "--overlap", "eager,deferred=1") == 0
    printed = capsys.readouterr().out
    assert "noloco eager" in printed and "noloco deferred=1" in printed


@pytest.mark.parametrize(
    "words",
    [
        ["--links", "0"],
        ["--links", "10", "--overlap", "delay=3"],
        ["--links", "10", "--algorithms", "diloco"],
        ["--links", "10", "--modelled-step", "0"],
        ["--overlap", "eager,lazy"],
    ],
)
def test_what_cannot_be_modelled(words: list[str]) -> None:
    with pytest.raises(UsageError):
        simulated(*QUICK, *words)
