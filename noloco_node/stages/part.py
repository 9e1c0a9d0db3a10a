"""The part of a task that one stage holds: its module, what comes in, what goes out.

A micro-batch enters the first stage as the task's own inputs, crosses each boundary as activations of a fixed shape,
and meets its targets in the last stage. Language models in Llama's shape are cut here, by layers; an installed task
that can be cut brings its own parts (`Cuttable`).

- A part of a transformers model is that model with fewer layers, and without the embedding, the last norm and the
  head where another stage has them: so it is never larger than the part. Whether the model does something else outside
  its layers (positions that are added, a scaled embedding) is found by sending activations through none of them: they
  must come out as they went in.
- A stage but the last computes each micro-batch again for its gradient. Whether both times come to the same, without
  dropout, is found by sending activations through one layer: it must draw no random number.
- Embedding and head are in two stages, so they are not tied, whatever the config says.
- Each stage has first weights of its own seed.

Knows nothing of peers, gradients or threads.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from noloco_node.core.cross_entropy import cross_entropy
from noloco_node.errors import UsageError
from noloco_node.run.schema import Manifest, StagesSpec
from noloco_node.training import model
from noloco_node.training.language import Language
from noloco_node.training.task import Batch, ExampleStream, Task


@dataclass(frozen=True, slots=True)
class Position:
    """Which stage of how many."""

    stage: int
    """From 0."""
    stages: int

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def number(self) -> int:
        """For people and in presence records: from 1."""
        return self.stage + 1

    def __str__(self) -> str:
        return f"{self.number} of {self.stages}"


class Part(Protocol):
    """What one stage trains. Shapes are of one example. `forward` of the same twice comes to the same: no dropout."""

    @property
    def activations(self) -> tuple[int, ...]:
        """What crosses a boundary between two stages, the same at each."""

    @property
    def targets(self) -> tuple[int, ...]:
        """Whole numbers, below `target_limit`."""

    @property
    def target_limit(self) -> int: ...

    def model(self) -> nn.Module:
        """In fp32 on the CPU. Its attribute `part` tells it from other stages' modules."""

    def stream(self, peer_id: str) -> ExampleStream:
        """Of the whole task; the first stage reads it."""

    def held_out(self) -> Batch:
        """Of the first stage: the examples of an evaluation."""

    def split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The examples' inputs of the first stage, and their targets."""

    def forward(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Of every stage but the last: the activations for the next one."""

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of the last stage: the sum over all tokens."""


@runtime_checkable
class Cuttable(Protocol):
    """An installed task that can be cut into stages."""

    def cut(self, stage: int, stages: int) -> Part: ...


def part_of(task: Task, run: Manifest, position: Position) -> Part:
    """Raises UsageError where the task cannot be cut."""
    if isinstance(task, Language) and run.stages is not None:
        return LanguagePart(task, run, position)
    if isinstance(task, Cuttable):
        return task.cut(position.stage, position.stages)
    raise UsageError(f"stages: the task {run.model.task} does not say how it is cut: leave [stages] out of the run")


def layers_of(spec: StagesSpec, stage: int, layers: int) -> range:
    """The layers of a stage, of so many. Raises UsageError."""
    starts = (0, *(spec.cut or (layers * each // spec.count for each in range(1, spec.count))), layers)
    if not all(a < b for a, b in pairwise(starts)):
        raise UsageError(f"stages: {layers} layers cannot be cut into {spec.count} stages at {list(starts[1:-1])}")
    return range(starts[stage], starts[stage + 1])


class LanguagePart:
    def __init__(self, task: Language, run: Manifest, position: Position) -> None:
        self._task, self._run, self._position = task, run, position
        width, self.target_limit = model.sizes(run.model, task.vocabulary)
        self.activations = (run.data.sequence_length, width)
        self.targets = (run.data.sequence_length,)

    def stream(self, peer_id: str) -> ExampleStream:
        return self._task.stream(peer_id)

    def held_out(self) -> Batch:
        return (self._task.held_out,)

    def split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        (windows,) = batch
        return windows[:, :-1], windows[:, 1:]

    def model(self) -> nn.Module:
        return part_model(self._run, self._task.vocabulary, self._position)

    def parameters(self) -> int:
        return part_layout(self._run, self._task.vocabulary, self._position)[1]

    def forward(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """(examples, length) of tokens or (examples, length, hidden) of activations -> activations"""
        out: Tensor = module.base_model(**self._named(inputs), use_cache=False).last_hidden_state  # type: ignore[operator]
        return out

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = module(**self._named(inputs), use_cache=False).logits  # (examples, length, vocabulary)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), "none").sum()

    def _named(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"input_ids" if self._position.first else "inputs_embeds": inputs}


# ---- a language model, cut and put together --------------------------------------------------------------------------
def part_model(run: Manifest, vocabulary: int, at: Position) -> nn.Module:
    """One stage's part, in fp32 on the CPU; `vocabulary`: of the data. Raises UsageError, OutOfMemory."""
    seed = int.from_bytes(hashlib.sha256(f"{run.seed}/stage {at.stage}".encode()).digest()[:4], "big")
    length = run.data.sequence_length
    module = model.build(run.model, vocabulary, seed, length, lambda config: _narrow(run, at, config))
    _check(module)
    return _strip(module, at)


def part_layout(run: Manifest, vocabulary: int, at: Position) -> tuple[bytes, int]:
    """Layout digest and number of parameters of a part, without making it."""
    outline = _strip(model.outline(run.model, vocabulary, lambda config: _narrow(run, at, config)), at)
    return model.layout_digest(outline), sum(p.numel() for p in outline.parameters())


def _narrow(run: Manifest, at: Position, config: Any) -> None:
    """To the layers of this stage."""
    assert run.stages is not None
    text = config.get_text_config()
    layers = layers_of(run.stages, at.stage, text.num_hidden_layers)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = kinds[layers.start : layers.stop]
    text.num_hidden_layers = len(layers)
    untie(config)


def whole_model(run: Manifest, vocabulary: int, parts: Sequence[nn.Module]) -> nn.Module:
    """The model that these parts are, first to last."""
    whole = model.build(run.model, vocabulary, run.seed, run.data.sequence_length, untie)
    weights, before = dict(whole.named_parameters()), 0
    with torch.no_grad():
        for part in parts:
            for name, p in part.named_parameters():
                weights[_name_in_whole(name, before)].copy_(p)
            before += len(part.base_model.layers)  # type: ignore[arg-type, union-attr]
    return whole


def _name_in_whole(name: str, before: int) -> str:
    """`model.layers.1.mlp` of a part behind so many layers."""
    return re.sub(r"(?<=\blayers\.)\d+", lambda number: str(int(number[0]) + before), name, count=1)


def untie(config: Any) -> None:
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False


def _check(module: nn.Module) -> None:
    """Raises UsageError where the model is not cut so simply."""
    base: Any = module.base_model
    names = {name for name, _ in base.named_children()}
    if names - {"rotary_emb"} != {"embed_tokens", "layers", "norm"} or not torch.equal(*_through(base, 0)):
        raise UsageError(
            f"stages: {type(module).__name__} cannot be cut into stages, as it does something else outside its layers: "
            "take a model in Llama's shape (LlamaConfig, MistralConfig, Qwen3Config), or leave [stages] out"
        )
    chance = torch.get_rng_state()
    _through(base, 1)
    if not torch.equal(chance, torch.get_rng_state()):
        raise UsageError(
            "stages: the model has dropout, and a stage computes each micro-batch twice, which must come to the same: "
            "set it to 0 in model.config, or leave [stages] out"
        )


def _through(base: Any, layers: int) -> tuple[Tensor, Tensor]:
    """Some activations that go in behind the embedding, and what they become in so many layers, without a norm."""
    whole = base.layers, base.norm
    base.layers, base.norm = base.layers[:layers], nn.Identity()
    try:
        given = torch.linspace(-1, 1, 4 * base.config.hidden_size).view(1, 4, -1)
        with torch.no_grad():
            return given, base(inputs_embeds=given, use_cache=False).last_hidden_state
    finally:
        base.layers, base.norm = whole


def _strip(module: nn.Module, at: Position) -> nn.Module:
    """Take out what other stages hold."""
    base: Any = module.base_model
    if not at.first:
        base.embed_tokens = None
    if not at.last:
        base.norm = nn.Identity()
        module.lm_head = None  # type: ignore[assignment]
    module.part = f"stage {at}\n"  # type: ignore[assignment]
    return module
