"""`bench sync`: what an averaging step costs, ours and others', behind links of a known rate."""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from noloco_node.base.extras import pip_install
from noloco_node.cli.bench.output import Cells, draw, measured, names, numbers, shared, show
from noloco_node.cli.options import Verbs, option, verb, whole_number
from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.bench.rows import Row
    from noloco_node.terminal.progress import Progress

ABOUT = """\
One averaging step of P parameters among N processes. Each has a network
namespace of its own behind a link that is held at a rate, so this needs root,
`ip` and `tc`. It needs 1 GB of memory for each process with 100 M parameters
(hivemind 2 GB), and about an hour for all settings: most of it is rivals that
wait for their links. `--quick` takes a minute.
"""


def options(what: Verbs) -> None:
    parser = verb(what, "sync", "an averaging step behind slow links, beside all-reduces", "--quick", ABOUT)
    add = partial(option, parser)
    add("--n LIST", "processes, even numbers (default: 2,4,8)")
    add("--params LIST", "parameters (default: 10000000,100000000)")
    add("--mbit LIST", "rates of the links, up and down (default: 50,500)")
    add("--systems LIST", "only these, as 'noloco lattice:4,gloo fp32' (default: all)")
    add("--repeats N", "timed steps; a rival's that takes 20 s is done once (default: 5)")
    add("--seed N", "of the pairs (default: 1)", default="1")
    shared(parser, "N 2, 1 M parameters, 50 Mbit/s, once, where nothing else is given")


def run(args: argparse.Namespace) -> int:
    usual = ("2", "1000000", "50", "1") if args.quick else ("2,4,8", "10000000,100000000", "50,500", "5")
    given = args.n, args.params, args.mbit, args.repeats
    n_list, params_list, mbit_list, times = (text or default for text, default in zip(given, usual, strict=True))
    ns, params = numbers(n_list, "--n", 64), numbers(params_list, "--params", 999_999_999)
    mbits, repeats = numbers(mbit_list, "--mbit", 99_999), whole_number(times, "--repeats", 100)
    if odd := [n for n in ns if n % 2]:
        raise UsageError(f"--n takes even numbers, since nodes swap in pairs, not {odd[0]}")
    seed = whole_number(args.seed, "--seed", 10**9 - 1)
    from noloco_node.bench import links, sync

    wanted = names(args.systems, "--systems", [system.name for system in sync.SYSTEMS])
    links.require()
    systems = [system for system in sync.SYSTEMS if system.name in wanted]
    settings = [sync.Setting(*setting) for setting in product(ns, params, mbits)]

    def rows_of(say: "Progress") -> "Iterator[Row]":
        for system in systems:
            if system.missing:
                say.line(f"{system.name} is left out: {pip_install(system.needs)}")
        return sync.run(settings, [s for s in systems if not s.missing], repeats, seed, say)

    rows = measured(rows_of, partial(show, args, CELLS))
    return draw(args, "One averaging step", [f"{repeats} steps", f"seed {seed}"], sync.panels(rows))


CELLS: Cells = {
    "system": lambda row: row.system,
    "N": lambda row: str(row.n),
    "params": lambda row: f"{row.params / 1e6:g} M",
    "Mbit/s": lambda row: f"{row.mbit:g}",
    "seconds": lambda row: f"{row.seconds:.2f}",
    "from - to": lambda row: f"{row.fastest_s:.2f} - {row.slowest_s:.2f}",
    "MB sent": lambda row: f"{row.bytes_per_node / 1e6:.1f}",
    "bytes/param": lambda row: f"{row.more['bytes_per_param']:.2f}",
    "of the limit": lambda row: f"{row.more['of_limit']:.2f}",
    "CPU s": lambda row: f"{row.cpu_seconds:.2f}",
    "runs": lambda row: str(row.runs),
}
