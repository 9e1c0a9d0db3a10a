"""A table that fits: if the terminal is too narrow, whole columns are left out, the least important first.

Plain aligned columns without a box, so that a pipe or a file gets the same text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    keep: int = 0
    """The smallest is left out first; 0: never."""
    right: bool = False
    """Align right, as numbers."""


def columns_of(words: str) -> tuple[Column, ...]:
    """`peer, >round, >tokens/s 7`: by their titles; `>` is right-aligned, a number is `keep`."""
    found = (re.fullmatch(r"(>?)(.+?)(?: (\d+))?", word) for word in words.split(", "))
    return tuple(Column(each[2], int(each[3] or 0), bool(each[1])) for each in found if each)


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The indices of the columns that fit into `width`."""
    widths = [max(len(text) for text in texts) for texts in zip([c.title for c in columns], *rows, strict=True)]
    shown = list(range(len(columns)))
    while sum(widths[i] + GAP for i in shown) > width:
        droppable = [i for i in shown if columns[i].keep]
        if not droppable:
            break
        shown.remove(min(droppable, key=lambda i: columns[i].keep))
    return shown


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    shown: Sequence[int],
    style: Callable[[Column, str], str] = lambda *_: "",
) -> list[Text]:
    """A line of titles, and one for each row. What a peer sends is never markup."""
    widths = {i: max(len(text) for text in (columns[i].title, *(row[i] for row in rows))) for i in shown}

    def line(texts: Sequence[str], styles: Sequence[str]) -> Text:
        cells = ((texts[i].rjust if columns[i].right else texts[i].ljust)(widths[i]) for i in shown)
        pieces = (Text(cell, styles[i]) for cell, i in zip(cells, shown, strict=True))
        return Text(" " * GAP, no_wrap=True, overflow="ellipsis").join(pieces)

    titles = line([column.title for column in columns], ["dim"] * len(columns))
    return [titles, *(line(row, [style(*cell) for cell in zip(columns, row, strict=True)]) for row in rows)]


def fill(pieces: Sequence[str], width: int) -> str:
    """Pieces joined by dots, with line breaks only between pieces; lines after the first are indented."""
    lines = [""]
    for piece in pieces:
        longer = f"{lines[-1]} · {piece}" if lines[-1].strip() else f"{lines[-1]}{piece}"
        if len(longer) > width and lines[-1].strip():
            lines.append(f"  {piece}")
        else:
            lines[-1] = longer
    return "\n".join(lines)
