"""The shape of hivemind's own benchmark of averaging: 16 peers in groups of 4, a few rounds, and how many succeed.

Ours beside it: 16 nodes that swap in pairs, each with whom it chooses. All on loopback, and every peer begins its round
at the same moment; the time to find a group or a partner counts.
"""

from collections.abc import Iterator

import noloco_node.bench.rivals as workers_of
from noloco_node.bench import Say
from noloco_node.bench.rows import Row, Run
from noloco_node.bench.workers import START_S, Answer, Workers

PARAMS = 2_373_888
"""Of hivemind's: three layers of 256."""
GROUP = 4
WITHIN_S = 15.0
"""That of its benchmark: a round takes no longer, or has failed."""
SYSTEMS = {"noloco lattice:4": ("noloco_pair", "lattice:4"), "hivemind fp16": ("hivemind_averager", "fp16")}


def run(peers: int, rounds: int, say: Say) -> Iterator[Row]:
    for system in SYSTEMS:
        yield _row(system, peers, rounds, say)


def _row(system: str, peers: int, rounds: int, say: Say) -> Row:
    module, variant = SYSTEMS[system]
    taken: list[float | None] = []
    with Workers(f"{workers_of.__name__}.{module}", [None] * peers) as workers:
        say(f"{system}: {peers} peers begin", 0, rounds)
        each: list[Answer] = [{"worker": worker} for worker in range(peers)]
        started = workers.ask("start", START_S, each, host="127.0.0.1", params=PARAMS, variant=variant)
        workers.ask("connect", START_S, addresses=[answer["address"] for answer in started], group=GROUP)
        used = sum(workers.cpu_s())
        for step in range(rounds):
            say(system, step, rounds)
            answers = workers.ask("attempt", 4 * WITHIN_S, step=step, limit_s=WITHIN_S)
            taken += [answer["seconds"] for answer in answers]
        used = (sum(workers.cpu_s()) - used) / len(taken)
    runs = [Run(seconds, 0, used) for seconds in taken if seconds is not None] or [Run(float("nan"), 0, used)]
    row = Row.of(runs, bench="averaging", system=system, n=peers, params=PARAMS, mbit=None)
    row.more.update(success=sum(seconds is not None for seconds in taken) / len(taken), attempts=len(taken))
    return row
