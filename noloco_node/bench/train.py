"""Time to a loss: the same model, data and tokens a step on N nodes behind links of one rate, by ours and by rivals.

Each node has a pretended accelerator (rivals/paced.py): a step takes a fixed time, in which the real training of its
batch fits into a part of a core. So N nodes train on two cores as if each had its own machine, and what a
synchronisation costs stays what it is. That the pace was kept is measured: `step_s` beside the fixed time.

The loss is the mean of all nodes', of the weights that each left every few seconds, on held-out text that is the same
for all systems; it is computed after the run. (One node's, at batches of 128 tokens, came down to 3.2 after 31 to 52 s
in runs of the same code.) `busy`: the share of the time that went into steps; ours say it themselves
(training/time_accounts.py).
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from noloco_node.base.states import NodeState
from noloco_node.bench import Say, links
from noloco_node.bench.links import Host
from noloco_node.bench.rivals import paced, real_nodes
from noloco_node.bench.rivals.paced import Setting
from noloco_node.bench.rows import Row
from noloco_node.bench.workers import START_S, Answer, Used, Workers

OURS = {"eager": "eager", "blocking": "blocking"}
"""Our systems, and their overlap."""
RIVALS = {"hivemind": "train_hivemind", "ddp": "train_ddp"}
"""Systems, and their modules."""
SYSTEMS = (*OURS, *RIVALS)
SECONDS, STEPS, GOAL = 120.0, 8, 3.0
QUICK_SECONDS, QUICK_STEPS = 10.0, 4
SETTING = Setting()
QUICK = Setting(hidden=64, layers=1, length=32, tokens=32, step_s=0.25, held_out=1, every_s=1.0)
APART_S = 0.3
"""Ours begin so long one after the other, as no two machines begin at once: four boundaries at the same moment, with
what each evaluates there, take twice as long on two cores as one. Rivals, which wait for each other, begin together."""
_ANSWER_S = 30.0

Curve = list[tuple[float, float]]
"""Seconds since training began, and the loss."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured of each system."""

    setting: Setting
    nodes: int
    mbit: float
    seconds: float
    """Of training."""
    steps: int
    """Of a phase."""
    goal: float

    @property
    def threads(self) -> int:
        """Of a node: its part of the machine's cores."""
        return max(1, len(os.sched_getaffinity(0)) // self.nodes)


@dataclass(frozen=True, slots=True)
class _Trained:
    began: float
    nodes: Sequence[Answer]
    """`parameters`, `steps`, `step_s` in all, `busy`."""
    used: Used


def run(job: Job, systems: Sequence[str], say: Say) -> Iterator[Row]:
    """Raises NolocoError where hosts cannot be made, or a system fails."""
    links.require()
    for done, system in enumerate(systems):
        say(f"{system}, {job.seconds:.0f} s", done, len(systems))
        with tempfile.TemporaryDirectory(prefix="noloco-weights-") as name:
            folders = [Path(name, f"{number}") for number in range(job.nodes)]
            for folder in folders:
                folder.mkdir()
            with links.star(job.nodes, job.mbit) as hosts, ExitStack() as stack:
                train = _train_ours if system in OURS else _train_rival
                trained = train(stack, job, system, hosts, Path(name))
            say(f"{system}, its losses", done, len(systems))
            yield _row(job, system, trained, [paced.losses(job.setting, each, trained.began) for each in folders])


def _train_ours(stack: ExitStack, job: Job, system: str, hosts: Sequence[Host], weights: Path) -> _Trained:
    inner, outer = {"steps": job.steps}, {"overlap": OURS[system]}
    workers = stack.enter_context(
        real_nodes.running(hosts, job.setting, inner, outer, weights, paused=True, threads=job.threads)
    )
    patience_s = START_S + 5 * job.nodes
    workers.ask("until", patience_s, state=NodeState.PAUSED, patience_s=patience_s, peers=job.nodes - 1)
    before = workers.used()
    began = _resume(workers)
    _wait(workers, "status", began + job.seconds)
    views, used = workers.ask("status", _ANSWER_S), workers.used().since(before)
    each = [
        {
            "parameters": view["parameters"],
            "steps": view["step"],
            "step_s": view["time_s"]["step"],
            "busy": view["busy_fraction"],
            "rounds": view["rounds"]["committed"] + view["rounds"]["solo"],
            "alone": view["rounds"]["solo"],
            "time_s": view["time_s"],
            "taken_back": view["taken_back"],
        }
        for view in views
    ]
    return _Trained(began, each, used)


def _resume(workers: Workers) -> float:
    """When the first began."""
    began = []
    for worker in workers.each:
        began.append(float(worker.order("resume", _ANSWER_S)["at"]))
        time.sleep(APART_S)
    return began[0]


def _train_rival(stack: ExitStack, job: Job, system: str, hosts: Sequence[Host], weights: Path) -> _Trained:
    environ = {"OMP_NUM_THREADS": str(job.threads)}
    module = f"noloco_node.bench.rivals.{RIVALS[system]}"
    workers = stack.enter_context(Workers(module, hosts, environ=environ))
    each: list[Answer] = [
        {"number": number, "address": host.address, "weights": str(weights / f"{number}")}
        for number, host in enumerate(hosts)
    ]
    workers.ask("build", START_S, each, setting=job.setting.options, first=hosts[0].address)
    if system == "hivemind":
        first, *others = workers.each
        peers = first.order("join", START_S, peers=[])["peers"]
        for worker in others:
            worker.order("join", START_S, peers=peers)
    workers.ask("connect", START_S, count=job.nodes)
    before = workers.used()
    began = min(answer["at"] for answer in workers.ask("train", _ANSWER_S, steps=job.steps))
    _wait(workers, "report", began + job.seconds)
    return _Trained(began, workers.ask("report", _ANSWER_S), workers.used().since(before))


def _wait(workers: Workers, question: str, until: float) -> None:
    """Asks each in turn now and then: one that has failed is not waited for."""
    while (left_s := until - time.time()) > 0:
        time.sleep(min(left_s, 20.0))
        workers.ask(question, _ANSWER_S)


def _row(job: Job, system: str, trained: _Trained, curves: Sequence[Curve]) -> Row:
    curve = mean(curves)
    reached = seconds_to(curve, job.goal)
    each = sorted(second for one in curves if (second := seconds_to(one, job.goal)) is not None)
    steps = fmean(node["steps"] for node in trained.nodes)
    seconds = job.seconds if reached is None else reached
    return Row(
        bench="train",
        system=system,
        n=job.nodes,
        params=trained.nodes[0]["parameters"],
        mbit=job.mbit,
        seconds=seconds,
        bytes_per_node=fmean(trained.used.sent),
        cpu_seconds=fmean(trained.used.cpu_s),
        fastest_s=each[0] if each else job.seconds,
        slowest_s=each[-1] if len(each) == len(curves) else job.seconds,
        runs=1,
        more={
            "goal": job.goal,
            "reached": reached is not None,
            "trained_s": job.seconds,
            "loss": curve[-1][1],
            "steps": steps,
            "phase_steps": job.steps,
            "busy": fmean(node["busy"] for node in trained.nodes),
            "step_s": sum(node["step_s"] for node in trained.nodes) / max(1.0, steps * len(trained.nodes)),
            "pace_s": job.setting.step_s,
            "threads": job.threads,
            "rounds": fmean(node["rounds"] for node in trained.nodes),
            "alone": fmean(node["alone"] for node in trained.nodes),
            "time_s": trained.nodes[0].get("time_s", {}),
            "taken_back": sum(node.get("taken_back", 0) for node in trained.nodes),
            "curve": _rounded(curve),
            "curves": [_rounded(one) for one in curves],
        },
    )


def _rounded(curve: Curve) -> Curve:
    return [(round(second, 2), round(loss, 4)) for second, loss in curve]


def mean(curves: Sequence[Curve]) -> Curve:
    """Of several nodes, on lines between their points, as far as each goes."""
    seconds = sorted({second for curve in curves for second, _ in curve})
    last = min(curve[-1][0] for curve in curves)
    losses = np.mean([np.interp(seconds, *np.transpose(curve)) for curve in curves], axis=0).tolist()
    return [(second, loss) for second, loss in zip(seconds, losses, strict=True) if second <= last]


def seconds_to(curve: Curve, goal: float) -> float | None:
    """When the loss comes down to the goal, on a line between two points; None: not within the run."""
    for (before, higher), (after, lower) in pairwise(curve):
        if higher > goal >= lower:
            return before + (after - before) * (higher - goal) / (higher - lower)
    return None
