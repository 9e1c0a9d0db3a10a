"""R replicas of one model under one AdamW: a step for all of them at a time.

All start from the same weights. Parameters, gradients and AdamW's moments are matrices (R, P), so that an outer
algorithm, clipping and averaging are plain operations on rows; AdamW works element by element and does not notice.
Learning rate, clipping and decay follow the run's manifest like the daemon's own inner loop.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from noloco_node.run.schema import InnerSpec
from noloco_node.simulate.batched_llama import BatchedLlama, Shape, stacked
from noloco_node.training.model import parameters
from noloco_node.training.schedule import learning_rate

Loss = Callable[[Mapping[str, Tensor], Tensor], Tensor]

_EVALUATED = 16
"""Sequences of one replica evaluated at a time; bounds the memory of the logits."""


class ReplicaBatch:
    def __init__(
        self, module: nn.Module, replicas: int, spec: InnerSpec, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        named = parameters(module)  # in the order of the daemon's own flat vectors
        self.layout = {name: parameter.shape for name, parameter in named}
        self._decayed = sum(parameter.numel() for _, parameter in named if parameter.dim() >= 2)
        loss = BatchedLlama(Shape.of(module.config), self.layout, dtype).loss
        self._loss: Loss = torch.compile(loss) if compiled else loss
        start = torch.cat([parameter.detach().flatten() for _, parameter in named])
        self.theta = start.repeat(replicas, 1)  # (R, P)
        self.gradients = torch.zeros_like(self.theta)
        self._weights = {name: w.requires_grad_() for name, w in stacked(self.theta, self.layout).items()}
        self._slots = stacked(self.gradients, self.layout)
        self._spec = spec
        self._adamw = _adamw(self.theta, self.gradients, spec)

    def backward(self, tokens: Tensor) -> Tensor:
        """Losses (R,) of a batch (R, B, T + 1); its gradients lie in `gradients`."""
        losses = self._loss(self._weights, tokens)
        gradients = torch.autograd.grad(losses.sum(), list(self._weights.values()))
        for slot, gradient in zip(self._slots.values(), gradients, strict=True):
            slot.copy_(gradient)
        return losses.detach()

    def step(self, progress: float) -> None:
        """Clips each replica's gradient by its own norm and moves its weights; `progress` from 0 to 1."""
        norms = self.gradients.norm(dim=1, keepdim=True)
        self.gradients.mul_((self._spec.clip / (norms + 1e-6)).clamp(max=1.0))
        rate = learning_rate(self._spec, progress)
        self.theta.detach()[:, : self._decayed].mul_(
            1 - rate * self._spec.weight_decay
        )  # matrices only; they lie first
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    @torch.no_grad()
    def evaluate(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """Held-out losses (rows of `theta`,) on the same tokens (sequences, T + 1) for each."""
        weights = stacked(theta, self.layout)
        total = torch.zeros(len(theta), device=theta.device)
        for part in torch.split(tokens, _EVALUATED):
            total += self._loss(weights, part.expand(len(theta), *part.shape)) * len(part)
        return total / len(tokens)


def _adamw(theta: Tensor, gradients: Tensor, spec: InnerSpec) -> torch.optim.AdamW:
    parameter = theta.detach()  # the same memory; the weights are leaves of their own
    parameter.grad = gradients
    return torch.optim.AdamW([parameter], lr=spec.learning_rate, betas=spec.betas, weight_decay=0.0, fused=True)
