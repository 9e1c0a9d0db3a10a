"""One averaging step of P parameters among N processes, each behind a link of its own that is held at a rate.

Ours and its rivals do the same work in the same namespaces, one system after the other. What each does is in
bench/rivals/; here are the order of the runs, the clock and the counters. Seconds are those from the word `step` to the
last answer; bytes are counted on the links, CPU seconds by the kernel. Then the vectors are looked at: what did not
average is no result.
"""

import importlib.util
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import noloco_node.bench.rivals as workers_of
from noloco_node.base.plots import Panel
from noloco_node.bench import Say
from noloco_node.bench.links import Host, star
from noloco_node.bench.rows import Row, Run, lines
from noloco_node.bench.workers import START_S, Answer, Workers
from noloco_node.errors import NolocoError

BUSY = 20.0
"""Times that a step may take as long as its bytes do, on a machine that does other work."""
HALF_AS_FAR = 0.25
"""Of the square of the way to the mean."""
LONG_S = 20.0
"""A rival's step that takes so long is done once and without a rehearsal: what is paid once counts little in it."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    module: str
    """In bench/rivals."""
    variant: str
    in_pairs: bool
    bytes_per_element: float
    """Of what is sent once; to guess how long a step will take."""
    ours: bool = False
    left: float = HALF_AS_FAR
    """Of the square of the way to the mean, at most, after a step."""
    needs: str = ""
    """A package that is no dependency."""

    def estimate_s(self, n: int, params: int, mbit: float) -> float:
        times = 1 if self.in_pairs else 2 * (n - 1) / n
        return times * self.bytes_per_element * params * 8e-6 / mbit

    @property
    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


SYSTEMS = [
    System(
        "noloco lattice:3", "noloco_pair", "lattice:3", True, 0.4, ours=True, left=0.5
    ),  # 0.3 in a first step, of guessed ranges
    System("noloco lattice:4", "noloco_pair", "lattice:4", True, 0.53, ours=True),
    System("noloco int8", "noloco_pair", "int8", True, 1.0, ours=True),
    System("noloco fp32", "noloco_pair", "fp32", True, 4.0, ours=True),
    System("two fp32 vectors", "gloo", "two-fp32", True, 8.0),
    System("hivemind 8bit", "hivemind_averager", "8bit", False, 1.0),
    System("hivemind fp16", "hivemind_averager", "fp16", False, 2.0),
    System("gloo bf16", "gloo", "bf16", False, 2.0),
    System("gloo fp32", "gloo", "fp32", False, 4.0),
    System("torchft fp32", "torchft_gloo", "fp32", False, 4.0, needs="torchft"),
]


@dataclass(frozen=True, slots=True)
class Setting:
    n: int
    params: int
    mbit: float


def run(settings: Sequence[Setting], systems: Sequence[System], repeats: int, seed: int, say: Say) -> Iterator[Row]:
    """`repeats`: timed steps of each system, after one that is not."""
    work = [(setting, system) for setting in settings for system in systems]
    for done, (setting, system) in enumerate(work):
        say(f"{system.name}, N {setting.n}, {setting.params / 1e6:g} M, {setting.mbit:g} Mbit/s", done, len(work))
        with star(setting.n, setting.mbit) as hosts:
            runs = _runs(setting, system, hosts, repeats, random.Random(seed))
        yield row(setting, system, runs)


def row(setting: Setting, system: System, runs: Sequence[Run]) -> Row:
    sent = fmean(run.bytes_per_node for run in runs)
    limit_s = sent * 8e-6 / setting.mbit
    made = Row.of(runs, bench="sync", system=system.name, n=setting.n, params=setting.params, mbit=setting.mbit)
    made.more.update(limit_s=limit_s, of_limit=made.seconds / limit_s, bytes_per_param=sent / setting.params)
    return made


def _runs(setting: Setting, system: System, hosts: Sequence[Host], repeats: int, chance: random.Random) -> list[Run]:
    estimate_s = system.estimate_s(setting.n, setting.params, setting.mbit)
    once = estimate_s > LONG_S and not system.ours
    within_s = START_S + BUSY * estimate_s
    with Workers(f"{workers_of.__name__}.{system.module}", hosts) as workers:
        each: list[Answer] = [{"host": host.address, "worker": number} for number, host in enumerate(hosts)]
        started = workers.ask("start", START_S, each, params=setting.params, variant=system.variant)
        workers.ask("connect", START_S, addresses=[answer["address"] for answer in started])
        taken = [_step(workers, hosts, step, system, within_s, chance) for step in range(1 if once else repeats + 1)]
    return taken if once else taken[1:]


def _step(  # noqa: PLR0913, PLR0917
    workers: Workers, hosts: Sequence[Host], step: int, system: System, within_s: float, chance: random.Random
) -> Run:
    groups = pairs(len(hosts), chance) if system.in_pairs else [list(range(len(hosts)))]
    partners = {worker: [each for each in group if each != worker] for group in groups for worker in group}
    each: list[Answer] = [{"partners": partners[worker]} for worker in range(len(hosts))]
    before = workers.ask("prepare", within_s, each, step=step)
    used = workers.used()
    began = time.monotonic()
    workers.ask("step", within_s)
    seconds = time.monotonic() - began
    used = workers.used().since(used)
    after = workers.ask("result", within_s)
    check([answer["probe"] for answer in before], [answer["probe"] for answer in after], groups, system.left)
    return Run(seconds, fmean(used.sent), fmean(used.cpu_s))


def pairs(n: int, chance: random.Random) -> list[list[int]]:
    order = chance.sample(range(n), n)
    return [order[at : at + 2] for at in range(0, n, 2)]


Probes: TypeAlias = Sequence[Sequence[float]]


def check(before: Probes, after: Probes, groups: Sequence[Sequence[int]], left: float = HALF_AS_FAR) -> None:
    """Raises NolocoError where a group's vectors are not so much nearer to their mean now: half as far, by nearly any
    codec."""
    for group in groups:
        mean = [fmean(column) for column in zip(*(before[worker] for worker in group), strict=True)]
        was, now = (sum(_square(vectors[worker], mean) for worker in group) for vectors in (before, after))
        if not now < left * was:
            raise NolocoError(
                f"the step did not average: {now:.3g} from the mean, {was:.3g} before. Report this defect."
            )


def _square(one: Sequence[float], other: Sequence[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Seconds by N, a panel for each size and rate."""
    made = []
    for params, mbit in dict.fromkeys((row.params, row.mbit) for row in rows):
        some = [row for row in rows if (row.params, row.mbit) == (params, mbit)]
        title = f"{params / 1e6:g} M parameters, {mbit:g} Mbit/s"
        made.append(Panel(title, "processes", "seconds", lines(some, "n", "seconds"), y_log=True))
    return made
