"""Judges facts about a machine: can it train in a swarm, and what should its user change?

Pure: a fact in, a finding of one line out. Limits carry their reasons.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from noloco_node.base.addresses import Address
from noloco_node.base.units import count, rate, size, span
from noloco_node.errors import ClockTooFarOff, NolocoError, PortInUse, SwarmUnreachable, UsageError
from noloco_node.host.home import MAX_SOCKET_PATH_BYTES
from noloco_node.observe import health
from noloco_node.transport.reachability import DIRECTLY, MAPPED, OUTGOING, RELAYED
from noloco_node.transport.self_view import ClockSkew
from noloco_node.views.status import StatusView

OK, WARNING, ERROR, UNKNOWN = "ok", "warning", "error", "unknown"
"""UNKNOWN: not checked, or there was no node to ask."""

DISK_LOW_BYTES, DISK_NEEDED_BYTES = 10 * 10**9, 10**9
"""Three checkpoints of the `125m` preset take 7 GB; below the second there is no room for logs and token files."""
MEMORY_LOW_BYTES, MEMORY_NEEDED_BYTES = 74 * 10**8, 10**9
"""50 bytes a parameter with a checkpoint, so 6.7 GB for `125m`; torch and the rest of a node take 0.7 GB before any
model."""
DESCRIPTORS_LOW, DESCRIPTORS_NEEDED = 1024, 256
"""128 callers need three each and 256 channels one each; a small swarm needs a few dozen."""
_KINDS = {"bootstrap": SwarmUnreachable, "clock": ClockTooFarOff, "port": PortInUse, "listen": UsageError}
"""What ends a start for the same reason: the first of these gives the exit code."""


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    version: str
    device: str
    name: str | None
    """The GPU's."""
    free_bytes: int | None
    """Of the GPU's memory."""
    threads: int
    kernels: str
    """What encodes swaps: `numba`, `triton`, or `torch`, which is slow."""
    parameters: int | None = None
    """Of the largest model that fits into the memory that is free, without activations."""
    parameters_8bit: int | None = None
    """The same with AdamW's moments in 8 bits, on a GPU."""
    amx: bool = False
    """Whether a CPU has it, which then computes matrix products in bf16."""


@dataclass(frozen=True, slots=True)
class Place:
    """A home, or the directory in which it would be created."""

    root: str
    exists: bool
    ours: bool
    writable: bool
    mode: int
    socket_bytes: int


def device(found: Torch) -> Finding:
    where = (
        found.device + " with AMX" * found.amx
        if found.name is None
        else f"{found.device} ({found.name}, {size(found.free_bytes)} free)"
    )
    text = f"torch {found.version} on {where}, {count(found.threads, 'CPU thread')}, swaps encoded by {found.kernels}"
    if found.parameters is not None:
        smaller = f", {rate(found.parameters_8bit)} with --moments 8bit" if found.parameters_8bit else ""
        text += f", memory for {rate(found.parameters)} parameters{smaller}"
    if found.kernels == "torch" and found.name is None:  # of a GPU, gpu_verdicts.py says it
        return Finding("torch", WARNING, text, "that is slow: install numba")
    return Finding("torch", OK, text)


def disk(free_bytes: int | None, where: str) -> Finding:
    if free_bytes is None:
        return Finding("disk", UNKNOWN, f"the free space of {where} is not known")
    text = f"{size(free_bytes)} free in {where}"
    return _enough("disk", free_bytes, (DISK_NEEDED_BYTES, DISK_LOW_BYTES), text, "free some, or move NOLOCO_HOME")


def memory(free_bytes: int | None) -> Finding:
    if free_bytes is None:
        return Finding("memory", UNKNOWN, "this system does not report how much is free")
    text, remedy = f"{size(free_bytes)} free", "end other programs, or join a run with a small model"
    return _enough("memory", free_bytes, (MEMORY_NEEDED_BYTES, MEMORY_LOW_BYTES), text, remedy)


def descriptors(soft: int) -> Finding:
    text = f"{soft} file descriptors"
    return _enough("files", soft, (DESCRIPTORS_NEEDED, DESCRIPTORS_LOW), text, "allow more: `ulimit -n 4096`")


def _enough(subject: str, there: int, limits: tuple[int, int], text: str, remedy: str) -> Finding:
    level = (ERROR, WARNING, OK)[sum(there >= limit for limit in limits)]
    return Finding(subject, level, text, "" if level == OK else remedy)


def clock(skew: ClockSkew | None) -> Finding:
    if skew is None:
        return Finding("clock", UNKNOWN, "not compared with another node's: name one with --bootstrap")
    try:
        health.check(skew)
    except ClockTooFarOff as error:
        return Finding("clock", ERROR, *halves(str(error)))
    for finding in health.health(None, skew):
        return Finding("clock", finding.level, *halves(f"{finding.text.removeprefix('clock: ')}: {finding.remedy}"))
    return Finding("clock", OK, f"within {span(health.WARN_S)} of the others'")


def port(listen: Address, trouble: NolocoError | None, held_by_node: bool) -> Finding:
    """Its subject is `listen` where nobody may listen there at all."""
    if held_by_node:
        return Finding("port", OK, "held by the node that runs here")
    if trouble:
        text, _, remedy = str(trouble).rpartition(": ")  # an address may end in a colon
        return Finding("port" if isinstance(trouble, PortInUse) else "listen", ERROR, text, remedy)
    if listen.port == 0:
        return Finding("port", OK, "any free one; for port forwarding, fix it with `--listen /ip4/0.0.0.0/tcp/4001`")
    return Finding("port", OK, f"{listen} is free")


def reachable(verdict: str | None, asked: bool) -> Finding:
    """`asked`: whether there was a node to ask."""
    match verdict:
        case None if not asked:
            return Finding("reachable", UNKNOWN, "no node to ask: start one here, or name one with --bootstrap")
        case None:
            text = "not known: the nodes that were asked are on this machine, or did not answer"
            return Finding("reachable", UNKNOWN, text)
        case str() if verdict in (DIRECTLY, MAPPED):
            return Finding("reachable", OK, "directly" if verdict == DIRECTLY else "at a port of the router")
        case str() if verdict == RELAYED:
            return Finding("reachable", WARNING, *halves(str(health.advice(RELAYED))))
        case _:
            return Finding("reachable", WARNING, *halves(str(health.advice(OUTGOING))))


def bootstrap(addresses: Sequence[Address], failure: str | None, runs: Sequence[str] | None) -> Finding:
    """`failure`: why none answered; `runs`: the runs that they know."""
    if not addresses:
        return Finding("bootstrap", UNKNOWN, "none given: `noloco-node doctor --bootstrap <address>` checks one")
    if failure:
        return Finding("bootstrap", ERROR, failure, "" if "?" in failure else "ask the run's author for the address")
    if not runs:
        return Finding("bootstrap", WARNING, "it answers and knows no run", "start one: `noloco-node start run.toml`")
    return Finding("bootstrap", OK, f"it answers and knows {', '.join(runs)}")


def home(place: Place) -> Finding:
    if place.socket_bytes > MAX_SOCKET_PATH_BYTES:
        text = f"{place.root} is too long for a control socket"
        return Finding("home", ERROR, text, "name a shorter directory with --home or NOLOCO_HOME")
    if not place.writable:
        text = f"{place.root} cannot be {'written' if place.exists else 'created'}"
        return Finding("home", ERROR, text, "name another directory with --home or NOLOCO_HOME")
    if place.exists and not place.ours:
        return Finding("home", WARNING, f"{place.root} belongs to another user", "name one of yours with --home")
    if place.exists and place.mode & 0o077:
        text = f"other users can read {place.root}"
        command = f"chmod 700 {shlex.quote(place.root)}"
        remedy = f"`{command}`, or if others use it too, as /tmp, name one of its own with --home"
        return Finding("home", WARNING, text, remedy)
    return Finding("home", OK, place.root if place.exists else f"{place.root} will be created")


def node(view: StatusView | None, trouble: str | None) -> list[Finding]:
    """The node that runs here, and its own findings. `trouble`: why a running node does not answer."""
    if trouble:
        return [Finding("node", ERROR, trouble)]
    if view is None:
        return [Finding("node", OK, "none is running here")]
    in_run = f" in {view.run}, round {view.round}" if view.run else ""
    waiting = f", waiting for {view.waiting_for}" if view.waiting_for else ""
    health = (Finding("node", found.level, found.text, found.remedy) for found in view.health)
    return [Finding("node", OK, f"{view.name} is {view.state}{in_run}{waiting}"), *health]


def exit_code(findings: Iterable[Finding]) -> int:
    errors = {finding.subject for finding in findings if finding.level == ERROR}
    own = (kind.exit_code for subject, kind in _KINDS.items() if subject in errors)
    return next(own, 1 if errors else 0)


def halves(sentence: str) -> tuple[str, str]:
    """The problem, and what to do about it."""
    text, _, remedy = sentence.partition(": ")
    return text, remedy
