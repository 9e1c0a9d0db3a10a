"""What every rival of `bench train` does between two synchronisations: steps of the paced task with AdamW.

The same as training/replica.py does in ours: model, first weights, batches, AdamW and its settings, clipping. The steps
run on a thread of their own, so that the process goes on answering.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from noloco_node.bench.rivals import paced
from noloco_node.bench.rivals.paced import Setting
from noloco_node.errors import NolocoError
from noloco_node.run.schema import InnerSpec
from noloco_node.training.inner.gradients import autocast, products


class LocalSteps:
    """What a rival's `Member` is, beside how it synchronises."""

    def build(self, setting: Mapping[str, Any], number: int, weights: str | None, **addresses: str) -> None:
        """`number`: which of the nodes it is, for data of its own. `weights`: where it leaves its weights.
        `addresses`: its own as `address`, that of the first node as `first`."""
        self._number, self._addresses = number, addresses
        self._threads = torch.get_num_threads()
        if weights:
            os.environ[paced.WEIGHTS] = weights
        self.setting = Setting(**setting)
        self.task = paced.Paced(self.setting.options, seed=1)
        self.module = self.task.model().train()
        self._batches = paced.batches(self.task, f"node {number}")
        self._spec = InnerSpec(**self.setting.inner)
        cpu = torch.device("cpu")
        self._precision = autocast(cpu, products(cpu, self._spec.precision))
        self.steps, self._descent_s = 0, 0.0
        self.rounds = self.alone = 0
        """Synchronisations, and how many of them failed."""
        self._began, self._fault = 0.0, ""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def adamw(self) -> torch.optim.Optimizer:
        """Matrices decay, the rest does not."""
        groups = [
            {"params": [p for p in self.parameters if (p.dim() >= 2) is matrices], "weight_decay": decay}
            for matrices, decay in ((True, self._spec.weight_decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=self._spec.learning_rate, betas=self._spec.betas, fused=True)

    def gradient(self, module: nn.Module) -> None:
        """Of the next batch. `module`: the model, or what wraps it."""
        with self._precision:
            loss = self.task.loss(module, next(self._batches))
        loss.backward()  # type: ignore[no-untyped-call]
        self.steps += 1

    def descend(self, optimizer: torch.optim.Optimizer) -> None:
        began = time.monotonic()
        nn.utils.clip_grad_norm_(self.module.parameters(), self._spec.clip)
        optimizer.step()
        optimizer.zero_grad()
        self._descent_s += time.monotonic() - began

    def evaluate(self) -> None:
        """As ours does at a boundary; it leaves the weights."""
        self.module.eval()
        with torch.no_grad(), self._precision:
            self.task.evaluate(self.module, self.task.micro_examples)
        self.module.train()

    def begin(self, train: Callable[[], None]) -> dict[str, Any]:
        """Until the process ends."""

        def run() -> None:
            torch.set_num_threads(self._threads)
            try:
                train()
            except Exception as error:
                self._fault = f"{type(error).__name__}: {error}"
                raise

        self._began = time.monotonic()
        threading.Thread(target=run, daemon=True).start()
        return {"at": time.time()}

    def report(self) -> dict[str, Any]:
        if self._fault:
            raise NolocoError(f"its training ended: {self._fault}")
        elapsed, step_s = time.monotonic() - self._began, self.task.step_s + self._descent_s
        parameters = sum(p.numel() for p in self.module.parameters())
        figures = {"steps": self.steps, "step_s": step_s, "parameters": parameters}
        return {**figures, "busy": step_s / elapsed, "rounds": self.rounds, "alone": self.alone}
