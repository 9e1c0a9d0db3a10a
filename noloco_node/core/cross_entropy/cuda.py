"""Cross-entropy of many tokens for CUDA, in Triton: a program a token, which reads its logits once forward and once
backward, and keeps one number of them."""

# Inside a kernel Triton reads annotations as its own: there are none but tl.constexpr.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits at once."""
OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}
"""Without the first, Triton's versions round differently."""


def try_out() -> None:
    """Raises whatever Triton raises where kernels cannot be built."""
    logits = torch.zeros(1, 16, device="cuda", dtype=torch.bfloat16)  # Triton compiles for multiples of 16 apart
    targets = torch.zeros(1, device="cuda", dtype=torch.int64)
    picked, sums = forward(logits, targets)
    backward(logits, targets, sums, picked)


def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(the log-probability of each row's target, the logarithm of each row's sum of exponentials), both fp32."""
    rows, words = logits.shape
    picked, sums = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _forward[(rows,)](logits, targets, picked, sums, words, BLOCK=BLOCK, **OPTIONS)
    return picked, sums


def backward(logits: Tensor, targets: Tensor, sums: Tensor, gradients: Tensor) -> Tensor:
    """The logits' gradient, in their type, from each row's."""
    found = torch.empty_like(logits)
    rows, words = logits.shape
    _backward[(rows,)](logits, targets, sums, gradients, found, words, BLOCK=BLOCK, **OPTIONS)
    return found


@triton.jit
def _forward(logits, targets, picked, sums, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * words
    column = tl.arange(0, BLOCK)
    top = -3.4028234663852886e38  # the lowest number: −inf less −inf is none
    total = 0.0
    for start in range(0, words, BLOCK):
        x = tl.load(mine + start + column, mask=start + column < words, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    log_sum = top + tl.log(total)
    tl.store(sums + row, log_sum)
    target = tl.load(targets + row)
    there = (target >= 0) & (target < words)
    tl.store(picked + row, tl.load(mine + target, mask=there, other=float("nan")).to(tl.float32) - log_sum)


@triton.jit
def _backward(logits, targets, sums, gradients, found, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mine, out = logits + row * words, found + row * words
    column = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    log_sum, gradient = tl.load(sums + row), tl.load(gradients + row)
    for start in range(0, words, BLOCK):
        inside = start + column < words
        x = tl.load(mine + start + column, mask=inside, other=0.0).to(tl.float32)
        picked = tl.where(start + column == target, 1.0, 0.0)
        tl.store(
            out + start + column, (gradient * (picked - tl.exp(x - log_sum))).to(out.dtype.element_ty), mask=inside
        )
