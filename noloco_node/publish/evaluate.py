"""A published model's loss on the run's held-out text: the same windows and function as a node's own evaluation."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noloco_node.core.device import choose_devices
from noloco_node.data import corpus, tokens
from noloco_node.publish.weights import Trained
from noloco_node.training import tasks
from noloco_node.training.inner.gradients import autocast, products
from noloco_node.training.language import held_out


@dataclass(frozen=True, slots=True)
class Measured:
    loss: float
    """In nats a token."""
    tokens: int
    bytes: int
    """Of the text that these tokens encode."""
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / self.bytes / math.log(2)


def measure(
    trained: Trained, corpus: corpus.Readable, device: str, progress: Callable[[int, int], None] = lambda *_: None
) -> Measured:
    """As a node measures it: the same held-out text, the same function. `progress`: so many parts of so many."""
    run, where = trained.run, choose_devices(device)[0]
    of_run, module = tasks.load(run, corpus=corpus), trained.module.to(where)
    windows = held_out(run, corpus)
    parts, done = -(-len(windows) // of_run.micro_examples), 0

    def one_more(*_: Any) -> None:
        nonlocal done
        done += 1
        progress(min(done, parts), parts)

    progress(0, parts)
    began = time.perf_counter()
    hook = module.register_forward_hook(one_more)
    try:
        with torch.no_grad(), autocast(where, products(where, run.inner.precision)):
            loss = of_run.evaluate(module, of_run.micro_examples)
    finally:
        hook.remove()
    targets = windows[:, 1:]
    return Measured(loss, targets.numel(), _bytes(targets, trained.tokenizer), time.perf_counter() - began)


def _bytes(targets: Tensor, tokenizer: tokens.Tokenizer) -> int:
    if tokenizer is tokens.BYTES:
        return targets.numel()
    return sum(len(tokenizer.decode(row).encode()) for row in targets.tolist())
