"""What the benches beside rivals share: options, and the rows as a table, as JSON and as a plot."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_node.base import plots
from noloco_node.cli.options import as_json, gathered, option, print_json, whole_number
from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.bench.rows import Row
    from noloco_node.terminal.progress import Progress

R = TypeVar("R")

Cells = Mapping[str, Callable[["Row"], str]]
"""The titles of a table's columns, and what stands in each."""


def shared(parser: argparse.ArgumentParser, quick: str) -> None:
    """`quick`: what `--quick` measures."""
    add = partial(option, parser)
    add("--quick", quick)
    add("--plot out.png", "draw the results (needs matplotlib)", type=Path)
    as_json(parser)


def numbers(text: str, flag: str, most: int, least: int = 1) -> list[int]:
    """`2,4,8`."""
    return [whole_number(each, flag, most, least) for each in text.split(",")]


def names(text: str | None, flag: str, known: Sequence[str]) -> list[str]:
    """Some of the known ones; all where nothing is given."""
    wanted = text.split(",") if text else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"{flag} takes some of {', '.join(known)}, not {unknown[0]!r}")
    return wanted


def measured(run: "Callable[[Progress], Iterable[R]]", show: Callable[[list[R]], None]) -> list[R]:
    """All rows of a bench, or those before a failure, shown when the line of progress is gone."""
    from noloco_node.terminal.progress import Progress

    def rows() -> Iterator[R]:
        with Progress() as say:
            yield from run(say)

    return gathered(rows(), show)


def show(args: argparse.Namespace, cells: Cells, rows: "Sequence[Row]", **more: Any) -> None:
    """As a table or as JSON. `more`: further fields of the JSON."""
    if args.json:
        print_json({"bench": args.what, "quick": args.quick, **more, "rows": [row.document() for row in rows]})
    else:
        print_table(rows, cells)


def draw(args: argparse.Namespace, title: str, settings: Sequence[str], panels: Sequence[plots.Panel]) -> int:
    """Where that is wanted. Returns the exit code."""
    if panels and args.plot is not None:
        plots.draw(args.plot, title, settings, panels)
    return 0


def print_table(rows: Sequence[Any], cells: Mapping[str, Callable[[Any], str]]) -> None:
    """Where the terminal is too narrow, the last columns are left out first, and the first three stay."""
    from rich.console import Group

    from noloco_node.terminal.table import Column, fitting, table
    from noloco_node.terminal.text import console

    columns = [Column(heading, 0 if at < 3 else len(cells) - at, right=at > 0) for at, heading in enumerate(cells)]
    texts = [[cell(row) for cell in cells.values()] for row in rows]
    out = console()
    out.print(Group(*table(columns, texts, fitting(columns, texts, out.width))))
