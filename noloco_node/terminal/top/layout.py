"""Lines that fit a screen: cut with an ellipsis, put side by side, and the screen's rows handed out to its parts.

Widths are cells of a terminal, so that wide characters in somebody's words break nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

GAP = 3
"""Between what stands side by side."""

Paint = Callable[[int, int], list[Text]]
"""Draws itself into a width and a height: as many lines as there are rows or fewer, none of them wider."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the screen, as wide as it is."""

    paint: Paint
    least: int
    most: int
    keep: int
    """The smallest goes first."""
    weight: int = 1
    """How much of the rows that are left it takes."""


def clean(words: str) -> str:
    """On one line, and nothing in it that a terminal would obey."""
    return "".join(mark if mark.isprintable() else " " for mark in words)


def fit(line: Text, width: int) -> Text:
    """A line of exactly this width."""
    if width <= 0:
        return Text()
    fitted = line.copy()
    fitted.truncate(width, overflow="ellipsis", pad=True)
    return fitted


def joined(pieces: Sequence[Text | str], width: int, gap: str = " · ") -> Text:
    """As many pieces as fit, the first ones first; the very first is cut rather than left out."""
    line = Text()
    for piece in pieces:
        longer = Text.assemble(line, (gap, "dim"), piece) if line else Text.assemble(piece)
        if line and longer.cell_len > width:
            break
        line = longer
    return line


def between(left: Text, right: Text, width: int) -> Text:
    """One at each side; where both find no room, the left one."""
    room = width - left.cell_len - right.cell_len
    return fit(Text.assemble(left, " " * room, right), width) if room >= 1 else fit(left, width)


def title(name: str, right: Text | str, width: int) -> Text:
    """A name, a rule, and what is to be said of the part beneath."""
    head = Text.assemble((name, "bold"), " ")
    tail = Text.assemble(" ", right) if right else Text()
    rule = width - head.cell_len - tail.cell_len
    if rule < 1:
        tail, rule = Text(), max(0, width - head.cell_len)
    return fit(Text.assemble(head, ("─" * rule, "dim"), tail), width)


def wrapped(words: Text, width: int, indent: int) -> list[Text]:
    """Broken between words; lines after the first are indented."""
    lines: list[Text] = []
    rest = words
    while rest:  # not its width: some letters have none
        room = max(1, width - (indent if lines else 0))
        line, rest = _broken(rest, room)
        lines.append(Text.assemble(" " * indent, line) if lines else line)
    return lines


def beside(*columns: tuple[Paint, int]) -> Paint:
    """Side by side, their widths as the numbers are to each other."""

    def paint(width: int, height: int) -> list[Text]:
        widths = _widths(width, [share for _, share in columns])
        painted = [draw(w, height) for (draw, _), w in zip(columns, widths, strict=True)]
        rows = max(map(len, painted))
        return [_row([lines[row] if row < len(lines) else Text() for lines in painted], widths) for row in range(rows)]

    return paint


def share_out(parts: Sequence[Part], height: int) -> list[int]:
    """Rows for each part; 0 for one that found no room."""
    given = [part.least for part in parts]
    while sum(given) > height:
        _, goes = min((part.keep, number) for number, part in enumerate(parts) if given[number])
        given[goes] = 0
    for _ in range(height - sum(given)):
        growing = [number for number, part in enumerate(parts) if 0 < given[number] < part.most]
        if not growing:
            break
        given[min(growing, key=lambda number: (given[number] - parts[number].least) / parts[number].weight)] += 1
    return given


def _widths(width: int, shares: Sequence[int]) -> list[int]:
    room = max(0, width - GAP * (len(shares) - 1))
    widths = [room * share // sum(shares) for share in shares]
    return [*widths[:-1], room - sum(widths[:-1])]


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    return Text(" " * GAP).join(fit(cell, width) for cell, width in zip(cells, widths, strict=True))


def _broken(words: Text, room: int) -> tuple[Text, Text]:
    """The first line of it, and the rest."""
    if words.cell_len <= room:
        return words, Text()
    taken = cells = 0
    for mark in words.plain:
        if (cells := cells + cell_len(mark)) > room and taken:
            break
        taken += 1
    space = words.plain.rfind(" ", 1, taken + 1)
    first, rest = words.divide([space if space > 0 else taken])
    rest_from = len(rest.plain) - len(rest.plain.lstrip(" "))
    return first, rest[rest_from:] if rest_from < len(rest) else Text()
