"""R replicas of one model, each a module with a node's own optimizer (training/optimizer.py).

All start from the same weights. Parameters and gradients are views of the rows of two matrices (R, P), so an outer
algorithm works on plain rows. One batched model for all replicas took the same CPU time a step.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from noloco_node.run.schema import InnerSpec
from noloco_node.training.model import next_token_loss, parameters
from noloco_node.training.optimizer import Optimizer
from noloco_node.training.schedule import learning_rate

_EVALUATED = 16
"""Sequences evaluated at a time; bounds the memory of the logits."""


class ReplicaBatch:
    def __init__(
        self, module: nn.Module, replicas: int, spec: InnerSpec, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        self.layout = {name: parameter.shape for name, parameter in parameters(module)}
        start = parameters_to_vector(_parameters(module)).detach()
        self.theta = start.repeat(replicas, 1)  # (R, P)
        self.gradients = torch.zeros_like(self.theta)
        self._modules = [deepcopy(module).train() for _ in range(replicas)]
        for replica, theta, gradient in zip(self._modules, self.theta, self.gradients, strict=True):
            vector_to_parameters(theta, _parameters(replica))  # views
            at = 0
            for parameter in _parameters(replica):
                parameter.grad = gradient[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
        self._spec = spec
        self._optimizers = [Optimizer(replica, spec) for replica in self._modules]
        self._evaluated = deepcopy(module).eval()
        self._dtype = dtype
        self._loss = torch.compile(next_token_loss) if compiled else next_token_loss

    def backward(self, tokens: Tensor) -> Tensor:
        """Losses (R,) of a batch (R, B, T + 1); its gradients lie in `gradients`."""
        self.gradients.zero_()
        losses = []
        for replica, batch in zip(self._modules, tokens, strict=True):
            with self._precision():
                loss = self._loss(replica, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses)

    def step(self, progress: float) -> None:
        """Clips each replica's gradient by its own norm and moves its weights; `progress` from 0 to 1."""
        rate = learning_rate(self._spec, progress)
        for optimizer in self._optimizers:
            optimizer.norm()
            optimizer.step(rate)

    @torch.no_grad()
    def evaluate(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """Held-out losses (rows of `theta`,) on the same tokens (sequences, T + 1) for each."""
        losses = []
        for row in theta:
            vector_to_parameters(row, _parameters(self._evaluated))
            with self._precision():
                parts = [self._loss(self._evaluated, part) * len(part) for part in torch.split(tokens, _EVALUATED)]
            losses.append(torch.stack(parts).sum() / len(tokens))
        return torch.stack(losses)

    def _precision(self) -> torch.autocast:
        """The dtype of matrix products; everything else is fp32."""
        return torch.autocast(self.theta.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in parameters(module)]
