"""Small replicas for these tests: a Llama of 3 k parameters, and a text that is made here."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noloco_node.core.codecs.codec import Codec, carry
from noloco_node.data.corpus import Corpus
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training.background_copy import Copies
from noloco_node.training.build import build_replica
from noloco_node.training.mailbox import Correct
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
FRAGMENT = 1000
CPU = torch.device("cpu")


def small_run(steps: int = 3, rounds: int = 4, **inner: float) -> Manifest:
    return Manifest(
        name="small",
        rounds=rounds,
        model=ModelSpec(architecture="LlamaConfig", config={**SMALL, "tie_word_embeddings": True}),
        data=DataSpec(sequence_length=16),
        inner=InnerSpec(**{"steps": steps, "batch_tokens": 64, "precision": "fp32", **inner}),
    )


def timed_run(seconds: float, rounds: int = 4) -> Manifest:
    run = small_run(rounds=rounds)
    inner = InnerSpec(seconds=seconds, batch_tokens=64)
    return run.model_copy(update={"inner": inner})


def small_text() -> Corpus:
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, size=n).astype(np.uint8) for n in rng.integers(2, 9, size=30)]
    text = np.concatenate([words[i] for i in rng.integers(30, size=1000)])
    return Corpus(train=text[500:], held_out=text[:500])


def small_replica(peer: str = "a", run: Manifest | None = None, device: str = "cpu") -> Replica:
    return build_replica(run or small_run(), peer, device=device, threads=1, corpus=small_text())


def train(inner: Replica, steps: int) -> list[float]:
    """Steps, with the local outer step wherever a phase ends."""
    losses = []
    for _ in range(steps):
        losses.append(inner.step())
        if inner.position.phase_over:
            inner.boundary()
    return losses


def correct(thread: TrainingThread, offered_round: int, start: int, c: Tensor, exchange: bytes = b"") -> "Future[None]":
    """As an offer sends a correction. Done when it was added, or never will be."""
    command = Correct(offered_round, start, c, Future(), exchange=exchange)
    thread._mailbox.post(command)
    return command.added


def live_state(replica: Replica) -> bytes:
    """The state that a joining node gets from it."""
    replica.slow.arrive()
    return replica.phi.cpu().numpy().tobytes() + replica.delta.cpu().numpy().tobytes()


def exchange(
    one: Replica, other: Replica, codecs: tuple[Codec, Codec], fragment: int = FRAGMENT
) -> list[tuple[Tensor, Tensor]]:
    """A boundary of both, and a whole swap right after it, fragment by fragment. Returns the corrections."""
    us = one.snapshot()[0], other.snapshot()[0]
    one.boundary()
    other.boundary()
    corrections = []
    for index, start in enumerate(range(0, one.parameters, fragment)):
        talks = [c.converse(u[start : start + fragment], index, bytes(16)) for c, u in zip(codecs, us, strict=True)]
        mine, theirs = carry(talks[0], talks[1])
        one.slow.apply(start, mine, one.round)
        other.slow.apply(start, theirs, other.round)
        corrections.append((mine, theirs))
    return corrections


class HeldUp(Copies):
    """Its threads get no turn before `go_on`: until then only what is about to change is copied."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self._held: list[threading.Thread] = []

    def _start(self, work: Callable[[], None]) -> threading.Thread:  # type: ignore[override]
        self._held.append(threading.Thread(target=work))
        return self._held[-1]

    def go_on(self) -> None:
        """To the end of all copies under way."""
        held, self._held = self._held, []
        for thread in held:
            thread.start()
        for thread in held:
            thread.join()

    def complete(self) -> None:
        self.go_on()
        super().complete()


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """To the bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    else:
        assert one == other, where
