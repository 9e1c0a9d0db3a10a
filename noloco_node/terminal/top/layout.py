"""Lines that fit a screen: cut with an ellipsis, put side by side, and the screen's rows divided between its parts.

Widths are cells of a terminal, so wide characters keep the columns aligned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

GAP = 3
"""Columns between parts that are side by side."""
_CONSOLE = Console()
"""Which rich asks for, and does not use here."""

Paint = Callable[[int, int], list[Text]]
"""Draws into a width and a height: at most `height` lines, none wider than `width`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of the screen, over its whole width."""

    paint: Paint
    least: int
    most: int
    keep: int
    """The smallest is left out first."""
    weight: int = 1
    """Its share of the remaining rows."""


def clean(words: str) -> str:
    """On one line, without control characters."""
    return "".join(mark if mark.isprintable() else " " for mark in words)


def fit(line: Text, width: int) -> Text:
    """A line of exactly this width."""
    if width <= 0:
        return Text()
    fitted = line.copy()
    fitted.truncate(width, overflow="ellipsis", pad=True)
    return fitted


def joined(pieces: Sequence[Text | str], width: int, gap: str = " · ") -> Text:
    """As many of the first pieces as fit; the very first is cut if necessary."""
    line = Text()
    for piece in pieces:
        longer = Text.assemble(line, (gap, "dim"), piece) if line else Text.assemble(piece)
        if line and longer.cell_len > width:
            break
        line = longer
    return line


def between(left: Text, right: Text, width: int) -> Text:
    """One at each side; only the left one if both do not fit."""
    room = width - left.cell_len - right.cell_len
    return fit(Text.assemble(left, " " * room, right), width) if room >= 1 else fit(left, width)


def title(name: str, right: Text | str, width: int) -> Text:
    """A name, a rule, and a remark on the right."""
    head = Text.assemble((name, "bold"), " ")
    tail = Text.assemble(" ", right) if right else Text()
    rule = width - head.cell_len - tail.cell_len
    if rule < 1:
        tail, rule = Text(), max(0, width - head.cell_len)
    return fit(Text.assemble(head, ("─" * rule, "dim"), tail), width)


def wrapped(words: Text, width: int, indent: int) -> list[Text]:
    """Broken between words; lines after the first are indented."""
    lines = words.wrap(_CONSOLE, max(1, width - indent), overflow="fold") if words else ()
    return [Text.assemble(" " * indent if number else "", line) for number, line in enumerate(lines)]


def beside(*columns: tuple[Paint, int]) -> Paint:
    """Side by side, with widths in proportion to the numbers."""

    def paint(width: int, height: int) -> list[Text]:
        widths = _widths(width, [share for _, share in columns])
        painted = [draw(w, height) for (draw, _), w in zip(columns, widths, strict=True)]
        rows = max(map(len, painted))
        return [_row([lines[row] if row < len(lines) else Text() for lines in painted], widths) for row in range(rows)]

    return paint


def share_out(parts: Sequence[Part], height: int) -> list[int]:
    """Rows for each part; 0 for one that is left out."""
    rows = [part.least for part in parts]
    while sum(rows) > height:
        _, left_out = min((part.keep, number) for number, part in enumerate(parts) if rows[number])
        rows[left_out] = 0
    for _ in range(height - sum(rows)):
        growing = [number for number, part in enumerate(parts) if 0 < rows[number] < part.most]
        if not growing:
            break
        rows[min(growing, key=lambda number: (rows[number] - parts[number].least) / parts[number].weight)] += 1
    return rows


def _widths(width: int, shares: Sequence[int]) -> list[int]:
    room = max(0, width - GAP * (len(shares) - 1))
    widths = [room * share // sum(shares) for share in shares]
    return [*widths[:-1], room - sum(widths[:-1])]


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    return Text(" " * GAP).join(fit(cell, width) for cell, width in zip(cells, widths, strict=True))
