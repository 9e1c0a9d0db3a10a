"""Pictures in one style, drawn with matplotlib (the extra `plot`): a title, the settings under it, panels side by side,
and one legend below them.

Lines differ in colour, dashes and markers at once: each alone tells them apart, for the colour-blind and in grey.
"""

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_node.base.atomic_files import require_known, writing
from noloco_node.base.extras import pip_install
from noloco_node.base.validation import listed
from noloco_node.errors import UsageError

# Okabe and Ito's colours without the yellow, which is lost on white; neighbours differ in brightness.
_COLOURS = ("#000000", "#e69f00", "#0072b2", "#cc79a7", "#009e73", "#56b4e9", "#d55e00")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
STYLE = {
    "font.family": "DejaVu Sans",  # matplotlib brings it
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.edgecolor": "#606060",
    "grid.color": "#e2e2e2",
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "savefig.dpi": 110,
}
# In inches. Titles and the legend stand in bands of their own, so they never cover a panel.
_PANEL = (4.4, 3.3)
_MARGIN = 0.12
_TITLE, _SETTINGS_LINE, _LEGEND_ROW = 0.36, 0.17, 0.2
_CHARACTER = 0.062
"""The mean width of a character of the settings and of the legend, and a bit more."""
_HANDLE = 0.62
"""A legend's line sample, with the gaps around it."""
_ELSEWHERE = "name another file with --plot"
_FEW = 15
"""Points of a line that each have a marker; on longer ones they stand apart by an eighth of the panel's diagonal, and
where lines coincide each shows its own."""


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    """Lines with the same label look alike, in all panels, and stand in the legend once."""
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False
    from_zero: bool = False


def check(path: Path) -> None:
    """Raises UsageError if no picture can be drawn there. Called before minutes of work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(f"--plot needs matplotlib: {pip_install('plot')}") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise UsageError(
            f"--plot takes a name that ends in {listed([f'.{kind}' for kind in kinds])}, not {path.name!r}"
        )
    with writing(path, _ELSEWHERE):
        require_known(path)
        is_writable = os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()
    if not is_writable:
        raise UsageError(f"--plot cannot write {path}: name a file in a folder that exists and is yours")


def draw(path: Path, title: str, settings: Sequence[str], panels: Sequence[Panel]) -> None:
    """`settings`: in a few words each, as `8 replicas`. Raises DiskFull, UsageError."""
    import matplotlib as mpl

    with mpl.rc_context(mpl.rcParamsDefault | STYLE), writing(path, _ELSEWHERE):
        figure(title, settings, panels).savefig(path)


def figure(title: str, settings: Sequence[str], panels: Sequence[Panel]) -> Any:
    """Made without pyplot, which would look for a display and keep state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    width = _PANEL[0] * len(panels)
    across = width - 2 * _MARGIN
    columns = max(1, min(len(labels), int(across / (_HANDLE + _CHARACTER * max(map(len, labels))))))
    words = _wrapped(settings, int(across / _CHARACTER))
    above = _TITLE + _SETTINGS_LINE * len(words) + _MARGIN
    below = _LEGEND_ROW * -(-len(labels) // columns) + _MARGIN
    height = above + _PANEL[1] + below

    made = Figure(figsize=(width, height))
    FigureCanvasAgg(made)
    made.set_layout_engine("constrained", rect=(0, below / height, 1, 1 - (above + below) / height))
    left = _MARGIN / width
    made.text(left, 1 - _MARGIN / height, title, fontsize=12, fontweight="bold", va="top")
    made.text(left, 1 - _TITLE / height, "\n".join(words), fontsize=8, color="#505050", va="top", linespacing=1.35)
    styles = {label: _style(number) for number, label in enumerate(labels)}
    handles: dict[str, Any] = {}
    for axes, panel in zip(made.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _fill(axes, panel, styles, handles)
    made.legend(
        [handles[label] for label in labels],
        labels,
        loc="lower left",
        bbox_to_anchor=(left, 0),
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=3.2,
        borderpad=0.3,
        borderaxespad=0.2,
    )
    return made


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }


def _fill(axes: Any, panel: Panel, styles: dict[str, dict[str, Any]], handles: dict[str, Any]) -> None:
    for line in panel.lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if _shown(x, panel.x_log, y, panel.y_log)]
        every = None if not points else 1 if len(points) <= _FEW else (0.025 * (len(handles) % 5), 0.125)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        (drawn,) = axes.plot(xs, ys, markevery=every, **styles[line.label])
        handles.setdefault(line.label, drawn)
    axes.locator_params(nbins=6)  # before a scale is logarithmic: labels of many digits would overlap
    there = any(len(line.get_xdata()) for line in axes.lines)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.x_log and there:
        axes.set_xscale("log")
    if panel.y_log and there:
        axes.set_yscale("log")
    if panel.from_zero:
        axes.set_ylim(0, None)


def _shown(x: float, x_log: bool, y: float, y_log: bool) -> bool:
    """A logarithmic axis has no place for 0."""
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not x_log) and (y > 0 or not y_log)


def _wrapped(pieces: Sequence[str], width: int) -> list[str]:
    """Joined by dots, with line breaks only between pieces."""
    solid = [piece.replace(" ", "\N{NO-BREAK SPACE}") for piece in pieces]
    lines = textwrap.wrap("\N{NO-BREAK SPACE}· ".join(solid), width, break_long_words=False, break_on_hyphens=False)
    return [line.rstrip("\N{NO-BREAK SPACE}·") for line in lines]
