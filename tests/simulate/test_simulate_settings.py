"""What can be typed, the sweep's grid and its summary."""

import math
from types import SimpleNamespace

import pytest

from noloco_node.errors import UsageError
from noloco_node.run.schema import InnerSpec
from noloco_node.simulate import sweep
from noloco_node.simulate.settings import DEFAULTS, Curve, Settings, choice


@pytest.mark.parametrize(
    "text", [*DEFAULTS, "noloco:alpha=0.25:beta=1.25:swaps=2", "diloco:alpha=0.9", "noloco:inner_steps=25"]
)
def test_a_choice_is_written_as_it_is_read(text):
    assert choice(text).label == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nolocco", "did you mean noloco"),
        ("noloco:beat=1", "did you mean beta"),
        ("noloco:beta=x", "must be a number"),
        ("noloco:swaps=1.5", "must be a number"),
        ("noloco:alpha=0.9:gamma=1", "gamma must be above 0 and below 0.38"),
        ("diloco:alpha=5:beta=-3", "alpha must be from 0 to below 1"),
        ("diloco:beta=nan", "beta above 0"),
        ("diloco:alpha=0.9:beta=1.4", "beta must be below 1.36"),
        ("noloco:inner_steps=-2", "inner_steps 0 or more"),
        ("noloco:swaps=0", "swaps must be 1 or more"),
        ("noloco:keep_norm=2", "keep_norm 0 or 1"),
        ("streaming:fragments=0", "fragments must be 1 or more"),
        ("streaming:own=2", "own from 0 to 1"),
        ("sparta:share=0", "share above 0 to 1"),
        ("gasloc:gamma=3", "gamma from 0 to 2"),
        ("diloco:gamma=1", "diloco has no setting 'gamma', it may be alpha, beta or inner_steps"),
    ],
)
def test_what_cannot_be_is_said(text, says):
    with pytest.raises(UsageError, match=says):
        choice(text)


@pytest.mark.parametrize(
    ("overlap", "delay"),
    [("eager", 2), ("blocking", 0), ("delay=7", 7), ("delay=0", 0)],
)
def test_overlap(overlap, delay):
    assert Settings(overlap=overlap).delay(50) == delay


BY_TIME = {"inner": InnerSpec(seconds=5.0)}


@pytest.mark.parametrize(
    "changed", [{"overlap": "lazy"}, {"overlap": "delay=-1"}, {"replicas": 0}, {"rounds": 0}, BY_TIME]
)
def test_settings_refuse(changed):
    with pytest.raises(UsageError):
        Settings(**changed)


def test_the_grid_gives_each_the_same_cells_and_leaves_out_what_diverges():
    cells = sweep.grid([choice("noloco:gamma=1"), choice("diloco"), choice("ddp")], [0.3, 0.9], [0.7, 1.0])
    by_name = {name: [c for c in cells if c.name == name] for name in ("noloco", "diloco", "ddp")}
    assert [len(found) for found in by_name.values()] == [2, 4, 1]
    assert {c.gamma for c in by_name["noloco"]} == {1.0}


@pytest.mark.parametrize(("alphas", "betas"), [([0.9], [1.0]), ([0.1], [-1.0]), ([1.5, 0.9], [1.0])])
def test_a_grid_without_a_stable_cell_is_refused(alphas, betas):
    with pytest.raises(UsageError, match="must be"):
        sweep.grid([choice("diloco"), choice("noloco")], alphas, betas)


def finished(algorithm, seed, loss):
    return Curve(algorithm, seed, [0, 1], [0, 8], [5, loss], [5, loss + 0.1], [0, 0.01], [0, 2], 2, 0, 1)


def test_results_over_seeds_and_the_best_of_each():
    curves = [finished("noloco", 1, 2.0), finished("noloco", 2, 2.2), finished("noloco:beta=1", 1, 1.9)]
    found = sweep.results([*curves, finished("diloco", 1, 1.8)])
    assert (found[0].seeds, found[0].averaged_model_loss) == (2, pytest.approx(2.1))
    assert found[0].averaged_model_loss_sd == pytest.approx(0.02**0.5)
    assert found[1].averaged_model_loss_sd == 0
    assert [result.algorithm for result in sweep.best(found)] == ["diloco", "noloco:beta=1"]


def test_the_best_of_each_way_that_is_compared() -> None:
    losses = {"noloco eager": 1.6, "noloco:alpha=0.1 eager": 1.5, "noloco blocking": 1.7, "noloco:beta=1 blocking": 1.8}
    found = [SimpleNamespace(algorithm=name, averaged_model_loss=loss) for name, loss in losses.items()]
    assert [each.algorithm for each in sweep.best(found)] == ["noloco:alpha=0.1 eager", "noloco blocking"]


def test_a_cell_that_ended_in_nan_is_no_best() -> None:
    losses = {"noloco": 2.0, "streaming:alpha=1": math.nan, "streaming:alpha=0": 1.4}
    found = [SimpleNamespace(algorithm=name, averaged_model_loss=loss) for name, loss in losses.items()]
    assert [(each.algorithm, each.averaged_model_loss) for each in sweep.best(found)] == [
        ("streaming:alpha=0", 1.4),
        ("noloco", 2.0),
    ]
