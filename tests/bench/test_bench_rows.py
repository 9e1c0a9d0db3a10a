"""The rows of a bench beside its rivals: what they say, as a table, as JSON, and as lines of a plot."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from noloco_node.bench.rows import Row, Run, lines
from noloco_node.cli.bench import output
from noloco_node.errors import NolocoError, UsageError


def row(system: str, n: int, *seconds: float) -> Row:
    runs = [Run(each, 10.0, 0.5) for each in seconds]
    return Row.of(runs, bench="sync", system=system, n=n, params=7, mbit=50, more={"share": n / 10})


def test_a_row_is_the_median_of_its_runs_with_their_spread() -> None:
    document = row("ours", 2, 5.0, 1.0, 2.0).document()
    assert document == {
        "bench": "sync",
        "system": "ours",
        "n": 2,
        "params": 7,
        "mbit": 50,
        "seconds": 2.0,
        "fastest_s": 1.0,
        "slowest_s": 5.0,
        "runs": 3,
        "bytes_per_node": 10.0,
        "cpu_seconds": 0.5,
        "share": 0.2,
    }


def test_a_line_for_each_system_in_the_order_of_x() -> None:
    found = lines([row("ours", 4, 2.0), row("gloo", 2, 7.0), row("ours", 2, 1.0)], "n", "seconds")
    assert [(line.label, list(line.x), list(line.y)) for line in found] == [
        ("ours", [2, 4], [1.0, 2.0]),
        ("gloo", [2], [7.0]),
    ]


def test_rows_are_printed_and_given_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("ours", 2, 1.0), row("ours", 4, 2.0)]
    cells = {"system": lambda row: row.system, "seconds": lambda row: f"{row.seconds:.1f}"}
    args = argparse.Namespace(what="sync", quick=True, json=False, plot=None)
    output.show(args, cells, rows)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["system", "seconds"],
        ["ours", "1.0"],
        ["ours", "2.0"],
    ]
    args.json = True
    output.show(args, cells, rows, load=1.5)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema": 1,
        "bench": "sync",
        "quick": True,
        "load": 1.5,
        "rows": [row.document() for row in rows],
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NolocoError("a worker failed")])
@pytest.mark.parametrize("before", [0, 2])
def test_rows_before_a_failure_are_printed(
    error: BaseException, before: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> Iterator[Row]:
        yield from [row("ours", 2, 1.0)] * before
        raise error

    args = argparse.Namespace(what="sync", quick=False, json=True, plot=None)
    with pytest.raises(type(error)):
        output.measured(run, partial(output.show, args, {}))
    out = capsys.readouterr().out
    assert [each["system"] for each in json.loads(out)["rows"]] == ["ours"] * before if before else not out


def test_lists_are_checked() -> None:
    assert output.numbers("2,4", "--n", 16) == [2, 4]
    assert output.names(None, "--systems", ["a", "b"]) == ["a", "b"]
    with pytest.raises(UsageError, match="--n must be a whole number from 1 to 16, not '17'"):
        output.numbers("2,17", "--n", 16)
    with pytest.raises(UsageError, match="--systems takes some of a, b, not 'c'"):
        output.names("a,c", "--systems", ["a", "b"])
