"""What an inner step, a boundary, a correction and a checkpoint make the host wait for, and what the GPU does then.

Synchronisations are those that torch reports (`torch.cuda.set_sync_debug_mode`), each with the line of the package that
it comes from; a call of `synchronize` itself is none of them. The profile is of whole steps: kernels by their time, and
the gaps in which none runs.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from checks.models import replica as small_replica
from checks.models import small_run
from checks.place import Place, Row, Seen, own_frame
from checks.threads import swap

from noloco_node.core import gpu, outer
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.fragments import Cut
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.build import build_replica
from noloco_node.training.mailbox import Command, Correct
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS

MICRO_BATCHES = 4
KERNELS = 25
FUSED = ("flash", "fmha", "sdpa")
"""In the names of kernels that compute attention without a table of (length, length)."""
PIECES = 20, 24, 27
GAP_S = 20e-6
"""Shorter ones lie between any two kernels."""


def what_the_host_waits_for(place: Place) -> Seen:
    """One synchronisation a step, however many micro-batches it has; none a correction."""
    place.require_gpu("a CPU has nothing to wait for")
    inner = _replica(place, MICRO_BATCHES)
    for _ in range(3):
        inner.step()
    seen: dict[str, Counter[str]] = {}
    for what, work in _works(place, inner):
        with _counted() as found:
            work()
        seen[what] = found
    counts = {what: sum(found.values()) for what, found in seen.items()}
    micro = inner.micro_batches
    row = place.figure(
        f"synchronisations of a step of {micro} micro-batches", "<= 1", str(counts["step"]), counts["step"] <= 1
    )
    more = ", ".join(f"{what} {count}" for what, count in counts.items() if what != "step")
    rows = [row, place.figure("synchronisations elsewhere", "-", more, True)]
    return Seen(rows, {"by_line": {what: dict(found.most_common(20)) for what, found in seen.items()}})


def where_the_time_of_a_step_goes(place: Place) -> Seen:
    inner = _replica(place, 1)
    for _ in range(3):
        inner.step()
    facts = profiled(place, lambda: [inner.step() for _ in range(3)])
    return Seen(rows_of(place, "350m", facts), facts)


def where_the_time_of_a_round_goes(place: Place) -> Seen:
    """The snapshot, the local step, and corrections of every fragment; in pieces of several sizes."""
    inner = _replica(place, 1)
    inner.step()
    fragment = Cut.of(inner.parameters, FRAGMENT_ELEMENTS).each
    c = torch.full((fragment,), 1e-7, device=place.device)

    def round_() -> None:
        inner.snapshot()
        inner.boundary()
        for start in range(0, inner.parameters, fragment):
            inner.slow.apply(start, c[: inner.parameters - start], inner.round)

    found = {}
    for size in PIECES:
        with patch.object(outer, "GPU_PIECE", 1 << size):
            round_()
            inner.slow.let_stay()
            inner.step()
            found[f"2^{size}"] = profiled(place, round_)
            inner.slow.let_stay()
    said = ", ".join(f"{size} {facts['seconds'] * 1e3:.0f}" for size, facts in found.items())
    row = place.figure("350m: a boundary with all corrections, ms, by the piece", "-", said, True)
    return Seen([row], {"parameters": inner.parameters, "pieces": found})


# ---- synchronisations ------------------------------------------------------------------------------------------------
def _works(place: Place, inner: Replica) -> Iterator[tuple[str, Callable[[], object]]]:
    """In this order, as one makes the next one possible."""
    yield "step", inner.step
    made: list[Any] = []
    yield "snapshot", lambda: made.append(inner.snapshot())
    yield "boundary", inner.boundary
    posted: list[Command] = []
    threads = [CodecThread(codec("lattice:3"), posted.append, FRAGMENT_ELEMENTS) for _ in range(2)]
    ((u, moved),) = made
    offers = [Offer(thread, inner.round, u.clone(), moved, place.device) for thread in threads]

    def swapped() -> None:
        for _ in swap(*offers, bytes(16)):
            pass

    yield "both sides of a swap", swapped
    for thread in threads:
        thread.close()
    ours = [command for command in posted if isinstance(command, Correct)][::2]

    def corrected() -> None:
        for each in ours:
            gpu.wait(each.ready, place.device)
            inner.slow.apply(each.start, each.correction, each.offered_round, each.kept)

    def verdict() -> None:
        with inner.trying_others():
            inner.losses()
            inner.losses_without()

    yield f"{len(ours)} corrections", corrected
    yield "evaluation", inner.evaluate
    yield "verdict", verdict
    inner.slow.let_stay()
    yield "checkpoint", inner.state


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Of all threads: by the line of the package."""
    found: Counter[str] = Counter()

    def note(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            found[own_frame(traceback.extract_stack()) or "elsewhere"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- the profile -----------------------------------------------------------------------------------------------------
def profiled(place: Place, work: Callable[[], object]) -> dict[str, Any]:
    """Seconds without the profiler, and what it said."""
    from torch.profiler import ProfilerActivity, profile

    place.synchronize()
    began = place.mark()
    work()
    usual_s = began.until(place.mark())
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    try:
        with profile(activities=kinds) as found:
            work()
            place.synchronize()
    except RuntimeError as error:  # it needs a library of the driver's
        return {"seconds": usual_s, "profiler": f"{type(error).__name__}: {error}"}
    on_gpu = [event for event in found.events() if str(event.device_type).endswith("CUDA")] if place.on_gpu else []
    averages = found.key_averages()
    time_of = "self_device_time_total" if place.on_gpu else "self_cpu_time_total"
    top = sorted(averages, key=lambda each: -getattr(each, time_of))[:KERNELS]
    facts: dict[str, Any] = {
        "seconds": usual_s,
        "top": [{"what": each.key[:120], "ms": getattr(each, time_of) / 1e3, "times": each.count} for each in top],
    }
    calls = {each.key: each.count for each in averages if each.key.startswith(("cuda", "hip"))}
    facts["runtime_calls"] = dict(sorted(calls.items(), key=lambda call: -call[1])[:15])
    names = Counter(event.name[:120] for event in on_gpu)
    facts["attention"] = {name: times for name, times in names.items() if any(word in name.lower() for word in FUSED)}
    return facts | (_gaps(on_gpu) if on_gpu else {})


def _gaps(events: list[Any]) -> dict[str, Any]:
    """Where no kernel and no copy runs on the GPU. Profiler's times are microseconds."""
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    began, reached, last = spans[0][0], spans[0][1], spans[0][2]
    idle, gaps = 0.0, []
    for start, end, name in spans:
        if start > reached:
            idle += start - reached
            gaps.append((start - reached, last, name))
        if end > reached:
            reached, last = end, name
    long = sorted((gap for gap in gaps if gap[0] > GAP_S * 1e6), reverse=True)
    return {
        "kernels": len(spans),
        "kernel_share": 1 - idle / max(reached - began, 1e-9),
        "idle_ms": idle / 1e3,
        "long_gaps": len(long),
        "longest_gaps": [
            {"ms": gap / 1e3, "after": after[:80], "before": before[:80]} for gap, after, before in long[:10]
        ],
    }


def rows_of(place: Place, what: str, facts: dict[str, Any]) -> list[Row]:
    if "kernel_share" not in facts:
        return []
    share, fused = facts["kernel_share"], sum(facts["attention"].values())
    return [
        place.figure(f"{what}: a kernel runs, of a step's time, with a profiler", "-", f"{share:.1%}", True),
        place.figure(f"{what}: calls of fused attention's kernels", "> 0", str(fused), fused > 0),
    ]


def _replica(place: Place, micro_batches: int) -> Replica:
    if place.quick:
        return small_replica(place, small_run(place), micro_batch=None)
    batch, length = 32_768, 1024
    run = Manifest(
        name="profile",
        rounds=100,
        model=ModelSpec(architecture="LlamaConfig", config={**model.PRESETS["350m"], "vocab_size": 32_000}),
        data=DataSpec(sequence_length=length),
        inner=InnerSpec(steps=50, batch_tokens=batch),
    )
    return build_replica(run, "visit", device=str(place.device), micro_batch=batch // length // micro_batches)


CHECKS = (what_the_host_waits_for, where_the_time_of_a_step_goes, where_the_time_of_a_round_goes)
