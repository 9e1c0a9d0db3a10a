"""A task that can be cut into two stages and takes next to no CPU: which symbol follows two others?

A network of 20,000 parameters learns what a fixed one of random weights says. It has no options.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.training.task import Batch, device_batch

SYMBOLS = 32
WIDTH = 64
HELD_OUT = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = values + self.back(nn.functional.gelu(self.wide(self.norm(values))))
        return out


def first() -> nn.Module:
    return nn.Sequential(nn.Embedding(SYMBOLS * 2, WIDTH // 2), nn.Flatten(), Block())


def second() -> nn.Module:
    return nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))


class Symbols:
    tokens_per_example = 1
    micro_examples = 1 << 20

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        if options:
            raise ValueError(f"it does not know {sorted(options)[0]}")
        self._seed = seed
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            teacher = nn.Sequential(nn.Embedding(SYMBOLS * 2, 16), nn.Flatten(), nn.Linear(32, 64), nn.Tanh())
            every = torch.cartesian_prod(torch.arange(SYMBOLS), SYMBOLS + torch.arange(SYMBOLS))
            logits = nn.Linear(64, SYMBOLS)(4 * teacher(every)) * 3
        self._chances = logits.softmax(1).double().cumsum(1).numpy()  # (SYMBOLS squared, SYMBOLS)
        self._held_out = self.examples("held out", 0, HELD_OUT)

    def examples(self, name: str, position: int, count: int) -> Batch:
        rng = np.random.default_rng([*f"{self._seed}/{name}".encode(), position])
        pairs = rng.integers(SYMBOLS, size=(count, 2))
        follow = self._chances[pairs[:, 0] * SYMBOLS + pairs[:, 1]]
        next_one = (follow < rng.random((count, 1))).sum(1).clip(max=SYMBOLS - 1)
        pairs[:, 1] += SYMBOLS
        return torch.from_numpy(pairs), torch.from_numpy(next_one)

    def model(self) -> nn.Module:
        return nn.Sequential(first(), second())

    def stream(self, peer_id: str) -> "SymbolStream":
        return SymbolStream(self, peer_id)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def evaluate(self, module: nn.Module, examples: int) -> float:
        return float(self.loss(module, device_batch(self._held_out, module)))

    def cut(self, stage: int, stages: int) -> "SymbolsPart":
        assert stages == 2
        return SymbolsPart(self, stage)


class SymbolStream:
    def __init__(self, task: Symbols, peer_id: str) -> None:
        self._task, self._peer_id, self.position = task, peer_id, 0

    def seek(self, position: Any) -> None:
        if not isinstance(position, int) or position < 0:
            raise ValueError(position)
        self.position = position

    def next(self, examples: int) -> Batch:
        self.position += examples
        return self._task.examples(self._peer_id, self.position, examples)


class SymbolsPart:
    activations, targets, target_limit = (WIDTH,), (1,), SYMBOLS

    def __init__(self, task: Symbols, stage: int) -> None:
        self._task, self._stage = task, stage

    def model(self) -> nn.Module:
        module = second() if self._stage else first()
        module.part = f"stage {self._stage}\n"  # type: ignore[assignment]
        return module

    def stream(self, peer_id: str) -> SymbolStream:
        return self._task.stream(peer_id)

    def held_out(self) -> Batch:
        return self._task._held_out

    def split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1][:, None]

    def forward(self, module: nn.Module, inputs: Tensor) -> Tensor:
        out: Tensor = module(inputs)
        return out

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(inputs), targets[:, 0], reduction="sum")
