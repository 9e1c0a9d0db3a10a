"""A language model whose steps take a fixed time, as on an accelerator of which there is only a part: the task `bench`.

Several nodes share the cores of one machine here, so a step's own time would say how many nodes there are. Each step
really trains, and waits at the end of its backward pass until its fixed time is over. What comes between two steps
(optimizers, boundaries, evaluations, a synchronisation that nobody hides) takes the time that it takes. Ours and the
rivals train this task: the same model, first weights, data and batch.

A process with BENCH_WEIGHTS=<folder> in its environment leaves its weights there from time to time, as half-precision
numbers named by the time: `losses` evaluates them afterwards on more held-out text than a node could in a run.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.data import corpus
from noloco_node.data.stream import spread
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.background_copy import host_memory
from noloco_node.training.language import Language
from noloco_node.training.task import Batch

NAME = "bench"
WEIGHTS = "BENCH_WEIGHTS"
HELD_OUT = 64
"""Windows of `losses`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and how fast."""

    hidden: int = 384
    layers: int = 6
    length: int = 64
    tokens: int = 128
    """Of a step."""
    step_s: float = 1.0
    held_out: int = 1
    """Windows that a node evaluates at a time: three times a round, in CPU time that no accelerator shortens here."""
    every_s: float = 10.0
    """How often weights are left, at most."""

    @property
    def model(self) -> ModelSpec:
        sizes = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        return ModelSpec(architecture="LlamaConfig", config={**sizes, "num_attention_heads": 4})

    @property
    def inner(self) -> dict[str, Any]:
        """For the run: a constant learning rate, as nobody knows the last step."""
        return {"batch_tokens": self.tokens, "learning_rate": 1e-3, "warmup": 0.0}

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self)


class Paced(Language):
    def __init__(self, options: Mapping[str, Any], seed: int) -> None:
        self.setting = setting = Setting(**options)
        data = DataSpec(sequence_length=setting.length)
        inner = InnerSpec(batch_tokens=max(setting.tokens, setting.length))
        run = Manifest(name=NAME, seed=seed, model=setting.model, data=data, inner=inner)
        text = corpus.load(data)
        super().__init__(run, text)
        self.held_out = spread(text.held_out, setting.length, setting.held_out)
        self._began = 0.0
        self._trained = False
        self._folder, self._left_at = os.environ.get(WEIGHTS), 0.0
        self._to_leave: nn.Module | None = None
        self._saving = ThreadPoolExecutor(1)
        self.step_s = 0.0
        """In all steps: forward, backward and the pause."""

    def model(self) -> nn.Module:
        module = super().model()
        first = next(module.parameters())  # the embedding, whose gradient is the last to be whole
        first.register_post_accumulate_grad_hook(lambda _: self._end_step())  # type: ignore[no-untyped-call]
        return module

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if module.training:
            self._began, self._trained = time.monotonic(), True
        return super().loss(module, batch)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        self.leave_weights(module)
        return super().evaluate(module, examples)

    def leave_weights(self, module: nn.Module) -> None:
        """Where they were trained since, and the last ones are old enough. They are copied in the next step's pause, as
        that is no part of training: AdamW has not changed them yet."""
        if self._folder and self._trained and time.time() >= self._left_at + self.setting.every_s:
            self._trained, self._left_at, self._to_leave = False, time.time(), module

    def _leave(self, module: nn.Module, folder: str) -> None:
        named = model.parameters(module)
        flat = host_memory([sum(p.numel() for _, p in named)], torch.half)
        for (_, start, end), (_, p) in zip(model.places(named), named, strict=True):
            flat[start:end] = p.detach().flatten()
        self._saving.submit(_save, flat, Path(folder, f"{self._left_at:.3f}"))

    def _end_step(self) -> None:
        module, self._to_leave = self._to_leave, None
        if module and self._folder:
            self._leave(module, self._folder)
        time.sleep(max(0.0, self._began + self.setting.step_s - time.monotonic()))
        self.step_s += time.monotonic() - self._began


def _save(flat: Tensor, path: Path) -> None:
    """Whole or not at all: the node may be ended meanwhile."""
    unfinished = path.with_name(f".{path.name}")
    torch.save(flat, unfinished)
    unfinished.rename(path)


def batches(task: Paced, peer_id: str) -> Iterator[Batch]:
    stream = task.stream(peer_id)
    while True:
        yield stream.next(task.setting.tokens // task.setting.length)


def losses(setting: Setting, folder: Path, began: float) -> list[tuple[float, float]]:
    """On held-out text, of the first weights and of those that were left in a folder since: by seconds."""
    judge = Paced({**setting.options, "held_out": HELD_OUT}, 1)
    module = judge.model().eval()
    theta = model.flatten(module)
    with torch.no_grad():
        found = [(0.0, judge.evaluate(module, judge.micro_examples))]
        for second, path in sorted((float(path.name) - began, path) for path in folder.glob("[0-9]*")):
            if second > 0:
                theta.copy_(torch.load(path, weights_only=True))
                found.append((second, judge.evaluate(module, judge.micro_examples)))
    return found


def install(folder: Path) -> Path:
    """The task as an installed package: this folder is to be in a node's PYTHONPATH."""
    there = folder / "noloco_bench_task-1.dist-info"
    there.mkdir(parents=True)
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: noloco-bench-task\nVersion: 1\n")
    (there / "entry_points.txt").write_text(f"[noloco_node.tasks]\n{NAME} = {Paced.__module__}:{Paced.__name__}\n")
    return folder
