"""A model cut into stages: which parameter is whose, what crosses their boundaries, and which way a micro-batch takes.

As in the NoLoCo paper (arXiv 2506.10911, 3.1) each stage has as many replicas as the others, and averages in pairs of
its own. Routes are permutations, drawn anew for each micro-batch, so that each replica gets as many as the others: what
nodes come to by sending to those who are free. All work in lock-step, with the same weights forward and backward; a
node's weights may be a step newer on the way back.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from noloco_node.core.codecs.activations import ActivationCodec
from noloco_node.core.codecs.codec import CodecStats
from noloco_node.errors import UsageError
from noloco_node.run.schema import StagesSpec
from noloco_node.simulate.baselines import Algorithm, Outer
from noloco_node.simulate.settings import Settings
from noloco_node.stages.part import layers_of
from noloco_node.training import model

MICRO_BATCHES = 2
"""Of one replica in one step, each on a route of its own. Few, as small ones take longer."""

Route = Sequence[int]
"""Whose replica of each stage a micro-batch goes through."""


class Cut:
    def __init__(self, module: nn.Module, stages: int) -> None:
        """Layers in equal parts; what is before them is the first stage's, what comes after them the last one's."""
        name, layers = model.layers(module)
        if not 1 <= stages <= len(layers):
            raise UsageError(f"a model of {len(layers)} layers makes 1 to {len(layers)} stages, not {stages}")
        cut = StagesSpec(count=stages) if stages > 1 else None
        of_layer = [at for at in range(stages) for _ in (layers_of(cut, at, len(layers)) if cut else layers)]
        self.ends = [f"{name}.{k}" for k in range(len(layers) - 1) if of_layer[k] != of_layer[k + 1]]
        """The layers whose outputs cross a boundary."""
        self.stage_of: dict[str, int] = {}
        """Of each parameter."""
        stage = 0
        for parameter, _ in module.named_parameters():
            if parameter.startswith(f"{name}."):
                stage = of_layer[int(parameter.removeprefix(f"{name}.").partition(".")[0])]
            elif any(known.startswith(f"{name}.") for known in self.stage_of):
                stage = stages - 1
            self.stage_of[parameter] = stage

    def connect(self, module: nn.Module, codec: ActivationCodec) -> None:
        """From now on its activations, and the gradients at them, cross each boundary through the codec."""
        for end in self.ends:
            module.get_submodule(end).register_forward_hook(lambda _, __, out: _cross(out, codec))


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, codec: ActivationCodec) -> Tensor:
        ctx.codec = codec
        return _carried(values, codec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _carried(gradient, ctx.codec), None


def _carried(values: Tensor, codec: ActivationCodec) -> Tensor:
    return codec.decode(codec.encode(values), values.shape, values.device).to(values.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _cross(out: Any, codec: ActivationCodec) -> Any:
    """What a layer returns: the activations, in older transformers first in a tuple."""
    if isinstance(out, tuple):
        return (_Crossing.apply(out[0], codec), *out[1:])  # type: ignore[no-untyped-call]
    return _Crossing.apply(out, codec)  # type: ignore[no-untyped-call]


class Routes:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._micro_batches = min(MICRO_BATCHES, settings.batch)
        self._chance = random.Random(f"routes {settings.seed}")

    def next(self) -> list[list[Route]]:
        """Of each micro-batch of a step, and of each replica of the first stage that reads one."""
        if self._settings.stages == 1:
            return []
        return [list(zip(*self._stages(), strict=True)) for _ in range(self._micro_batches)]

    def _stages(self) -> Iterator[Sequence[int]]:
        """Of each stage its replicas, in the order of the first one's."""
        straight = range(self._settings.replicas)
        yield straight
        for _ in range(1, self._settings.stages):
            random_ = self._settings.routing == "random"
            yield self._chance.sample(straight, len(straight)) if random_ else straight


class PerStage(Algorithm):
    """An algorithm of its own for each stage, each with its columns of the matrices."""

    def __init__(self, rules: Sequence[tuple[slice, Algorithm]]) -> None:
        super().__init__()
        self._rules = rules

    def gradients(self, gradients: Tensor) -> None:
        self._each(lambda rule, part: rule.gradients(gradients[:, part]))

    def boundary(self, outer: Outer) -> None:
        self._each(lambda rule, part: rule.boundary(outer.columns(part)))

    def between(self, outer: Outer, step: int) -> None:
        self._each(lambda rule, part: rule.between(outer.columns(part), step))

    def finish(self, outer: Outer) -> None:
        self._each(lambda rule, part: rule.finish(outer.columns(part)))

    def _each(self, call: Callable[[Algorithm, slice], None]) -> None:
        for part, rule in self._rules:
            call(rule, part)
        rules, whole = [rule for _, rule in self._rules], self._rules[-1][0].stop
        self.sent = sum(rule.sent * (part.stop - part.start) / whole for part, rule in self._rules)
        self.failed, self.scaled = sum(rule.failed for rule in rules), sum(rule.scaled for rule in rules)
        self.taken_back = sum(rule.taken_back for rule in rules)
        self.taken_back_from_honest = sum(rule.taken_back_from_honest for rule in rules)
        self.stats = CodecStats()
        for rule in rules:
            self.stats.add(rule.stats)
