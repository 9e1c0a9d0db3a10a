"""Language modelling, the built-in task: an example is a window of tokens, each predicted from those before it.

Knows models and texts; nothing of optimizers, devices or peers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.data import corpus
from noloco_node.run.schema import Manifest
from noloco_node.training import model
from noloco_node.training.task import Batch, device_batch

EVAL_TOKENS = 4096
"""Held-out tokens of one evaluation, or a step's batch where that is more: forward only, it takes as long as 1.3 small
steps."""
MICRO_LOGITS = 1 << 25
"""Elements of the largest logits that a CPU makes at once, 128 MiB: more of them are no faster."""


class Language:
    def __init__(self, manifest: Manifest, corpus: corpus.Readable) -> None:
        self._spec, self._seed = manifest.model, manifest.seed
        self._corpus = corpus
        self.tokens_per_example = manifest.data.sequence_length
        batch = max(EVAL_TOKENS, manifest.inner.batch_tokens) // self.tokens_per_example
        self._held_out = self._corpus.windows(self.tokens_per_example, max(1, batch))
        vocabulary = model.vocabulary(self._spec, corpus.vocabulary)
        self.micro_examples = max(1, MICRO_LOGITS // (self.tokens_per_example * vocabulary))

    def model(self) -> nn.Module:
        return model.build(self._spec, self._corpus.vocabulary, self._seed, self.tokens_per_example)

    def flops_per_token(self, module: nn.Module) -> float | None:
        return model.flops_per_token(module, self.tokens_per_example)

    def stream(self, peer_id: str) -> "Windows":
        return Windows(self._corpus.stream(self.tokens_per_example, self._seed, peer_id))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        (windows,) = batch
        return model.next_token_loss(module, windows)

    def evaluate(self, module: nn.Module, examples: int) -> float:
        """Summed in float64, on the CPU as not every device has it: a mean in float32 is off by 1e-6, and by how many
        examples go at once."""
        total = 0.0
        for batch in torch.split(self._held_out, examples):
            (windows,) = device_batch((batch,), module)
            total += float(model.next_token_loss(module, windows, "none").cpu().double().sum())
        return total / self._held_out[:, 1:].numel()


class Windows:
    """The windows of a text as a task's stream."""

    def __init__(self, stream: corpus.Batches) -> None:
        self._stream = stream

    @property
    def position(self) -> Any:
        return self._stream.position

    def seek(self, position: Any) -> None:
        self._stream.seek(position)

    def ready(self, examples: int, within_s: float) -> bool:
        return self._stream.ready(examples, within_s)

    def next(self, examples: int) -> Batch:
        return (self._stream.next(examples),)

    def close(self) -> None:
        self._stream.close()
