"""A program: Triton's cross-entropy, carried out by Triton's interpreter, against torch's own.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported. Says how many comparisons were made.
"""

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from noloco_node.core.cross_entropy import cuda

TOKENS, BLOCK = 13, 64
WORDS = [1, 37, 64, 200]
"""Fewer than a program reads at once, just as many, and several times as many."""
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of exp(x − s) in fp32, both about 60, and of the gradient's own type."""


def main() -> None:
    compared = 0
    cuda.BLOCK = BLOCK
    generator = torch.Generator().manual_seed(1)
    for words, (dtype, rounding) in itertools.product(WORDS, ROUNDING.items()):
        logits = (20 * torch.randn(TOKENS, words, generator=generator)).to(dtype).requires_grad_()
        targets = torch.randint(words, (TOKENS,), generator=generator)
        shares = torch.rand(TOKENS, generator=generator)
        expected = torch.log_softmax(logits.double(), -1).gather(1, targets[:, None])[:, 0]
        (theirs,) = torch.autograd.grad((expected * shares).sum(), logits)
        picked, sums = cuda.forward(logits.detach(), targets)
        gradient = cuda.backward(logits.detach(), targets, sums, shares)
        assert picked.dtype == torch.float32 and gradient.dtype == dtype
        assert torch.allclose(picked.double(), expected, rtol=1e-6, atol=1e-5), (words, dtype)
        assert torch.allclose(gradient.double(), theirs.double(), rtol=rounding, atol=1e-5), (words, dtype)
        compared += 1
    for broken in (torch.nan, torch.inf):
        logits = torch.zeros(2, 100)
        logits[1, 70] = broken
        picked, _ = cuda.forward(logits, torch.zeros(2, dtype=torch.int64))
        assert picked[0].isfinite() and not picked[1].isfinite(), broken
    masked = torch.full((1, 100), -torch.inf)  # a whole block of words that cannot come
    masked[0, 70:] = 0
    picked, _ = cuda.forward(masked, torch.tensor([80]))
    assert torch.allclose(picked, -torch.tensor(30.0).log())
    for none in (-100, -1, 100):
        picked, _ = cuda.forward(torch.zeros(1, 100), torch.tensor([none]))
        assert picked.isnan().all(), none
    sys.stdout.write(str(compared))


if __name__ == "__main__":
    main()
