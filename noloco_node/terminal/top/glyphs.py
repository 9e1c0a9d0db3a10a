"""Curves, bars and gauges of characters, and their replacements for a terminal that has only ASCII.

Colours are the terminal's own sixteen. Shapes differ as well, since there may be no colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from noloco_node.base.states import NodeState

OWN, SWARM, EVAL = "cyan", "magenta", "green"
"""Styles of the curves."""
SWAP, SOLO, TAKEN_BACK = "green", "yellow", "red"
STATES: dict[str, str] = {
    NodeState.TRAINING: "green",
    NodeState.RENDEZVOUS: "green",
    NodeState.FINISHED: "green",
    NodeState.JOINING: "cyan",
    NodeState.STARTING: "cyan",
    NodeState.PAUSED: "yellow",
    NodeState.LEAVING: "yellow",
}
LEVELS = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}

Dot = tuple[int, int]
"""Column and row, from the upper left."""

_ACROSS, _DOWN = 2, 4
"""Dots in a character of braille."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GAP_OF, _GAP_FROM = 6, 2  # a dotted curve shows 2 of every 6 columns of dots


@dataclass(frozen=True, slots=True)
class PlottedCurve:
    points: Sequence[tuple[float, float]]
    """Sorted by x."""
    style: str = ""
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """The range of a plot."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, curves: Sequence[PlottedCurve], settled: float = 0.0) -> "Frame | None":
        """`settled`: the first share of x that does not count for the height. A loss falls so far at its beginning that
        the rest would be one flat line; a curve above the frame enters it from the top."""
        points = [point for curve in curves for point in curve.points]
        if not points:
            return None
        left, right = min(x for x, _ in points), max(x for x, _ in points)
        ys = [y for x, y in points if x >= left + settled * (right - left)]
        return cls(left, right, min(ys), max(ys))

    def dot(self, x: float, y: float, columns: int, rows: int) -> Dot:
        return _scaled(x, self.left, self.right, columns), rows - 1 - _scaled(y, self.low, self.high, rows)


def plot(curves: Sequence[PlottedCurve], frame: Frame, width: int, height: int) -> list[Text]:
    """The curves in braille; where they meet, the later one has the colour."""
    cells: dict[Dot, int] = {}
    styles: dict[Dot, str] = {}
    for curve in curves:
        for column, row in _dots(curve, frame, width * _ACROSS, height * _DOWN):
            cell = column // _ACROSS, row // _DOWN
            cells[cell] = cells.get(cell, 0) | _DOTS[row % _DOWN][column % _ACROSS]
            styles[cell] = curve.style
    lines = [Text() for _ in range(height)]
    for y, line in enumerate(lines):
        for x in range(width):
            bits = cells.get((x, y), 0)
            line.append(chr(_BRAILLE + bits) if bits else " ", styles.get((x, y)))
    return lines


def bars(values: Sequence[float], top: float, height: int, style: str) -> list[Text]:
    """One column per value; any value above 0 is visible."""
    full = height * 8
    levels = [min(full, max(1, round(value / top * full))) if value > 0 < top else 0 for value in values]
    rows = range(height - 1, -1, -1)
    lines = [Text("".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels), style) for row in rows]
    _underline(lines[-1], levels)
    return lines


def gauge(fraction: float, width: int, style: str) -> Text:
    """The full part as a heavy line, the rest as a light one."""
    full = round(min(1.0, max(0.0, fraction)) * width)
    return Text.assemble(("━" * full, style), ("─" * (width - full), "dim"))


def _underline(line: Text, levels: Sequence[int]) -> None:
    """A value of 0 is a low dim mark, to show that it was measured."""
    line.plain = "".join(mark if level else "▁" for mark, level in zip(line.plain, levels, strict=True))
    for place, level in enumerate(levels):
        if not level:
            line.stylize("dim", place, place + 1)


def _dots(curve: PlottedCurve, frame: Frame, columns: int, rows: int) -> set[Dot]:
    """The curve as a connected line: one height per column, with vertical strokes between."""
    heights: dict[int, list[int]] = {}
    for x, y in curve.points:
        column, row = frame.dot(x, y, columns, rows)
        heights.setdefault(column, []).append(row)
    path = _inside([(column, round(sum(all_rows) / len(all_rows))) for column, all_rows in sorted(heights.items())])
    found = set(path)
    for (left, upper), (right, lower) in pairwise(path):
        for column in range(left, right):
            here = upper + (lower - upper) * (column - left) / (right - left)
            there = upper + (lower - upper) * (column + 1 - left) / (right - left)
            ends = sorted((round(here), round(there)))
            found |= {(column, row) for row in range(ends[0], ends[1] + 1)}
    if curve.dotted:
        return {(column, row) for column, row in found if column % _GAP_OF < _GAP_FROM}
    return found


def _inside(path: list[Dot]) -> list[Dot]:
    """Without the beginning that is above the frame."""
    first = next((place for place, (_, row) in enumerate(path) if row > 0), 1)
    return path[max(0, first - 1) :]


def _scaled(value: float, low: float, high: float, steps: int) -> int:
    """The step of `steps` in which a value is; the middle one if the range is empty."""
    if high <= low:
        return steps // 2
    return min(steps - 1, max(0, round((value - low) / (high - low) * (steps - 1))))


_PLAIN = str.maketrans(
    {
        **{chr(_BRAILLE + bits): "*" for bits in range(1, 256)},
        **dict(zip(_EIGHTHS[1:], "_.--==##", strict=True)),
        **dict(zip("─━│┤└╌┄", "-=||`..", strict=True)),
        **dict(zip("●○×•·…≤", "*ox+-~<", strict=True)),
    }
)


def in_ascii(text: str) -> str:
    """Of the same width."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
