"""`bench exchange`: how fast two nodes on this machine swap bytes, beside the layers below alone."""

import argparse
from functools import partial

from noloco_node.cli.bench.output import Cells, draw, measured, shared, show
from noloco_node.cli.options import Verbs, option, verb, whole_number

ABOUT = """\
How fast two processes on this machine swap bytes, both ways at once: by a
node's swap without its codec, by gRPC over libp2p, by a stream of libp2p's
alone, and by gRPC alone. Takes a minute and 1.5 GB of memory; `--quick` half of
it.
"""
SIZE, QUICK_SIZE = 512, 64
"""MiB."""


def options(what: Verbs) -> None:
    parser = verb(what, "exchange", "the exchange path beside its layers, on loopback", "--quick", ABOUT)
    add = partial(option, parser)
    add("--mib N", f"what each end sends (default: {SIZE})")
    add("--repeats N", "timed turns (default: 5; with --quick 1)")
    shared(parser, f"{QUICK_SIZE} MiB, once")


def run(args: argparse.Namespace) -> int:
    size = whole_number(args.mib or str(QUICK_SIZE if args.quick else SIZE), "--mib", 99_999)
    repeats = whole_number(args.repeats or ("1" if args.quick else "5"), "--repeats", 100)
    from noloco_node.bench import exchange

    pieces = (size << 20) // exchange.PAYLOAD_BYTES
    rows = measured(lambda say: exchange.run(pieces, repeats, say), partial(show, args, CELLS))
    return draw(args, "The exchange path", [f"{size} MiB each way", "loopback"], exchange.panels(rows))


CELLS: Cells = {
    "system": lambda row: row.system,
    "MB/s each way": lambda row: f"{row.more['mb_s']:.0f}",
    "of libp2p's": lambda row: f"{row.more['of_raw']:.2f}",
    "CPU s per GB": lambda row: f"{row.more['cpu_s_per_gb']:.1f}",
    "seconds": lambda row: f"{row.seconds:.2f}",
    "from - to": lambda row: f"{row.fastest_s:.2f} - {row.slowest_s:.2f}",
    "runs": lambda row: str(row.runs),
}
