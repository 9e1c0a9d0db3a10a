"""Rounds of peers that find one another themselves, as hivemind's own benchmark of averaging has them: how many find
somebody in time, how long a round takes, and how far apart the vectors stay.

Nobody trains meanwhile: who is done with a round begins the next one, until all have had theirs. hivemind's peers wait
for a group of four for at most 5 s, its default, before they go on with fewer; so they are measured with 1 s, too. A
round of ours has one partner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Any

import noloco_node.bench.rivals as workers_of
from noloco_node.base.plots import Panel
from noloco_node.bench import Say
from noloco_node.bench.links import star
from noloco_node.bench.rows import Row, Run, lines
from noloco_node.bench.workers import START_S, Answer, Workers

ROUND_S = 15.0
"""Who has averaged with nobody in this time has failed and begins the next round: hivemind's benchmark has it so."""
PARAMS = 2_400_000
"""As many as that benchmark has."""
GROUP = 4


@dataclass(frozen=True, slots=True)
class System:
    name: str
    module: str
    """In bench/rivals."""
    variant: str
    connect: dict[str, Any]


SYSTEMS = (
    System("noloco lattice:3", "noloco_pair", "lattice:3", {}),
    System("hivemind fp16, 5 s", "hivemind_averager", "fp16", {"group": GROUP, "matchmaking_s": 5.0}),
    System("hivemind fp16, 1 s", "hivemind_averager", "fp16", {"group": GROUP, "matchmaking_s": 1.0}),
)


def run(ns: Sequence[int], systems: Sequence[System], mbit: float, rounds: int, say: Say) -> Iterator[Row]:
    work = [(n, system) for n in ns for system in systems]
    for done, (n, system) in enumerate(work):
        say(f"{system.name}, {n} peers", done, len(work))
        yield _row(n, system, mbit, rounds)


def _row(n: int, system: System, mbit: float, rounds: int) -> Row:
    within_s = START_S + rounds * ROUND_S
    with star(n, mbit) as hosts, Workers(f"{workers_of.__name__}.{system.module}", hosts) as workers:
        each: list[Answer] = [{"host": host.address, "worker": number} for number, host in enumerate(hosts)]
        started = workers.ask("start", START_S, each, params=PARAMS, variant=system.variant)
        workers.ask("connect", START_S, addresses=[answer["address"] for answer in started], **system.connect)
        before = workers.ask("brings", START_S)
        used = workers.used()
        done = workers.ask("rounds", within_s, count=rounds, patience_s=ROUND_S)
        had = fmean(answer["rounds"] for answer in workers.ask("end", within_s))
        used = workers.used().since(used)  # nothing is under way any more: bytes of rounds that are not counted
    taken = [Run(answer["seconds"] / rounds, fmean(used.sent) / had, fmean(used.cpu_s) / had) for answer in done]
    row = Row.of(taken, bench="averaging", system=system.name, n=n, params=PARAMS, mbit=mbit)
    succeeded = sum(answer["succeeded"] for answer in done) / (n * rounds)
    apart = [spread([answer["probe"] for answer in answers]) for answers in (before, done)]
    row.more.update(rounds=rounds, succeeded=succeeded, spread_left=apart[1] / apart[0])
    return row


def spread(probes: Sequence[Sequence[float]]) -> float:
    """The variance between the peers, over all elements that are looked at."""
    return fmean(pvariance(element) for element in zip(*probes, strict=True))


def panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        Panel(
            "Rounds of peers that find one another", "peers", "s a round", lines(rows, "n", "seconds"), from_zero=True
        )
    ]
