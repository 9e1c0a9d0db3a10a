"""The exchange path alone, on loopback: how fast two processes swap bytes, and what that takes of the CPU.

Both ends send as many bytes at the same time. Beside a node's swap without its codec stand a stream of libp2p's, gRPC,
and gRPC over that stream, in turn and several times: on a busy machine only the ratios mean something.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import fmean, median

import noloco_node.bench.rivals as workers_of
from noloco_node.base.plots import Line, Panel
from noloco_node.bench import Say
from noloco_node.bench.rows import Row, Run
from noloco_node.bench.workers import START_S, Answer, Workers

RAW = "libp2p"
SYSTEMS = ("exchange", "grpc over libp2p", RAW, "grpc")
PAYLOAD_BYTES = 1 << 19
"""A fragment's, at 4 bits."""
STEP_S = 120.0


def run(payloads: int, repeats: int, say: Say) -> list[Row]:
    """Each end sends so many payloads, `repeats` times after once that does not count."""
    runs: dict[str, list[Run]] = {system: [] for system in SYSTEMS}
    with ExitStack() as stack:
        pairs = {system: _started(stack, system, payloads) for system in SYSTEMS}
        for turn in range(repeats + 1):
            for system, pair in pairs.items():
                say(system, turn, repeats + 1)
                taken = _step(pair, payloads)
                runs[system] += [taken] if turn else []
    return list(rows(runs, payloads))


def _started(stack: ExitStack, system: str, payloads: int) -> Workers:
    pair = stack.enter_context(Workers(f"{workers_of.__name__}.stream_end", [None, None]))
    each: list[Answer] = [{"worker": worker} for worker in range(2)]
    started = pair.ask("start", START_S, each, variant=system, count=payloads)
    pair.ask("connect", START_S, addresses=[answer["address"] for answer in started])
    return pair


def _step(pair: Workers, payloads: int) -> Run:
    used, began = pair.used(), time.monotonic()
    pair.ask("step", STEP_S)
    seconds = time.monotonic() - began
    return Run(seconds, payloads * PAYLOAD_BYTES, fmean(pair.used().since(used).cpu_s))


def rows(runs: dict[str, list[Run]], payloads: int) -> Iterator[Row]:
    for system, of in runs.items():
        row = Row.of(of, bench="exchange", system=system, n=2, params=0, mbit=None)
        share = median(raw.seconds / run.seconds for run, raw in zip(of, runs[RAW], strict=True))
        megabytes = payloads * PAYLOAD_BYTES / 1e6
        row.more.update(mb_s=megabytes / row.seconds, of_raw=share, cpu_s_per_gb=1e3 * row.cpu_seconds / megabytes)
        yield row


def panels(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line(row.system, [at], [row.more["mb_s"]]) for at, row in enumerate(rows)]
    return [Panel("Two processes on loopback", "system", "MB/s each way", lines, from_zero=True)]
