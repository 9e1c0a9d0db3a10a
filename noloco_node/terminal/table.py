"""A table that fits: if the terminal is too narrow, whole columns are left out, the least important first.

Plain aligned columns without a box, so that a pipe or a file gets the same text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
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


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> Table:
    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for i in shown:
        made.add_column(columns[i].title, justify="right" if columns[i].right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(row[i]) for i in shown))  # Text: what a peer sends is never markup
    return made


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
