"""`bench train`: time to a loss, beside rivals."""

import argparse
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from noloco_node.base.plots import Line, Panel
from noloco_node.cli.bench.output import Cells, draw, measured, names, shared, show
from noloco_node.cli.options import Verbs, option, verb, whole_number
from noloco_node.errors import UsageError

if TYPE_CHECKING:
    from noloco_node.bench.rows import Row


ABOUT = """\
Time to a loss on nodes behind slow links: ours, hivemind with local updates,
torch DDP. Each node trains at the fixed pace of a pretended accelerator, so
that four fit on two cores. This needs root, `ip` and `tc`, 4 GB of memory, and
about 3 minutes for each system; `--quick` takes 3 in all.
"""


def options(what: Verbs) -> None:
    train = verb(what, "train", "time to a loss behind slow links, beside hivemind and DDP", "--goal 3.2", ABOUT)
    add = partial(option, train)
    add("--systems LIST", "some of eager,blocking,hivemind,ddp (default: all)")
    add("--nodes N", "2 to 8 (default: 4)", default="4")
    add("--mbit RATE", "of each link, each way (default: 50)", type=float, default=50.0)
    add("--seconds S", "of training (default: 120; with --quick 10)", type=float)
    add("--steps N", "of a phase, for all systems but ddp (default: 8; with --quick 4)")
    add("--step-s S", "seconds of a step (default: 1; with --quick 0.25)", type=float)
    add("--goal LOSS", "held-out loss, in nats a byte (default: 3.0)", type=float)
    shared(train, "a tiny model and 10 s of training: whether all systems run here")


def run(args: argparse.Namespace) -> int:
    from noloco_node.bench import train

    systems = names(args.systems, "--systems", train.SYSTEMS)
    setting, seconds, steps = (
        (train.QUICK, train.QUICK_SECONDS, train.QUICK_STEPS)
        if args.quick
        else (train.SETTING, train.SECONDS, train.STEPS)
    )
    for flag, value in (("--mbit", args.mbit), ("--seconds", args.seconds), ("--step-s", args.step_s)):
        if value is not None and not 0.01 <= value <= 10_000:
            raise UsageError(f"{flag} must be from 0.01 to 10000, not {value:g}")
    if args.step_s:
        setting = replace(setting, step_s=args.step_s)
    nodes = whole_number(args.nodes, "--nodes", 8, 2)
    steps = steps if args.steps is None else whole_number(args.steps, "--steps", 1000, 1)
    job = train.Job(setting, nodes, args.mbit, args.seconds or seconds, steps, args.goal or train.GOAL)
    rows = measured(lambda say: train.run(job, systems, say), partial(show, args, _CELLS, setting=asdict(setting)))
    title = f"{nodes} nodes behind links of {args.mbit:g} Mbit/s"
    step = f"{setting.tokens} tokens a step of {setting.step_s:g} s"
    told = f"{rows[0].params / 1e6:.1f} M parameters, {step}, phases of {steps} steps"
    return draw(args, title, [told], _panels(rows))


def _panels(rows: "list[Row]") -> list[Panel]:
    curves = [Line(row.system, *zip(*row.more["curve"], strict=True)) for row in rows]
    return [Panel("Held-out loss", "seconds", "nats a byte", curves)]


def _seconds(row: "Row") -> str:
    return f"{row.seconds:.0f} s" if row.more["reached"] else f"> {row.seconds:.0f} s"


_CELLS: Cells = {
    "system": lambda row: row.system,
    "to the loss": _seconds,
    "from - to": lambda row: f"{row.fastest_s:.0f} - {row.slowest_s:.0f}",
    "loss at the end": lambda row: f"{row.more['loss']:.3f}",
    "busy": lambda row: f"{row.more['busy']:.3f}",
    "steps": lambda row: f"{row.more['steps']:.0f}",
    "a step": lambda row: f"{row.more['step_s']:.2f} s",
    "MB sent": lambda row: f"{row.bytes_per_node / 1e6:.0f}",
    "CPU s": lambda row: f"{row.cpu_seconds:.0f}",
    "rounds": lambda row: f"{row.more['rounds']:.0f}",
    "alone": lambda row: f"{row.more['alone']:.0f}",
}
