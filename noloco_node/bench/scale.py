"""What one node takes for each of its rounds, by the number of nodes: bytes, calls, operations in the directory.

Up to some tens of them are real: processes that train a small model at a fixed pace, each in a host of its own. More
are in virtual time (virtual_swarm.py), where only decisions are real: their bytes are counted from what is sent.
"""

import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from noloco_node.bench import Say, links
from noloco_node.bench.rivals import real_nodes
from noloco_node.bench.rivals.paced import Setting
from noloco_node.bench.rows import Row
from noloco_node.bench.virtual_swarm import VirtualSwarm
from noloco_node.bench.workers import Answer, Workers

REAL, QUICK_REAL = (2, 4, 8, 16), (2, 4)
VIRTUAL, QUICK_VIRTUAL = (64, 256, 1024, 4096), (64, 256)
MBIT = 100.0
PHASE_S, QUICK_PHASE_S = 10.0, 4.0
ROUNDS, QUICK_ROUNDS = 10, 2  # a swap more or less is a twentieth of what two nodes do
SETTING = Setting(hidden=256, layers=2, length=16, tokens=16, held_out=32)
"""A swap worth counting, and steps of a few milliseconds of CPU time. By the loss of one window alone a node takes
honest corrections for harmful, and leaves its partner out for phases."""
VIRTUAL_ROUNDS, VIRTUAL_PHASE_S, SWAP_SHARE = 3, 60.0, 0.1
COUNTED = 1500
"""Rounds of all virtual nodes together, at least: 16 nodes of 3 rounds made 0.62 calls each, of 94 rounds 0.82."""
VIRTUAL_PARAMS, BYTES_PER_PARAM = 10_000_000, 0.4
"""What lattice:3 sends (README.md)."""
RECORD_BYTES = 500
"""Of a presence record in a look-up's answer."""
READY = 2
"""Rounds that each node has committed before the count begins."""


def real(counts: Sequence[int], quick: bool, say: Say) -> Iterator[Row]:
    """Raises NolocoError where hosts cannot be made."""
    links.require()
    phase_s, rounds = (QUICK_PHASE_S, QUICK_ROUNDS) if quick else (PHASE_S, ROUNDS)
    for done, count in enumerate(counts):
        say(f"{count} real nodes", done, len(counts))
        with links.star(count, MBIT) as hosts, real_nodes.running(hosts, SETTING, {"seconds": phase_s}, {}) as workers:
            patience_s = 60 + 20 * phase_s
            workers.ask("until", patience_s, state="training", patience_s=patience_s, committed=READY)
            before = _looked(workers)
            time.sleep(rounds * phase_s)
            yield _row(phase_s, before, _looked(workers))


def _looked(workers: Workers) -> list[Answer]:
    """Of each node: its status, and what its host and its processes have used."""
    views = workers.ask("status", 30.0)
    return [{**view, "link": link, "cpu_s": cpu} for view, link, cpu in zip(views, *workers.used(), strict=True)]


def _row(phase_s: float, before: Sequence[Answer], after: Sequence[Answer]) -> Row:
    def gained(value: Any) -> float:
        """All nodes' together, as no two of them end their rounds at once."""
        return float(sum(value(late) - value(early) for early, late in zip(before, after, strict=True)))

    def each(value: Any) -> float:
        """Of a node and round that has ended."""
        return gained(value) / gained(_ended)

    lasted = [late["at"] - early["at"] for early, late in zip(before, after, strict=True)]
    return Row(
        bench="scale",
        system="real nodes",
        n=len(after),
        params=after[0]["parameters"],
        mbit=MBIT,
        seconds=phase_s,
        bytes_per_node=each(lambda view: view["link"]),
        cpu_seconds=each(lambda view: view["cpu_s"]),
        fastest_s=min(lasted),
        slowest_s=max(lasted),
        runs=1,
        more={
            "committed_share": each(lambda view: view["rounds"]["committed"]),
            "swap_bytes": each(lambda view: view["bytes"]["sent"]),
            "calls": each(lambda view: view["calls"]),
            "look_ups": each(lambda view: view["dht"].get("look_ups", 0)),
            "stores": each(lambda view: view["dht"].get("stores", 0)),
            "dht_calls": each(lambda view: view["dht"].get("calls", 0)),
            "memory_bytes": median(sum(view["rss"]) for view in after),
            "busy_fraction": fmean(view["busy_fraction_minute"] or 0.0 for view in after),
        },
    )


def _ended(view: Answer) -> int:
    return int(view["rounds"]["committed"] + view["rounds"]["solo"])


def virtual(counts: Sequence[int], say: Say) -> Iterator[Row]:
    for number, count in enumerate(counts):
        say(f"{count} virtual nodes", number, len(counts))
        began = time.monotonic()
        rounds = max(VIRTUAL_ROUNDS, -(-COUNTED // count))
        done = VirtualSwarm(count, VIRTUAL_PHASE_S, SWAP_SHARE * VIRTUAL_PHASE_S).run(rounds)
        taken = time.monotonic() - began
        each = {what: done[what] / done["rounds"] for what in done}
        swap_bytes = each["swaps"] * BYTES_PER_PARAM * VIRTUAL_PARAMS
        yield Row(
            bench="scale",
            system="virtual time",
            n=count,
            params=VIRTUAL_PARAMS,
            mbit=None,
            seconds=VIRTUAL_PHASE_S,
            bytes_per_node=swap_bytes + each["records"] * RECORD_BYTES,
            cpu_seconds=0.0,
            fastest_s=taken,
            slowest_s=taken,
            runs=1,
            more={
                "committed_share": each["committed"],
                "swap_bytes": swap_bytes,
                **{what: each[what] for what in ("calls", "look_ups", "stores", "records")},
            },
        )
