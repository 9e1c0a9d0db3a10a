"""The presets beside a plain PyTorch loop, step by step in turn; compiled, and what share of the arithmetic is used."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from checks.place import Place, Seen, Skip, require_close
from checks.profile_steps import profiled, rows_of
from torch import Tensor

from noloco_node.core import cross_entropy
from noloco_node.run.schema import Manifest
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica

OVERHEAD, MFU = 0.01, 0.40
STEPS = {"125m": 30, "350m": 16}
COMPILED_STEPS = 24
DIFFERENCES = 12
CHUNKS = 22, 24, 26, 28
PROGRAMS = (1024, 4), (4096, 8), (32768, 16)
"""Logits at once, and warps."""


def preset_125m(place: Place) -> Seen:
    return _beside_the_plain_loop(place, "125m")


def preset_350m(place: Place) -> Seen:
    return _beside_the_plain_loop(place, "350m")


def preset_350m_compiled(place: Place) -> Seen:
    place.require_s(60)
    if place.quick:
        place.require_gpu("compiling takes half a minute of a CPU")
    training = _bench()
    run = training.manifest("350m", COMPILED_STEPS, **sizes(place))
    replica = build_replica(run, "bench", device=str(place.device), compiled=True)
    began = place.mark()
    first = replica.step()
    compiling_s = began.until(place.mark())
    taken = []
    for _ in range(COMPILED_STEPS):
        began = place.mark()
        replica.step()
        taken.append(began.until(place.mark()))
    step_s = median(taken[2:])
    tokens_per_s = run.inner.batch_tokens / step_s
    mfu = replica.mfu(tokens_per_s)
    seen = "the card is not known" if mfu is None else f"{mfu:.3f}"
    row = place.figure("350m compiled, MFU", f">= {MFU}", f"{seen} ({tokens_per_s:.0f} tokens/s)", (mfu or 0) >= MFU)
    facts = {
        "first_step_s": compiling_s,
        "steps_s": taken,
        "mfu": mfu,
        "micro_batch": replica.micro_batch,
        "first_loss": first,
        "last_loss": replica.last_loss,
        **_memory(place),
    }
    profile = profiled(place, replica.step)
    held_out = partial(replica.losses, own=False)  # of the same weights as a step: `evaluate` is of others in a phase
    again = [place.seconds_of(work, times=1, warm_up=0) for work in 3 * (held_out, replica.step)]
    said = ", ".join(f"{s:.2f}" for s in again)
    elsewhere = place.figure("350m compiled: evaluation and step in turn, s: what is compiled again", "-", said, True)
    return Seen(
        [row, *rows_of(place, "350m compiled", profile), elsewhere], {**facts, "profile": profile, "again_s": again}
    )


def the_loss_of_many_tokens(place: Place) -> Seen:
    """Forward and backward, by our kernels and in chunks, of several sizes, beside torch's own."""
    tokens, words = (64, 500) if place.quick else (65_536, 32_000)
    logits = torch.randn(tokens, words, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(words, (tokens,), device=place.device)

    def gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(loss(logits, targets), logits)[0]

    def torchs(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x.float(), y)

    losses = [float(loss(logits, targets).detach()) for loss in (cross_entropy.cross_entropy, torchs)]
    one, other = gradient(cross_entropy.cross_entropy), gradient(torchs)
    apart = float((one - other).float().norm() / other.float().norm())
    del one, other
    place.tidy()

    def seconds(loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy.cross_entropy) -> float:
        taken = place.seconds_of(lambda: gradient(loss), times=5)
        place.tidy()
        return taken

    taken = {"torch": seconds(torchs)}
    with patch.object(cross_entropy, "_kernels", lambda: None):
        for size in CHUNKS:
            with patch.object(cross_entropy, "GPU_CHUNK", 1 << size):
                taken[f"2^{size}"] = seconds()
    if place.on_gpu and (kernels := cross_entropy._kernels()):
        for block, warps in PROGRAMS:
            with patch.multiple(kernels, BLOCK=block, OPTIONS={**kernels.OPTIONS, "num_warps": warps}):
                taken[f"{block}/{warps}"] = seconds()
    said = ", ".join(f"{what} {s * 1e3:.1f}" for what, s in taken.items())
    rows = [
        place.figure("loss of 65,536 tokens of 32,000, ms, by the chunk and by the program", "-", said, True),
        place.figure("its gradient beside torch's", "<= 1e-3 apart", f"{apart:.1e}", apart <= 1e-3),
    ]
    require_close("the loss of many tokens", *losses, 1e-5)
    return Seen(rows, {"seconds": taken, "losses": losses, "apart": apart})


def _beside_the_plain_loop(place: Place, name: str) -> Seen:
    place.require_s(30)
    training = _bench()
    run = training.manifest("tiny" if place.quick else name, 3 if place.quick else STEPS[name], **sizes(place))
    inner, losses, pairs = training._both(run, str(place.device), None, lambda *_: None)
    ratio = median(mine / other for mine, other in pairs) - 1
    step_s, plain_s = (median(column) for column in zip(*pairs, strict=True))
    mfu = inner.mfu(run.inner.batch_tokens / step_s)
    stalls = [training.stall(inner) for _ in range(3)]
    apart = max(abs(mine / other - 1) for mine, other in losses)
    said = f"{ratio:+.2%} ({step_s * 1e3:.1f} and {plain_s * 1e3:.1f} ms"
    said += ")" if mfu is None else f", MFU {mfu:.3f})"
    row = place.figure(f"{name} beside a plain loop", f"<= {OVERHEAD:+.0%}", said, ratio <= OVERHEAD)
    same = place.figure(f"{name}: losses beside a plain loop's", "<= 5% apart", f"{apart:.2%}", apart <= 0.05)
    facts = {"pairs_s": pairs, "mfu": mfu, "stalls_s": stalls, "micro_batch": inner.micro_batch, "losses": losses}
    facts |= {"parameters": inner.parameters, **_memory(place), **_differences(place, inner, run)}
    return Seen([row, same], facts)


def _differences(place: Place, inner: Replica, run: Manifest) -> dict[str, Any]:
    """What a step of ours does longer than one of the plain loop: milliseconds of its operations and kernels."""
    theirs = _bench()._plain_loop(run, inner.theta.device, inner.micro_batch)
    steps: dict[str, Callable[[], object]] = {"ours": inner.step, "plain": lambda: next(theirs)}
    for step in steps.values():
        step()
    found = {who: profiled(place, step) for who, step in steps.items()}
    ours, plain = ({each["what"]: each["ms"] for each in profile.get("top", ())} for profile in found.values())
    more = {what: ours.get(what, 0.0) - plain.get(what, 0.0) for what in {*ours, *plain}}
    largest = sorted(more.items(), key=lambda each: -abs(each[1]))[:DIFFERENCES]
    return {"profiles": found, "longer_ms": dict(largest)}


def sizes(place: Place) -> dict[str, int]:
    return _bench().SIZES["cpu" if place.quick else "cuda"]


def _memory(place: Place) -> dict[str, Any]:
    if not place.on_gpu:
        return {}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(place.device),
        "reserved_bytes": torch.cuda.max_memory_reserved(place.device),
        "allocation_retries": torch.cuda.memory_stats(place.device).get("num_alloc_retries"),
    }


def _bench() -> Any:
    try:
        from noloco_node.bench import training
    except ImportError as error:
        raise Skip(f"needs {error.name}: pip install {error.name}") from error
    return training


CHECKS = (the_loss_of_many_tokens, preset_350m, preset_350m_compiled, preset_125m)
