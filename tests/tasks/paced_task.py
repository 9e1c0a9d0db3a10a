"""A task whose steps take a fixed time and hardly any CPU: for tests of real nodes, where the cores are the bottleneck.

Options: `step_s`, seconds a step takes (default 0.05). About 100,000 parameters, a linear map that learns another one.
`bad`, two batches of a stream, the first of several that hold NaN and the first that does not any more (default: none).
A box with PACED_SLOWER=4 in its environment takes four times as long.
"""

import hashlib
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.training.task import Batch, device_batch

WIDTHS = (256, 384)


class Paced:
    tokens_per_example = 1
    micro_examples = 1 << 20

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._step_s = float(options.pop("step_s", 0.05)) * float(os.environ.get("PACED_SLOWER", "1"))
        self._bad = range(*options.pop("bad", (0, 0)))
        if options:
            raise ValueError(f"it does not know {sorted(options)[0]}")
        self._seed = seed
        self._teacher = _random(WIDTHS[0], WIDTHS[1], seed=f"{seed}/teacher") / WIDTHS[0] ** 0.5
        self._held_out = self._examples("held out", 0, 16)

    def model(self) -> nn.Module:
        return nn.Linear(*WIDTHS)

    def stream(self, peer_id: str) -> "PacedStream":
        return PacedStream(self, peer_id, self._step_s, self._bad)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(module(inputs), targets)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        return float(self.loss(module, device_batch(self._held_out, module)))

    def _examples(self, name: str, index: int, count: int) -> Batch:
        inputs = _random(count, WIDTHS[0], seed=f"{self._seed}/{name}/{index}")
        return inputs, inputs @ self._teacher


class PacedStream:
    def __init__(self, task: Paced, peer_id: str, step_s: float, bad: range) -> None:
        self._task, self._peer_id, self._step_s, self._bad = task, peer_id, step_s, bad
        self._due = 0.0
        self.position = 0

    def seek(self, position: Any) -> None:
        if not isinstance(position, int) or position < 0:
            raise ValueError(position)
        self.position = position

    def next(self, examples: int) -> Batch:
        """Once a step, so that this is where its time goes; who was late does not hurry afterwards."""
        now = time.monotonic()
        time.sleep(max(0.0, self._due - now))
        self._due = max(self._due, now) + self._step_s
        inputs, targets = self._task._examples(self._peer_id, self.position, examples)
        broken = inputs * float("nan") if self.position in self._bad else inputs
        self.position += 1
        return broken, targets


def _random(*shape: int, seed: str) -> Tensor:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))
