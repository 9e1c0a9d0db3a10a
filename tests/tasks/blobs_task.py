"""A task that is not language: which of four figures is on a noisy image? It makes its images as it goes.

Options: `noise` (default 0.5). A convolutional network of 3,000 parameters.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.training.task import Batch, device_batch

SIDE = 16
CLASSES = 4
"""A disc, a ring, a bar that lies and one that stands."""


class Blobs:
    tokens_per_example = 1
    micro_examples = 64

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._noise = float(options.pop("noise", 0.5))
        if options:
            raise ValueError(f"it does not know {sorted(options)[0]}")
        if not (math.isfinite(self._noise) and self._noise >= 0):
            raise ValueError("noise must be a number from 0 on")
        self._seed = seed
        self._held_out = Images(f"{seed}/held out", self._noise).next(128)

    def model(self) -> nn.Module:
        def half(wide: int, out: int) -> list[nn.Module]:
            return [nn.Conv2d(wide, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*half(1, 8), *half(8, 16), nn.Flatten(), nn.Linear(16 * (SIDE // 4) ** 2, CLASSES))

    def stream(self, peer_id: str) -> "Images":
        return Images(f"{self._seed}/{peer_id}", self._noise)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        images, classes = batch
        return nn.functional.cross_entropy(module(images), classes)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        parts = zip(*(part.split(examples) for part in device_batch(self._held_out, module)), strict=True)
        return sum(float(self.loss(module, part)) * len(part[0]) for part in parts) / len(self._held_out[0])


class Images:
    """Endless images; the position is how many there were."""

    def __init__(self, name: str, noise: float) -> None:
        self._name, self._noise = name, noise
        self.position = 0

    def seek(self, position: Any) -> None:
        if not isinstance(position, int) or position < 0:
            raise ValueError(position)
        self.position = position

    def next(self, examples: int) -> Batch:
        rng = np.random.default_rng([*self._name.encode(), self.position])
        self.position += examples
        classes = rng.integers(CLASSES, size=examples)
        images = np.stack([_figure(kind, rng) for kind in classes]) + rng.normal(0, self._noise, (examples, SIDE, SIDE))
        return torch.from_numpy(images[:, None].astype(np.float32)), torch.from_numpy(classes)


def _figure(kind: int, rng: np.random.Generator) -> "np.ndarray[Any, Any]":
    y, x = np.mgrid[:SIDE, :SIDE]
    at_y, at_x = rng.uniform(5, SIDE - 6, 2)
    away = np.hypot(y - at_y, x - at_x)
    figures = [away < 4, abs(away - 4) < 1, abs(y - at_y) < 1.5, abs(x - at_x) < 1.5]
    return figures[kind].astype(np.float64)
