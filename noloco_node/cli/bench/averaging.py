"""`bench averaging`: peers that find their partners themselves, ours and hivemind's."""

import argparse
from functools import partial

from noloco_node.cli.bench.output import Cells, draw, measured, names, numbers, shared, show
from noloco_node.cli.options import Verbs, option, verb, whole_number

ABOUT = """\
Rounds of N peers that find one another themselves, without training: ours,
which average with one partner, and hivemind's, in groups of four, with the
settings of hivemind's own benchmark of averaging. Each has a network namespace
of its own behind a link that is held at a rate, so this needs root, `ip` and
`tc`. It needs 0.4 GB of memory for each of our peers, 1 GB for each of
hivemind's, and ten minutes on two cores; `--quick` takes one.
"""


def options(what: Verbs) -> None:
    text = "rounds of peers that find one another, beside hivemind's"
    parser = verb(what, "averaging", text, "--quick", ABOUT)
    add = partial(option, parser)
    add("--n LIST", "peers (default: 16; with --quick 4)")
    add("--rounds N", "of each peer (default: 5; with --quick 2)")
    add("--mbit N", "rate of the links, up and down (default: 100)", default="100")
    add("--systems LIST", "only these, as 'noloco lattice:3' (default: all)")
    shared(parser, "4 peers, 2 rounds")


def run(args: argparse.Namespace) -> int:
    ns = numbers(args.n or ("4" if args.quick else "16"), "--n", 64, 2)
    rounds = whole_number(args.rounds or ("2" if args.quick else "5"), "--rounds", 1000)
    mbit = whole_number(args.mbit, "--mbit", 99_999)
    from noloco_node.bench import averaging, links

    wanted = names(args.systems, "--systems", [system.name for system in averaging.SYSTEMS])
    links.require()
    systems = [system for system in averaging.SYSTEMS if system.name in wanted]
    rows = measured(lambda say: averaging.run(ns, systems, mbit, rounds, say), partial(show, args, CELLS))
    return draw(args, "Averaging", [f"{rounds} rounds", f"{mbit} Mbit/s"], averaging.panels(rows))


CELLS: Cells = {
    "system": lambda row: row.system,
    "peers": lambda row: str(row.n),
    "found somebody": lambda row: f"{row.more['succeeded']:.0%}",
    "s a round": lambda row: f"{row.seconds:.2f}",
    "from - to": lambda row: f"{row.fastest_s:.2f} - {row.slowest_s:.2f}",
    "MB sent": lambda row: f"{row.bytes_per_node / 1e6:.2f}",
    "CPU s": lambda row: f"{row.cpu_seconds:.2f}",
    "spread left": lambda row: f"{row.more['spread_left']:.2g}",
}
