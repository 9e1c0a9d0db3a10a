"""A training loop in plain PyTorch, which `bench training` compares with this package's.

It shares with training/replica.py only the model, the batches and the settings. No checks, no partner, no resuming.
The learning rate is the cosine of the manifest's defaults.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from noloco_node.core.device import multiplies_bf16
from noloco_node.run.schema import InnerSpec


def train(
    module: nn.Module, batch: Callable[[], Tensor], spec: InnerSpec, steps: int, micro_batch: int
) -> Iterator[float]:
    """Yields the loss of each step. `batch` gives windows of tokens, (sequences, length + 1)."""
    device = next(module.parameters()).device
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    rest = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, fused=True)
    mixed = multiplies_bf16(device) and spec.precision == "bf16"
    for step in range(steps):
        done = (step + 1) / steps
        falling = (1 + math.cos(math.pi * (done - spec.warmup) / (1 - spec.warmup))) / 2
        rate = spec.final_learning_rate + (1 - spec.final_learning_rate) * falling
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * (done / spec.warmup if done < spec.warmup else rate)
        windows = batch().to(device)
        total = torch.zeros((), device=device)
        for part in torch.split(windows, micro_batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                logits = module(input_ids=part[:, :-1], use_cache=False).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
            share = loss * (len(part) / len(windows))
            share.backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        nn.utils.clip_grad_norm_(module.parameters(), spec.clip)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item()
