"""The models and texts that the checks train, and how their numbers are made the same each time."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from checks.place import Place, require_close, require_same
from replicas import SMALL

from noloco_node.data.corpus import Corpus
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica

MIDDLE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
"""3.3 M parameters: four fragments, whole products, and a step of some milliseconds."""


def small_run(place: Place, steps: int = 4, rounds: int = 8, precision: str = "fp32", **inner: Any) -> Manifest:
    shape, length, batch = (SMALL, 16, 64) if place.quick else (MIDDLE, 128, 4096)
    return Manifest(
        name="gpu",
        rounds=rounds,
        model=ModelSpec(architecture="LlamaConfig", config={**shape, "tie_word_embeddings": True}),
        data=DataSpec(sequence_length=length),
        inner=InnerSpec(**{"steps": steps, "batch_tokens": batch, "precision": precision, **inner}),
    )


@cache
def text() -> Corpus:
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, size=n).astype(np.uint8) for n in rng.integers(2, 9, size=300)]
    tokens = np.concatenate([words[i] for i in rng.integers(300, size=40_000)])
    return Corpus(train=tokens[20_000:], held_out=tokens[:20_000])


def replica(place: Place, run: Manifest, peer: str = "a", **options: Any) -> Replica:
    options = {"device": str(place.device), "micro_batch": 4 if place.quick else 16, **options}
    return build_replica(run, peer, corpus=text(), **options)


@contextmanager
def same_each_time() -> Iterator[None]:
    """Every operation gives the same bits each time. What is not set is NaN, so that nobody reads it unnoticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward pass stays as it is
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def vectors(inner: Replica) -> dict[str, torch.Tensor]:
    """θ, φ and δ, copied to the CPU when the device is done."""
    if inner.theta.is_cuda:
        torch.cuda.synchronize(inner.theta.device)
    return {"θ": inner.theta.cpu().clone(), "φ": inner.phi.cpu().clone(), "δ": inner.delta.cpu().clone()}


def require_same_vectors(what: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, vector in one.items():
        require_same(f"{what}, {name}", vector, other[name])


def require_close_vectors(
    what: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], relative: float
) -> None:
    """By the norm of the difference; of δ relative to φ, as it is small and a difference of larger ones."""
    for name, vector in one.items():
        apart = float((vector.double() - other[name].double()).norm())
        size = float(one["φ" if name == "δ" else name].double().norm())
        assert apart <= relative * size, f"{what}, {name}: {apart:.3g} apart, of {size:.3g}"


def require_close_losses(what: str, one: list[float], other: list[float], relative: float) -> None:
    assert len(one) == len(other)
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        require_close(f"{what}, step {step}", mine, theirs, relative)
