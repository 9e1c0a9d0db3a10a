"""R replicas of one model or of each of its stages, each with a node's own optimizer (training/inner/optimizer.py).

All start from the same weights, which are rows of a matrix (R, P), and their gradients of another: an outer algorithm
works on plain rows. One module computes for all of them: its parameters become views of the rows whose turn it is, of
one replica, or of another one in each stage. One batched model for all replicas took the same CPU time a step.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from noloco_node.core.codecs.activations import activation_codec
from noloco_node.core.device import multiplies_bf16
from noloco_node.simulate.settings import Settings
from noloco_node.simulate.stages import Cut, Route
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.inner.schedule import learning_rate
from noloco_node.training.model import next_token_loss, parameters, places

_EVALUATED = 16
"""Sequences evaluated at a time; bounds the memory of the logits."""


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    stage: int
    columns: slice
    shape: torch.Size


class ReplicaBatch:
    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self._spec = settings.inner
        self._stages = stages = settings.stages
        cut = Cut(module, stages)
        of = cut.stage_of
        named = sorted(parameters(module), key=lambda named: of[named[0]])  # in a stage as a node has them
        self._places = [
            _Place(name, of[name], slice(start, end), p.shape)
            for (_, p), (name, start, end) in zip(named, places(named), strict=True)
        ]
        self.theta = parameters_to_vector([p for _, p in named]).detach().repeat(settings.replicas, 1)  # (R, P)
        self.gradients = torch.zeros_like(self.theta)
        self._optimizers = [self._optimizer(row, k) for row in range(settings.replicas) for k in range(stages)]
        self._trained, self._evaluated = deepcopy(module).train(), deepcopy(module).eval()
        codec = activation_codec(settings.activations)
        for copied in (self._trained, self._evaluated) if settings.activations != "fp32" else ():
            cut.connect(copied, codec)
        hidden: int = module.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        self.bytes_per_token = 2.0 * codec.encoded_bytes((1, hidden)) if stages > 1 else 0.0
        """Over one boundary, both ways."""
        auto = settings.precision == "auto" and multiplies_bf16(self.theta.device)
        self._in_bf16 = auto or settings.precision == "bf16"
        self._loss = torch.compile(next_token_loss) if settings.compiled else next_token_loss

    def layout(self, stage: int) -> dict[str, torch.Size]:
        """The shapes of its tensors, in the order of its columns."""
        return {place.name: place.shape for place in self._places if place.stage == stage}

    def columns(self, stage: int) -> slice:
        """Those of the matrices that are a stage's."""
        own = [place.columns for place in self._places if place.stage == stage]
        return slice(own[0].start, own[-1].stop)

    def backward(self, tokens: Tensor, routes: Sequence[Sequence[Route]] = ()) -> Tensor:
        """Losses (R,) of a batch (R, B, T + 1); its gradients lie in `gradients`. `routes`: of each micro-batch, as so
        many parts of B, and each row of it; without them a row's batch stays in its own replica."""
        routes = routes or [[[row] * self._stages for row in range(len(tokens))]]
        self.gradients.zero_()
        losses = torch.zeros(len(tokens), device=tokens.device)
        for ways, part in zip(routes, tokens.tensor_split(len(routes), dim=1), strict=True):
            for row, (route, batch) in enumerate(zip(ways, part, strict=True)):
                self._take(route)
                with self._precision():
                    loss = self._loss(self._trained, batch) * (len(batch) / tokens.shape[1])
                loss.backward()  # type: ignore[no-untyped-call]
                losses[row] += loss.detach()
        return losses

    def step(self, progress: float) -> None:
        """Clips each replica's gradient by its own norm and moves its weights; `progress` from 0 to 1."""
        rate = learning_rate(self._spec, progress)
        for optimizer in self._optimizers:
            optimizer.norm()
            optimizer.step(rate)

    @torch.no_grad()
    def evaluate(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """Held-out losses (rows of `theta`,) on the same tokens (sequences, T + 1) for each: a row has all stages."""
        losses = []
        for row in theta:
            for place in self._places:
                self._evaluated.get_parameter(place.name).data = row[place.columns].view(place.shape)
            with self._precision():
                parts = [self._loss(self._evaluated, part) * len(part) for part in torch.split(tokens, _EVALUATED)]
            losses.append(torch.stack(parts).sum() / len(tokens))
        return torch.stack(losses)

    def _take(self, route: Route) -> None:
        """The module computes with these replicas' weights from now on, and for their gradients."""
        for place in self._places:
            parameter, row = self._trained.get_parameter(place.name), route[place.stage]
            parameter.data = self.theta[row, place.columns].view(place.shape)
            parameter.grad = self.gradients[row, place.columns].view(place.shape)

    def _optimizer(self, row: int, stage: int) -> Optimizer:
        """It knows the norm of its own stage's gradient only, so the bound is that stage's share of the whole one."""
        own = nn.ParameterList()
        for place in (place for place in self._places if place.stage == stage):
            parameter = nn.Parameter(self.theta[row, place.columns].view(place.shape))
            parameter.grad = self.gradients[row, place.columns].view(place.shape)
            own.append(parameter)
        share = sum(p.numel() for p in own) / self.theta.shape[1]
        return Optimizer(own, self._spec.model_copy(update={"clip": self._spec.clip * math.sqrt(share)}))

    def _precision(self) -> torch.autocast:
        """Of matrix products; everything else is fp32."""
        return torch.autocast(self.theta.device.type, torch.bfloat16, enabled=self._in_bf16)
