"""Pictures: nothing covers anything else, and lines are told apart without colour."""

import colorsys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.colors import to_rgb

from noloco_node.base import plots
from noloco_node.base.plots import Line, Panel

NAMES = [f"noloco:alpha=0.{i}:beta=1.3:swaps=3" for i in range(12)]
SETTINGS = ["8 replicas", "12 phases of 50 steps", "1024 tokens a step and replica", "lattice:4", "seeds 1, 2, 3"] * 3


def panel(names: list[str], **scales: bool) -> Panel:
    lines = [Line(name, [1, 10, 100], [3 + i, 2 + i / 2, 1.5]) for i, name in enumerate(names)]
    return Panel("Loss by tokens", "million tokens, all replicas", "held-out loss", lines, **scales)


@pytest.mark.parametrize(("names", "panels"), [(NAMES[:1], 1), (NAMES[:3], 2), (NAMES, 3)])
def test_title_settings_panels_and_legend_stand_apart(names, panels):
    with mpl.rc_context(plots.STYLE):
        figure = plots.figure("Held-out loss by algorithm", SETTINGS, [panel(names, x_log=True)] * panels)
        figure.draw_without_rendering()
    page = figure.bbox
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    boxes = [text.get_window_extent() for text in figure.texts]
    boxes += [axes.get_tightbbox() for axes in figure.axes]
    boxes.append(legend.get_window_extent())
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, i
        assert not any(box.overlaps(other) for other in boxes[i + 1 :]), i


def test_lines_that_stand_together_differ_in_dashes_marker_and_brightness():
    with mpl.rc_context(plots.STYLE):
        figure = plots.figure("Loss", [], [panel(NAMES)] * 2)
    first, second = ([*axes.lines] for axes in figure.axes)
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in first}) == len(NAMES)
    assert [line.get_color() for line in first] == [line.get_color() for line in second]
    for one, other in pairwise(first):
        assert one.get_marker() != other.get_marker()
        bright = [colorsys.rgb_to_yiq(*to_rgb(line.get_color()))[0] for line in (one, other)]
        assert abs(bright[0] - bright[1]) > 0.1


def test_a_line_without_a_point_and_one_that_is_not_finite_are_drawn(tmp_path: Path):
    lines = [Line("ddp", [], []), Line("noloco", [1, 2, 3], [1.0, float("nan"), float("inf")])]
    plots.draw(tmp_path / "a.svg", "Loss", ["one seed"], [Panel("Loss", "x", "y", lines, True, True)])
    assert b"</svg>" in (tmp_path / "a.svg").read_bytes()
