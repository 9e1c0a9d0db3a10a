"""Cross-entropy of many tokens without a table of all their probabilities.

torch's own makes three tables of (tokens, vocabulary) in fp32 beside the logits: their copy, its log-softmax, its
gradient. Of 8,192 tokens and 32,000 words each is 1 GB. Here rows go through in chunks, in fp32, and only a gradient in
the logits' own type is kept. The backward pass computes a chunk's log-softmax again instead of keeping it. On a CPU
losses and gradients are those of `torch.nn.functional.cross_entropy` to the bit, in a third to two thirds of its time.
On a GPU Triton's kernels (`cuda`) do the same without chunks; where they cannot be built, chunks do. Forward and
backward of 65,536 tokens and 32,000 words on an H200: Triton 3.4 ms, torch's own 25.7, chunks of GPU_CHUNK 44, larger
ones 38.6 at best.

The logits themselves are kept, though torch 2.13 could multiply with the last layer chunk by chunk: of 32,000 words
they are about a seventh of what a model of 350 M parameters keeps for its backward pass (estimated).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.core import gpu

WHOLE = 1 << 22
"""Logits that torch's own function takes: tables of 16 MiB, and faster."""
CPU_CHUNK, GPU_CHUNK = 1 << 19, 1 << 24
"""Logits at once: what stays in a core's cache; what keeps a GPU busy, 64 MiB in fp32."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of (tokens, vocabulary) and (tokens); `reduction`: `mean`, or `none` for each token's own. In fp32."""
    if logits.numel() <= WHOLE:
        return nn.functional.cross_entropy(logits.float(), targets, reduction=reduction)
    picked: Tensor = _Picked.apply(logits, targets)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return -picked
    return nn.functional.nll_loss(picked[:, None], torch.zeros_like(targets), reduction=reduction)  # its order of sums


class _Picked(torch.autograd.Function):
    """The log-probability of each row's target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.kernels = _kernels() if logits.is_cuda else None
        if ctx.kernels is not None:
            logits, targets = logits.contiguous(), targets.contiguous()
            picked: Tensor
            with torch.cuda.device(logits.device):  # Triton starts kernels on the thread's GPU
                picked, sums = ctx.kernels.forward(logits, targets)
            ctx.save_for_backward(logits, targets, sums)
            return picked
        ctx.save_for_backward(logits, targets)
        return torch.cat([_log_softmax(logits[rows]).gather(1, targets[rows, None])[:, 0] for rows in _chunks(logits)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets, *sums = ctx.saved_tensors
        (each,) = gradients  # (tokens)
        if sums:
            return ctx.kernels.backward(logits, targets, *sums, each.contiguous()), None
        found = torch.empty_like(logits)
        for rows in _chunks(logits):
            log_p = _log_softmax(logits[rows])
            g = torch.zeros_like(log_p).scatter_(1, targets[rows, None], each[rows, None])
            found[rows] = torch.ops.aten._log_softmax_backward_data(g, log_p, 1, torch.float32)
        return found, None


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float32)


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows, words = logits.shape
    each = max(1, (GPU_CHUNK if logits.is_cuda else CPU_CHUNK) // words)
    return (slice(start, start + each) for start in range(0, rows, each))


@cache
def _kernels() -> Any:
    return gpu.kernels(f"{__name__}.cuda", "losses are computed")
