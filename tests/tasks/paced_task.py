"""A task whose steps take a fixed time and hardly any CPU: for tests of real nodes, where the cores are the bottleneck.

A linear map learns another one. Options: `step_s`, seconds a step takes (default 0.05); `outputs` of the map, each of
257 parameters (default 384: about 100,000 parameters in all);
`bad`, two batches of a stream, the first of several that hold NaN and the first that does not any more (default: none).
A box with PACED_SLOWER=4 in its environment takes four times as long; PACED_READY_S=30: its data come after 30 s;
PACED_FAILS=15: it has 15 batches, and no more.
"""

import errno
import hashlib
import os
import time
from typing import Any

import torch
import without_compiler  # noqa: F401
from torch import Tensor, nn

from noloco_node.training.task import Batch, device_batch

INPUTS = 256


class Paced:
    tokens_per_example = 1
    micro_examples = 1 << 20

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._step_s = float(options.pop("step_s", 0.05)) * float(os.environ.get("PACED_SLOWER", "1"))
        self._outputs = int(options.pop("outputs", 384))
        self._bad = range(*options.pop("bad", (0, 0)))
        self._due = 0.0
        self._begins = False
        if options:
            raise ValueError(f"it does not know {sorted(options)[0]}")
        self._seed = seed
        time.sleep(float(os.environ.get("PACED_READY_S", "0")))
        self._teacher = _random(INPUTS, self._outputs, seed=f"{seed}/teacher") / INPUTS**0.5
        self._held_out = self._examples("held out", 0, 16)

    def model(self) -> nn.Module:
        return nn.Linear(INPUTS, self._outputs)

    def stream(self, peer_id: str) -> "PacedStream":
        return PacedStream(self, peer_id, self._bad)

    def begin_step(self) -> None:
        self._begins = True

    def _keep_pace(self) -> None:
        """Once a step; who was late does not hurry afterwards."""
        if self._begins:
            self._begins, now = False, time.monotonic()
            time.sleep(max(0.0, self._due - now))
            self._due = max(self._due, now) + self._step_s

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if module.training:
            self._keep_pace()
        inputs, targets = batch
        return nn.functional.mse_loss(module(inputs), targets)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        return float(self.loss(module, device_batch(self._held_out, module)))

    def _examples(self, name: str, index: int, count: int) -> Batch:
        inputs = _random(count, INPUTS, seed=f"{self._seed}/{name}/{index}")
        return inputs, inputs @ self._teacher


class PacedStream:
    def __init__(self, task: Paced, peer_id: str, bad: range) -> None:
        self._task, self._peer_id, self._bad = task, peer_id, bad
        self.position = 0

    def seek(self, position: Any) -> None:
        if not isinstance(position, int) or position < 0:
            raise ValueError(position)
        self.position = position

    def next(self, examples: int) -> Batch:
        if self.position >= int(os.environ.get("PACED_FAILS", "1000000000")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._task.begin_step()
        inputs, targets = self._task._examples(self._peer_id, self.position, examples)
        broken = inputs * float("nan") if self.position in self._bad else inputs
        self.position += 1
        return broken, targets


def _random(*shape: int, seed: str) -> Tensor:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))
