"""Stages of a small model in one process, each on a thread of its own, without a network."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from replicas import small_text

from noloco_node.core.codecs.activations import activation_codec
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec, StagesSpec
from noloco_node.stages.letters import Answer, Answered, Asked, Letter, Lost, Sent
from noloco_node.stages.part import Position, part_of
from noloco_node.stages.passes import StageTask
from noloco_node.training.build import build_replica
from noloco_node.training.task import Task

BUILT: dict[str, Any] = {"device": "cpu", "threads": 1, "corpus": small_text()}
CODEC = activation_codec("fp32")
EXACT: dict[str, Any] = {"clip": 1000.0, "precision": "fp32"}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}


def staged_run(stages: int = 2, steps: int = 5, rounds: int = 10, **inner: float) -> Manifest:
    return Manifest(
        name="small",
        rounds=rounds,
        model=ModelSpec(architecture="LlamaConfig", config={**LLAMA, "tie_word_embeddings": False}),
        data=DataSpec(sequence_length=16),
        inner=InnerSpec(**{**EXACT, "steps": steps, "batch_tokens": 64, "learning_rate": 0.01, **inner}),
        stages=StagesSpec(count=stages, activations="fp32"),
    )


class Wire:
    """Puts a stage's micro-batches into the next one's letters, and the answers into its own."""

    def __init__(self, letters: "queue.SimpleQueue[Letter]") -> None:
        self.letters = letters
        self.next: queue.SimpleQueue[Letter] | None = None
        self.spoil: Callable[[Answer], Answer | None] = lambda answer: answer
        """What becomes of an answer; None: it is lost."""
        self.ready: Callable[[], bool] = lambda: True

    def send(self, micro: Sent) -> None:
        answer: Future[Answer] = Future()

        def came(done: "Future[Answer]") -> None:
            found = None if done.exception() else self.spoil(_told(done.result()))
            self.letters.put(Answered(micro.ticket, found) if found else Lost(micro.ticket))

        answer.add_done_callback(came)
        assert self.next is not None
        sent = (_carried(micro.activations), micro.targets, micro.evaluates, micro.until, answer)
        self.next.put(Asked(*sent, tries=micro.tries))


def _told(answer: Answer) -> Answer:
    return answer if answer.gradient is None else replace(answer, gradient=_carried(answer.gradient))


def _carried(values: torch.Tensor) -> torch.Tensor:
    """As another node gets them."""
    return CODEC.decode(CODEC.encode(values), values.shape, torch.device("cpu"))


class StageInTest:
    def __init__(self, run: Manifest, stage: int, peer: str = "a", in_flight: int | None = 1, **built: Any) -> None:
        """`built`: how the replica is made, where not on a CPU with the small text."""
        assert run.stages
        self.letters: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self.wire = Wire(self.letters)
        at = Position(stage, run.stages.count)

        def part(whole: Task) -> Task:
            self.task = StageTask(part_of(whole, run, at), whole, at, self.wire, self.letters, in_flight)
            return self.task

        self.replica = build_replica(run, peer, part=part, **{**BUILT, **built})
        self.losses: list[float] = []

    def train(self, steps: int, stop: threading.Event) -> None:
        torch.set_num_threads(1)
        while len(self.losses) < steps and not stop.is_set():
            if self.replica.has_data(0.02):
                self.losses.append(self.replica.step())
        while not stop.is_set():
            self.replica.pass_on(0.02)


def chain(run: Manifest, in_flight: int | None = 1, **built: Any) -> list[StageInTest]:
    """One node a stage."""
    assert run.stages
    nodes = [StageInTest(run, stage, in_flight=in_flight, **built) for stage in range(run.stages.count)]
    for one, other in pairwise(nodes):
        one.wire.next = other.letters
    return nodes


def train_together(nodes: list[StageInTest], steps: int) -> None:
    """Until each has done so many steps."""
    stop = threading.Event()
    threads = [threading.Thread(target=node.train, args=(steps, stop)) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        while any(len(node.losses) < steps for node in nodes) and all(thread.is_alive() for thread in threads):
            stop.wait(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class TinyPart:
    """A part, and a whole task, of next to nothing: for what only carries micro-batches."""

    tokens_per_example = 4
    micro_examples = 8
    activations = (4, 3)
    targets = (4,)
    target_limit = 10

    def some_targets(self, examples: int) -> torch.Tensor:
        return torch.arange(4 * examples).remainder(self.target_limit).view(examples, 4)
