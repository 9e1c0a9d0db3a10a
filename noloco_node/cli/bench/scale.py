"""`bench scale`: what a node takes for a round, by the number of nodes."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from noloco_node.base.plots import Line, Panel
from noloco_node.base.units import size
from noloco_node.cli.bench.output import Cells, draw, measured, numbers, shared, show
from noloco_node.cli.options import Verbs, option, verb

if TYPE_CHECKING:
    from noloco_node.bench.rows import Row
    from noloco_node.terminal.progress import Progress

ABOUT = """\
Bytes, calls, directory operations, CPU and memory of a node and round, by the
number of nodes. The real ones need root, `ip` and `tc`, half a GB of memory for
each, and about 15 minutes on two cores; `--quick` takes 3, and `--real 0` needs
nothing but 6 minutes.
"""
MOST_REAL, MOST_VIRTUAL = 32, 16_384


def options(what: Verbs) -> None:
    scale = verb(what, "scale", "what a node takes for a round, by the number of nodes", "--real 0", ABOUT)
    add = partial(option, scale)
    add("--real LIST", "numbers of real nodes, 0 for none (default: 2,4,8,16; with --quick 2,4)")
    add("--virtual LIST", "of nodes in virtual time, 0 for none (default: 64,256,1024,4096)")
    shared(scale, "2 and 4 real nodes for 2 short rounds; 64 and 256 in virtual time")


def run(args: argparse.Namespace) -> int:
    from noloco_node.bench import scale

    some = (scale.QUICK_REAL, scale.QUICK_VIRTUAL) if args.quick else (scale.REAL, scale.VIRTUAL)
    real = _counts(args.real, "--real", MOST_REAL, some[0])
    virtual = _counts(args.virtual, "--virtual", MOST_VIRTUAL, some[1])

    def rows_of(say: "Progress") -> "Iterator[Row]":
        if real:  # these need root
            yield from scale.real(real, args.quick, say)
        yield from scale.virtual(virtual, say)

    rows = measured(rows_of, partial(show, args, _CELLS))
    return draw(args, "What a node takes for a round", _settings(rows), _panels(rows))


def _counts(given: str | None, flag: str, most: int, usual: tuple[int, ...]) -> list[int]:
    if given is None:
        return list(usual)
    return [] if given == "0" else numbers(given, flag, most, 2)


def _settings(rows: "list[Row]") -> list[str]:
    sizes = {
        row.system: f"{row.system}: {row.params / 1e6:.1f} M parameters, rounds of {row.seconds:g} s" for row in rows
    }
    return list(sizes.values())


def _panels(rows: "list[Row]") -> list[Panel]:
    from noloco_node.bench.rows import lines

    operations = [
        Line(f"{line.label}: {what.replace('_', '-')}", line.x, line.y)
        for what in ("look_ups", "stores", "calls")
        for line in lines(rows, "n", what)
    ]
    sent = lines(rows, "n", "bytes_per_node")
    return [
        Panel("Bytes of a node and round", "nodes", "bytes", sent, x_log=True, from_zero=True),
        Panel("Operations of a node and round", "nodes", "operations", operations, x_log=True, from_zero=True),
    ]


def _more(name: str, digits: int = 1) -> Any:
    return lambda row: f"{row.more[name]:.{digits}f}" if name in row.more else ""


def _size(name: str) -> Any:
    return lambda row: size(row.document()[name]) if row.document().get(name) else ""


_CELLS: Cells = {
    "system": lambda row: row.system,
    "nodes": lambda row: str(row.n),
    "sent": _size("bytes_per_node"),
    "of swaps": _size("swap_bytes"),
    "calls": _more("calls", 2),
    "look-ups": _more("look_ups"),
    "stores": _more("stores"),
    "DHT calls": _more("dht_calls"),
    "committed": _more("committed_share", 2),
    "CPU s": lambda row: f"{row.cpu_seconds:.2f}" if row.cpu_seconds else "",
    "memory": _size("memory_bytes"),
    "busy": _more("busy_fraction", 3),
}
