"""`bench averaging`: hivemind's own benchmark of averaging, and ours in the same shape."""

import argparse

from noloco_node.cli.bench import output
from noloco_node.cli.bench.output import Verbs
from noloco_node.errors import UsageError

ABOUT = """\
16 peers on this machine average 2.4 M parameters, five times: hivemind's in
groups of 4, ours in pairs. How many of the attempts succeed within 15 s, and how
long they take. Needs 8 GB of memory, and takes 4 minutes; `--quick` has four
peers and one round, and takes one.
"""


def options(what: Verbs) -> None:
    parser = what.add_parser("averaging", help="who finds a partner, and how soon: 16 peers", description=ABOUT)
    parser.add_argument("--peers", metavar="N", default="16", help="a multiple of 4 (default: 16)")
    parser.add_argument("--rounds", metavar="N", default="5", help="attempts of each peer (default: 5)")
    output.shared(parser, "4 peers, one round", plot=False)


def run(args: argparse.Namespace) -> int:
    (peers,), (rounds,) = output.numbers(args.peers, "--peers", 64, 4), output.numbers(args.rounds, "--rounds", 1000)
    if peers % 4:
        raise UsageError(f"--peers takes a multiple of 4, for hivemind's groups, not {peers}")
    from noloco_node.bench import averaging
    from noloco_node.terminal.progress import Progress

    with Progress() as say:
        rows = list(averaging.run(4 if args.quick else peers, 1 if args.quick else rounds, say))
    return output.finish(args, rows, CELLS)


CELLS: output.Cells = {
    "system": lambda row: row.system,
    "success": lambda row: f"{row.more['success']:.0%} of {row.more['attempts']}",
    "seconds": lambda row: f"{row.seconds:.2f}",
    "from - to": lambda row: f"{row.fastest_s:.2f} - {row.slowest_s:.2f}",
    "CPU s": lambda row: f"{row.cpu_seconds:.2f}",
}
