"""Small replicas for these tests: a Llama of 3 k parameters, and a text that is made here."""

from concurrent.futures import Future

import numpy as np
from torch import Tensor

from noloco_node.core.codecs.codec import Codec, carry
from noloco_node.data.corpus import Corpus
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training.mailbox import Correct
from noloco_node.training.replica import Replica
from noloco_node.training.state_snapshot import Snapshot
from noloco_node.training.thread import TrainingThread

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
FRAGMENT = 1000


def small_run(steps: int = 3, rounds: int = 4, **inner: float) -> Manifest:
    return Manifest(
        name="small",
        rounds=rounds,
        model=ModelSpec(architecture="LlamaConfig", config={**SMALL, "tie_word_embeddings": True}),
        data=DataSpec(sequence_length=16),
        inner=InnerSpec(steps=steps, batch_tokens=64, **inner),
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
    return Replica.build(run or small_run(), peer, device=device, threads=1, corpus=small_text())


def train(inner: Replica, steps: int) -> list[float]:
    """Steps, with the local outer step wherever a phase ends."""
    losses = []
    for _ in range(steps):
        losses.append(inner.step())
        if inner.phase_over:
            inner.boundary()
    return losses


def correct(thread: TrainingThread, offered_round: int, start: int, c: Tensor) -> "Future[None]":
    """As an offer sends a correction. Done when it was added, or never will be."""
    command = Correct(offered_round, start, c, Future())
    thread._mailbox.post(command)
    return command.added


def live_state(replica: Replica) -> bytes:
    """The state that a joining node gets from it."""
    snapshot = Snapshot(replica.round, replica.phi, replica.delta)
    snapshot.complete()
    return bytes(snapshot.data())


def exchange(
    one: Replica, other: Replica, codecs: tuple[Codec, Codec], fragment: int = FRAGMENT
) -> list[tuple[Tensor, Tensor]]:
    """A boundary of both, and a whole swap right after it, fragment by fragment. Returns the corrections."""
    us = one.snapshot(), other.snapshot()
    one.boundary()
    other.boundary()
    corrections = []
    for index, start in enumerate(range(0, one.parameters, fragment)):
        talks = [c.converse(u[start : start + fragment], index, bytes(16)) for c, u in zip(codecs, us, strict=True)]
        mine, theirs = carry(talks[0], talks[1])
        one.apply(start, mine, one.round)
        other.apply(start, theirs, other.round)
        corrections.append((mine, theirs))
    return corrections
