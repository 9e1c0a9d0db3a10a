"""The modelled clock of a large run, and the plain delayed outer step that it compares with."""

import json
import math

import pytest
import torch
from test_simulate_command import QUICK, simulated

from noloco_node.errors import UsageError
from noloco_node.simulate.baselines import Algorithm, Outer
from noloco_node.simulate.noloco import algorithm
from noloco_node.simulate.settings import Curve, Settings, choice
from noloco_node.simulate.wallclock import Large, loss_after, seconds_to, timed

LARGE = Large(parameters=1e9, step_s=3.0, bytes_per_parameter=0.5)


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


def rule(overlap: str, text: str = "noloco", codec: str = "fp32") -> Algorithm:
    return algorithm(choice(text), Settings(overlap=overlap, codec=codec, replicas=4), {"a": torch.Size((512,))})


def start() -> Outer:
    return Outer.start(torch.ones(4, 512))


@pytest.mark.parametrize("text", ["noloco", "noloco:keep_norm=0", "noloco:swaps=3"])
def test_at_once_it_is_the_blocking_step_with_all_that_belongs_to_it(text: str) -> None:
    blocking, deferred = rule("blocking", text), rule("deferred=0", text)
    ones, others = start(), start()
    for phase in range(5):
        for each, outer in ((blocking, ones), (deferred, others)):
            moved(outer, phase)
            each.boundary(outer)
    for name in ("theta", "phi", "delta"):
        torch.testing.assert_close(getattr(others, name), getattr(ones, name), rtol=1e-4, atol=1e-5)
    assert deferred.sent == blocking.sent > 0


def test_its_vectors_go_through_the_codec() -> None:
    blocking, deferred = rule("blocking", codec="lattice:4"), rule("deferred=0", codec="lattice:4")
    ones, others = start(), start()
    for each, outer in ((blocking, ones), (deferred, others)):
        moved(outer, 1)
        each.boundary(outer)
    assert torch.equal(ones.phi, others.phi)
    assert deferred.sent == blocking.sent
    assert deferred.stats == blocking.stats
    assert deferred.stats.relative_error > 0.01


def test_late_it_keeps_what_was_trained_since() -> None:
    """Steps that are the same whatever the weights: in the end, only the moment of the corrections was different."""
    outers = at_once, late = start(), start()
    rules = rule("deferred=0"), rule("deferred=7")
    for each, outer in zip(rules, outers, strict=True):
        moved(outer, 1)
        each.boundary(outer)
    before = late.theta.clone()
    rules[1].between(late, 6)
    assert torch.equal(late.theta, before), "not yet"
    for outer in outers:
        moved(outer, 2)
    rules[1].between(late, 7)
    torch.testing.assert_close(late.theta, at_once.theta, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(late.phi, at_once.phi, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("overlap", "text"), [("deferred=70", "noloco"), ("deferred=35", "noloco:swaps=2")])
def test_a_phase_that_ends_with_pending_corrections_makes_no_outer_step(overlap: str, text: str) -> None:
    outer, untouched = start(), start().phi
    late = rule(overlap, text)
    for phase in (1, 2):
        moved(outer, phase)
        late.boundary(outer)
        assert torch.equal(outer.phi, untouched)
    sent = late.sent
    late.between(outer, 19)
    assert torch.equal(outer.phi, untouched)
    late.between(outer, 20)
    assert not torch.equal(outer.phi, untouched), "70 steps after the first boundary"
    assert late.sent == sent == (8 if "swaps" in text else 4)


def test_what_is_late_at_the_end_is_applied() -> None:
    at_once, late = start(), start()
    for each, outer in ((rule("deferred=0"), at_once), (rule("deferred=7"), late)):
        moved(outer, 1)
        each.boundary(outer)
        each.finish(outer)
    assert torch.equal(late.phi, at_once.phi)


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
        ["--links", "nan"],
        ["--links", "10", "--plot", "out.png"],
        ["--overlap", "eager,lazy"],
    ],
)
def test_what_cannot_be_modelled(words: list[str]) -> None:
    with pytest.raises(UsageError):
        simulated(*QUICK, *words)
