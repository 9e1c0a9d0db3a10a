"""What a run costs a machine, and what a volunteer must bring: `noloco-node check`, before anybody is invited.

The replica is built and tried out by the same function as in a node (node/build_training.py), so what would end a start
ends the check, with the same sentence and exit code. Then it trains for some seconds; nothing of it is kept.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from noloco_node.base import atomic_files
from noloco_node.base.extras import pip_install
from noloco_node.checkpoints.checkpoint import KEEP
from noloco_node.core.codecs.by_name import bytes_per_element
from noloco_node.core.state import STATE_BYTES
from noloco_node.data.sources import Sources
from noloco_node.host import memory
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.node import build_training
from noloco_node.run import first_weights
from noloco_node.run.schema import Manifest
from noloco_node.training import memory_budget
from noloco_node.training.replica import Replica

TRIAL_S, TRIAL_STEPS = 10.0, 20
"""Whichever comes first, but at least one step."""
NETWORK_BYTES = 160_000_000
"""What a node takes beside its training: libraries, threads, records that it stores for others (usually 18 MB), and
p2pd, a process of 73 MB. Each of two nodes of `tiny` took 140 MB after 130 rounds, and stored hardly any records."""
_UNTRIED = ("owed length", "open offer", "corrections until judged", memory_budget.CHECKPOINT)
"""Of the plan, what a trial without rounds does not have."""
LONGEST_STEP_S = 60.0
"""One that would take longer is not made: its time is estimated from a micro-batch."""


@dataclass(frozen=True, slots=True)
class Memory:
    device: int | None
    """Bytes that the run takes of the accelerator at most; None on a CPU."""
    host: int
    plan: dict[str, dict[str, int]]
    copy: int
    """Bytes more of the machine's memory, now and then, for a joining node's copy of the state; it goes without where
    they are not free."""
    device_taken: int | None
    """The most that the trial took there, activations and all; None on a CPU."""
    host_taken: int | None
    """What the trial's process had at its end, with torch itself."""


@dataclass(frozen=True, slots=True)
class Disk:
    checkpoint: int
    needed: int
    """Of the checkpoints that are kept, and of the one that is written; of one more where memory has no room for the
    copy that it is written from."""
    free: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    steps: int
    """0: the time is estimated from one micro-batch."""
    step_s: float
    tokens_per_s: float
    mfu: float | None
    loss_first: float | None
    loss_last: float | None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a volunteer must bring, in words."""

    data: str
    tokenizer: str
    packages: str


@dataclass(frozen=True, slots=True)
class Checked:
    run_id: str
    run: str
    parameters: int
    device: str
    memory: Memory
    disk: Disk
    swap: int
    """Bytes that a swap sends, and about as many that it receives."""
    swaps_per_round: int | str
    trial: Trial
    round_s: float
    run_s: float
    """Of all rounds, where no swap is waited for."""
    needs: Needs


def check(run: Manifest, config: NodeConfig, say: Callable[[str], None]) -> Checked:
    """`say`: what is being done. Raises what a start would end with."""
    home = Home(config.home)
    say("building the model, reading the data")
    sources = Sources(config.data, config.tokenizer, home.data, config.encoding)
    with closing(build_training.build(run, config, "check", sources)) as it:
        if run.model.weights:
            it.begin_with(first_weights.check(config.weights, run.model.weights))
        say(f"training for {TRIAL_S:.0f} s at most")
        trial = _trial(it)
        plan = it.memory_plan()
        checkpoint = STATE_BYTES * it.parameters
        at_once = KEEP + (1 if memory_budget.has_room(checkpoint) else 2)
        round_s = run.inner.seconds or trial.step_s * (run.inner.steps or 1)
        return Checked(
            run_id=run.run_id,
            run=run.label,
            parameters=it.parameters,
            device=it.device,
            memory=_memory(plan, it.device_bytes),
            disk=Disk(checkpoint, at_once * checkpoint, atomic_files.free_bytes(home.root)),
            swap=round(it.parameters * bytes_per_element(run.outer.codec)),
            swaps_per_round=run.outer.swaps_per_round,
            trial=trial,
            round_s=round_s,
            run_s=round_s * run.rounds,
            needs=_needs(run),
        )


def _memory(plan: memory_budget.Plan, device_taken: int | None) -> Memory:
    taken, items = memory.process_bytes(), {"device": plan.device, "host": plan.host}
    shown = {where: {item.what: item.bytes for item in some if item.bytes} for where, some in items.items()}
    host = shown["host"]
    # by the trial, as training has loaded libraries and compiled since the plan was made
    tried = sum(size for what, size in host.items() if what not in _UNTRIED and what != memory_budget.PROGRAM)
    host[memory_budget.PROGRAM] = max(host.get(memory_budget.PROGRAM, 0), (memory.peak_bytes() or 0) - tried)
    host["network"] = NETWORK_BYTES
    return Memory(
        device=plan.device_bytes or None,
        host=sum(host.values()),
        plan=shown,
        copy=memory_budget.COPY_BYTES * plan.parameters,
        device_taken=device_taken,
        host_taken=taken,
    )


def _trial(replica: Replica) -> Trial:
    began = time.perf_counter()
    replica.try_out()
    step_s = (time.perf_counter() - began) * replica.micro_batches
    seconds, losses = list[float](), list[float]()
    while step_s <= LONGEST_STEP_S and len(losses) < TRIAL_STEPS and sum(seconds) < TRIAL_S:
        began = time.perf_counter()
        losses.append(replica.step())
        seconds.append(time.perf_counter() - began)
        replica.position.spend(seconds[-1])
    if seconds:
        step_s = statistics.median(seconds[1:] or seconds)  # the first one compiles and allocates
    rate = replica.tokens_per_step / step_s
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return Trial(len(seconds), step_s, rate, replica.mfu(rate), first, last)


def _needs(run: Manifest) -> Needs:
    data, packages = run.data, "none"
    extra = f"`{pip_install('data').partition(' -m ')[2]}`"  # without this machine's Python
    if run.model.task:
        package = f"one with the task {run.model.task} (entry point in noloco_node.tasks)"
        return Needs("what the task reads", "none", package)
    match data.source:
        case "files":
            text = f"own files with --data: text, jsonl with the field {data.field}, parquet, arrow or token files"
            packages = f"for parquet and arrow {extra}"
        case "hub":
            text = f"none: {data.dataset} comes from the hub, which must be reachable"
            packages = extra
        case _:
            text = "none: Python's own library, which every machine has"
    kind, _, name = data.tokenizer.partition(":")
    tokenizer = {
        "sha256": f"the file with SHA-256 {name[:12]}…, with --tokenizer: hand it out with the line to join by",
        "hub": f"none: {name.partition('@')[0]} comes from the hub",
    }.get(kind, "none: each byte is a token")
    return Needs(text, tokenizer, packages)
