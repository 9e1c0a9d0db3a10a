"""Compare this package's inner loop with a plain PyTorch loop: the same model, batches and settings, steps in turn.

Equal losses show that both train the same. The ratio of their times, step against step, is what the package's loop
costs, even on a busy machine. On a GPU both have the same micro-batch, with which both fit into its memory together.
Also measured is what a round takes from training: its boundary with the snapshot, a correction of every element, and
what is evaluated.
Memory is measured of each loop alone, in a process of its own: on a GPU the most that torch had allocated, on a CPU the
most that the process grew by (Linux only). Ours then holds an open offer and a checkpoint that is being written, as a
node does at times while it trains.
"""

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from noloco_node.bench import Say, plain_loop
from noloco_node.core.device import choose_device, multiplies_bf16
from noloco_node.core.fragments import Cut
from noloco_node.core.state import STATE_BYTES
from noloco_node.data.corpus import load as load_corpus
from noloco_node.host import memory
from noloco_node.run.manifest import parse
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import memory_budget, model
from noloco_node.training.build import build_replica
from noloco_node.training.inner.gradients import ShortOfMemory
from noloco_node.training.replica import Replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS

T = TypeVar("T")

PEER = "bench"
VOCABULARY = 32_000
"""Vocabulary size of all models but the tiny one, as in the papers; the text is bytes, so most entries are unused."""
WARM_UP = 2
"""Steps that are not timed: libraries load, and the micro-batch is found."""
MEMORY_STEPS = 3
SIZES = {
    "cpu": {"batch_tokens": 1024, "sequence_length": 128},
    "cuda": {"batch_tokens": 65_536, "sequence_length": 1024},
}
"""Of a step, unless the user sets it; a GPU's batch would take a CPU an hour."""
OUTER_BYTES = sum(memory_budget.SLOW.values()) + STATE_BYTES
"""Per parameter: φ, δ, length corrections, snapshot and checkpoint, which a plain loop does not have."""
ROUNDS = 3
"""Rounds whose stall is measured."""


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    parameters: int
    device: str
    precision: str
    steps: int
    batch_tokens: int
    sequence_length: int
    micro_batch: int
    loss_difference: float
    """Largest relative difference over all steps."""
    step_s: float
    plain_step_s: float
    overhead: float
    """Median over the pairs of steps of ours/plain - 1."""
    stall_s: float
    """The training time that a round costs, its boundary and corrections: median of ROUNDS."""
    evaluate_s: float
    """What its evaluations cost on top: at the boundary, and twice when the swap is judged."""
    tokens_per_s: float
    plain_tokens_per_s: float
    mfu: float | None
    """The share of the GPU's peak that the model's products use; None where the peak is not known."""
    plain_mfu: float | None
    peak_bytes: int
    plain_peak_bytes: int
    outer_bytes: int
    """Of the peak, φ, δ, an offer's snapshot and a checkpoint."""


def manifest(name: str, steps: int, batch_tokens: int, sequence_length: int, precision: Any = "bf16") -> Manifest:
    config = {**model.PRESETS[name], "vocab_size": VOCABULARY}
    return Manifest(
        name="bench",
        rounds=1,  # one round holds all steps: there is no partner
        model=ModelSpec(preset=name) if name == "tiny" else ModelSpec(architecture="LlamaConfig", config=config),
        data=DataSpec(sequence_length=sequence_length),
        inner=InnerSpec(steps=min(steps + WARM_UP, 100_000), batch_tokens=batch_tokens, precision=precision),
    )


def run(name: str, run: Manifest, device: str, threads: int | None, say: Say) -> Report:
    inner, losses, pairs = _both(run, device, threads, say)
    rounds = []
    for done in range(ROUNDS):
        say("what a round takes from training", done, ROUNDS)
        rounds.append((stall(inner), evaluating(inner)))
    stall_s, evaluate_s = (median(column) for column in zip(*rounds, strict=True))
    on, micro_batch, parameters = inner.theta.device, inner.micro_batch, inner.parameters
    step_s, plain_step_s = (median(column) for column in zip(*pairs, strict=True))
    mfu, plain_mfu = (inner.mfu(run.inner.batch_tokens / seconds) for seconds in (step_s, plain_step_s))
    del inner
    _give_back(on)
    peak, plain_peak = _peaks(run, device, micro_batch, say)
    return Report(
        model=name,
        parameters=parameters,
        device=torch.cuda.get_device_name(on) if on.type == "cuda" else "cpu",
        precision=run.inner.precision if multiplies_bf16(on) else "fp32",
        steps=len(pairs),
        batch_tokens=run.inner.batch_tokens,
        sequence_length=run.data.sequence_length,
        micro_batch=micro_batch,
        loss_difference=max(abs(mine / other - 1) for mine, other in losses),
        step_s=step_s,
        plain_step_s=plain_step_s,
        overhead=median(mine / other for mine, other in pairs) - 1,
        stall_s=stall_s,
        evaluate_s=evaluate_s,
        tokens_per_s=run.inner.batch_tokens / step_s,
        plain_tokens_per_s=run.inner.batch_tokens / plain_step_s,
        mfu=mfu,
        plain_mfu=plain_mfu,
        peak_bytes=peak,
        plain_peak_bytes=plain_peak,
        outer_bytes=int(OUTER_BYTES * parameters),
    )


def _both(
    run: Manifest, device: str, threads: int | None, say: Say
) -> tuple[Replica, list[tuple[float, float]], list[tuple[float, float]]]:
    """Our loop, and what `in_turn` found: with a smaller micro-batch, if a GPU has no room for both models."""
    micro_batch = None
    while True:
        say("building the model", 0, 1)
        inner = build_replica(run, PEER, device=device, threads=threads, micro_batch=micro_batch)
        on = inner.theta.device
        try:
            return inner, *in_turn(inner, run, say)
        except (torch.OutOfMemoryError, ShortOfMemory):
            if inner.micro_batch == 1:
                raise
            micro_batch = inner.micro_batch // 2
        del inner  # outside of the block above, whose error refers to it
        _give_back(on)


def _give_back(device: torch.device) -> None:
    """What torch keeps of the GPU for later, and what only waits to be collected."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _plain_loop(run: Manifest, device: torch.device, micro_batch: int) -> Iterator[float]:
    corpus, length = load_corpus(run.data), run.data.sequence_length
    stream = corpus.stream(length, run.seed, PEER)
    module = model.build(run.model, corpus.tokenizer.vocabulary, run.seed, length).to(device).train()
    examples = run.inner.batch_tokens // length
    return plain_loop.train(module, lambda: stream.next(examples)[0], run.inner, run.inner.steps or 0, micro_batch)


def in_turn(inner: Replica, run: Manifest, say: Say) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Losses of all steps, and seconds of those after the warm-up, as (ours, plain). They take turns in going first.
    Raises OutOfMemoryError where the two do not fit beside each other."""
    device, first = inner.theta.device, inner.step()  # which finds the micro-batch
    micro_batch = inner.micro_batch
    theirs = _plain_loop(run, device, micro_batch)

    def ours() -> tuple[float, float]:
        return _timed(inner.step, device)

    def plains() -> tuple[float, float]:
        return _timed(lambda: next(theirs), device)

    losses, pairs = [(first, next(theirs))], []
    for step in range(1, steps := run.inner.steps or 0):
        say("a step of each loop in turn", step - 1, steps - 1)
        if step % 2:
            other, mine = plains(), ours()
        else:
            mine, other = ours(), plains()
        losses.append((mine[0], other[0]))
        pairs.append((mine[1], other[1]))
    if inner.micro_batch != micro_batch:  # ours takes fewer at once where memory is short
        raise torch.OutOfMemoryError
    return losses, pairs[WARM_UP - 1 :]


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What it returns, and its seconds."""
    _wait_for(device)
    began = time.perf_counter()
    result = work()
    _wait_for(device)
    return result, time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stall(inner: Replica) -> float:
    """Seconds of a boundary with an offer, and of the corrections of a swap."""
    inner.slow.let_stay()  # those of the swap before
    inner.step()
    device = inner.theta.device
    size = Cut.of(inner.parameters, FRAGMENT_ELEMENTS).each
    correction = torch.full((size,), 1e-6, device=device)

    def round_() -> None:
        offer(inner)
        for start in range(0, inner.parameters, size):
            inner.slow.apply(start, correction[: inner.parameters - start], inner.round)

    return _timed(round_, device)[1]


def evaluating(inner: Replica) -> float:
    """Seconds of a round's evaluations: at its boundary, and of the swap, with it and without."""

    def round_() -> None:
        inner.evaluate()
        with inner.trying_others():
            inner.losses_without(own=inner.losses().own_counts)

    return _timed(round_, inner.theta.device)[1]


def offer(inner: Replica) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A boundary, as in training/thread.py."""
    made = inner.snapshot()
    inner.boundary()
    return made


# ---- memory ----------------------------------------------------------------------------------------------------------
def _peaks(run: Manifest, device: str, micro_batch: int, say: Say) -> tuple[int, int]:
    """Peak bytes of our loop and of the plain one, each in a fresh process, one after the other."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        work = [pool.submit(_peak, run.canonical(), device, micro_batch, ours) for ours in (True, False)]
        say("the memory of each loop alone", 0, len(work))
        ours_peak = work[0].result()
        say("the memory of each loop alone", 1, len(work))
        return ours_peak, work[1].result()


def _peak(canonical: bytes, device: str, micro_batch: int, ours: bool) -> int:
    run, where = parse(canonical), choose_device(device)
    import transformers.models.llama.modeling_llama  # noqa: F401 - is no part of either loop

    before = _forget_peak(where)
    if ours:
        inner = build_replica(run, PEER, device=device, micro_batch=micro_batch)
        for _ in range(MEMORY_STEPS):
            inner.step()
        _open, _written = offer(inner), inner.state()  # held while training goes on
        inner.step()
    else:
        theirs = _plain_loop(run, where, micro_batch)
        for _ in range(MEMORY_STEPS):
            next(theirs)
    return (torch.cuda.max_memory_allocated(where) if where.type == "cuda" else memory.peak_bytes() or 0) - before


def _forget_peak(device: torch.device) -> int:
    """Reset the peak; the bytes that are in use already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    return memory.forget_peak() or memory.process_bytes() or 0
