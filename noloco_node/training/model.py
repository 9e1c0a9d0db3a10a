"""Causal language models, built from what a manifest names: a preset, or a transformers config class with plain values.

The manifest may come from an unknown author, so a build runs no remote code, asks no hub, and first counts the model's
parameters without memory (torch's meta device), and stops as soon as this machine could not hold them. The same seed
gives the same first weights everywhere, unless they come from a folder. Knows nothing of data, optimizers or peers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from noloco_node.base.units import rate
from noloco_node.base.validation import in_one_line
from noloco_node.core.cross_entropy import cross_entropy
from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.host import memory
from noloco_node.host.imports import large_import
from noloco_node.run.schema import ModelSpec

T = TypeVar("T")


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # 0.41 M parameters for bytes: the fastest learner of its step time among those tried on one slow core. Initial
    # weights of 0.05 instead of 0.02 are worth 0.2 nats after 200 steps at this width.
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
    },
    # The sizes of the NoLoCo paper (125 M, 1.3 B, 6.8 B parameters) and one between, in Llama's own proportions.
    "125m": _llama(768, 2048, 12, 12),
    "350m": _llama(1024, 2816, 24, 16),
    "1b": _llama(2048, 5504, 24, 32),
    "7b": _llama(4096, 11008, 32, 32),
}
"""Llama shapes. With 32,000 tokens they have 134 M, 374 M, 1.35 B and 6.74 B parameters; with bytes 85 M, 309 M, 1.22 B
and 6.48 B."""
MAX_MODULES = 20_000
"""Modules in a model: GPT-3 has 2,000. They cost memory and time before the first parameter is made, a second for some
thousands."""

TABLES_IN_PYTHON = frozenset({"MarianConfig", "PegasusConfig", "RoFormerConfig", "XLMConfig"})
"""Models that compute a table of positions as lists of numbers, on the meta device too."""
MAX_TABLE = 1 << 21
"""Elements of such a table: 115 bytes each and some seconds. The largest in use, of MPT, has just as many."""
_TABLES = {
    **dict.fromkeys(TABLES_IN_PYTHON, ("max_position_embeddings", "hidden_size")),
    "MptConfig": ("max_seq_len", "n_heads"),  # made in each forward pass
}
"""The sizes of a table that `_bounded` does not see."""

CAUSAL = "noloco_causal"
"""torch's attention in transformers' list, without a mask from there."""
_ALSO_KNOWN = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})  # spellings that configs still take


def as_it_is(_config: Any) -> None:
    """The whole model."""


def build(
    spec: ModelSpec,
    vocabulary: int,
    seed: int,
    sequence_length: int = 1,
    narrow: Callable[[Any], None] = as_it_is,
) -> nn.Module:
    """A causal language model in fp32 on the CPU. Raises UsageError, OutOfMemory. Not on two threads at once: torch's
    generator and its hooks are the process's. `narrow` changes the config for a part of the model."""
    with offline():
        config = _config(spec, vocabulary)
        _check_sizes(config, vocabulary, sequence_length)
        narrow(config)
        _outline(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module: nn.Module = _construct(config)
            _leave_mask_to_attention(module)
    return module


def outline(spec: ModelSpec, vocabulary: int, narrow: Callable[[Any], None] = as_it_is) -> nn.Module:
    """As `build`, without memory for the parameters: names, shapes and order are the same."""
    with offline():
        config = _config(spec, vocabulary)
        narrow(config)
        return _outline(config)


def _outline(config: Any) -> nn.Module:
    # whatever a model is made for, each parameter takes 8 bytes: it, and its gradient or its sum in a mean
    _sound(type(config).__name__, lambda: _check_tables(config))
    with torch.device("meta"), _bounded(memory.total_bytes() // 8):
        return _construct(config)


def sizes(spec: ModelSpec, at_least: int) -> tuple[int, int]:
    """Width of the model's layers (0 where it does not say), and its number of tokens, for a text with `at_least` so
    many. Raises UsageError."""
    with offline():
        text = _config(spec, at_least).get_text_config()
    return int(getattr(text, "hidden_size", 0)), int(text.vocab_size)


def begin_with(module: nn.Module, folder: Path) -> None:
    """Give it the weights of a folder in Hugging Face's format. Raises UsageError where they are another model's, or
    not finite."""
    found = pretrained(folder, module, whole=True)
    ours, theirs = dict(parameters(module)), dict(parameters(found))
    if more := sorted(theirs.keys() ^ ours.keys()):
        raise UsageError(f"{folder}: {more[0]} is not tied as config.json says (tie_word_embeddings)")
    for name, p in theirs.items():
        if not torch.isfinite(p).all():
            raise UsageError(f"{folder}: {name} is not finite: take other weights")
        ours[name].data.copy_(p)
    buffers = dict(module.named_buffers())
    if kept := [name for name, b in found.named_buffers() if not torch.equal(b, buffers[name].to(b.device))]:
        raise UsageError(f"{folder}: {kept[0]} is no parameter, and nodes send each other nothing else")


def pretrained(folder: Path, like: nn.Module, *, whole: bool = False) -> nn.Module:
    """The folder's weights in another module of the same class and config: those of its config.json nobody has signed.
    Calls transformers, whose exceptions about a folder are undocumented: each becomes UsageError. Loads safetensors
    only, and no code. `whole`: it may hold no other weights."""
    try:
        with without_bars():
            module, said = type(like).from_pretrained(  # type: ignore[attr-defined]
                folder,
                config=like.config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        if other := sorted(said["mismatched_keys"]):
            name, there, here = other[0]
            raise ValueError(f"{name} is {tuple(there)} there and {tuple(here)} in this model")
        if missing := sorted(said["missing_keys"]):
            raise ValueError(f"{missing[0]} is missing")
        if whole and (unknown := sorted(said["unexpected_keys"])):
            raise ValueError(f"this model has no {unknown[0]}")
    except Exception as error:
        why = in_one_line(error)
        raise UsageError(f"{folder} holds no model that can be loaded: {why}") from error
    return cast("nn.Module", module)


@contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' progress bars on stderr, which it draws even for a megabyte."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


Place = tuple[str, int, int]
"""A parameter's name, and where its elements begin and end in the flat vectors."""


def parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once (tied ones under their first name), matrices before the rest, which takes no weight decay:
    the order in which a replica's flat vectors hold them."""
    return sorted(module.named_parameters(), key=lambda named: named[1].dim() < 2)


def places(named: Sequence[tuple[str, nn.Parameter]]) -> list[Place]:
    """Of these in a vector that holds them in this order."""
    ends = pairwise(accumulate((p.numel() for _, p in named), initial=0))
    return [(name, start, end) for (name, _), (start, end) in zip(named, ends, strict=True)]


def flatten(module: nn.Module) -> Tensor:
    """Make each parameter a view of one flat vector, which is returned.

    What is done to it or to a slice of it is done to the model: no gathering, no copies. Tied parameters are one
    parameter here already.
    """
    named = parameters(module)
    theta = torch.cat([p.detach().flatten() for _, p in named])
    for (_, p), (_, start, end) in zip(named, places(named), strict=True):
        p.data = theta[start:end].view(p.shape)
    return theta


@contextmanager
def elsewhere(parameters: Sequence[nn.Parameter], others: Sequence[Tensor]) -> Iterator[None]:
    """Within, the parameters are these tensors. Afterwards they are what they were."""
    before = [p.data for p in parameters]
    try:
        for p, other in zip(parameters, others, strict=True):
            p.data = other
        yield
    finally:
        for p, own in zip(parameters, before, strict=True):
            p.data = own


def fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Writes a flat vector's elements into these, one after the other."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.view(-1).copy_(part)


def require_float32(module: nn.Module, remedy: str) -> None:
    """Raises UsageError where other weights would be trained."""
    if others := {p.dtype for p in module.parameters()} - {torch.float32}:
        what = str(others.pop()).removeprefix("torch.")
        raise UsageError(f"the weights that are trained must be float32, and some are {what}: use {remedy}")


BUFFERS_STAY = (
    "keeps running statistics, which are neither saved nor sent: use track_running_stats=False, GroupNorm or "
    "LayerNorm, or keep it in evaluation mode"
)


def with_running_statistics(module: nn.Module) -> str | None:
    """The name of a part that changes them as it trains, as a BatchNorm does."""
    keep = (
        name
        for name, part in module.named_modules()
        if getattr(part, "running_mean", None) is not None and part.training
    )
    return next(keep, None)


def pointers(module: nn.Module) -> list[int]:
    """Where the parameters lie, for `require_in_place`."""
    return [p.data_ptr() for p in module.parameters()]


def require_in_place(module: nn.Module, before: list[int]) -> None:
    """Raises UsageError where what is trained lies elsewhere than before: the flat vector is not the model then."""
    if pointers(module) != before:
        raise UsageError(
            "the model's weights were moved, replaced, frozen or unfrozen: do that before training begins, and change "
            "them in place, as `p.data.copy_(…)` does"
        )


def layout_digest(module: nn.Module) -> bytes:
    """What a flat vector's elements mean, in 32 bytes: replicas swap only when it is the same. A module that is a part
    of a model says which by its `part`: two parts may have the same parameters."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype}\n" for name, p in parameters(module)]
    lines.append(getattr(module, "part", ""))
    return hashlib.sha256("".join(lines).encode()).digest()


def next_token_loss(module: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Mean over the tokens of `windows` (sequences, length + 1) but the first, each predicted from those before it; or
    `none`, each one's own."""
    logits = module(input_ids=windows[:, :-1], use_cache=False).logits  # (sequences, length, vocabulary)
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction)


def flops_per_token(module: nn.Module, sequence_length: int) -> float | None:
    """Of training: 6 for each parameter that is multiplied with, and attention's own products (arXiv 2204.02311,
    appendix B). None where not every parameter is used for every token, as in a mixture of experts."""
    config: Any = module.config.get_text_config()  # type: ignore[union-attr, operator]
    known: Mapping[str, Any] = config.to_dict()
    if any("expert" in key for key in known):
        return None
    table: Any = module.get_input_embeddings()  # type: ignore[operator]
    out: Any = module.get_output_embeddings()  # type: ignore[operator]
    looked_up: int = 0 if out is not None and out.weight is table.weight else table.weight.numel()
    used = sum(p.numel() for p in module.parameters()) - looked_up
    heads, size = getattr(config, "num_attention_heads", 0), known.get("head_dim")
    width: int = heads * size if size else config.hidden_size if heads else 0
    layers: int = config.num_hidden_layers
    return 6.0 * used + 12.0 * layers * width * sequence_length


def checkpoint_activations(module: nn.Module) -> None:
    """Compute activations again in the backward pass instead of keeping them. Raises UsageError."""
    if not getattr(module, "supports_gradient_checkpointing", False):
        raise UsageError(
            "checkpoint_activations: this run's model cannot do it, so it must be false, in the run or here"
        )
    name = "activation_checkpointing_enable"  # since transformers 5.2x; the old name warns there
    switch: Any = getattr(module, name, None) or module.gradient_checkpointing_enable
    switch({"use_reentrant": False})


def compile_layers(module: nn.Module) -> None:
    """Let torch compile one decoder layer, for all of them that are alike. What a model does before its layers, such as
    asking for a mask, stays out. Of 12 layers it takes half of the whole model's time to compile (23 of 46 s of a CPU).
    A model without layers is compiled whole."""
    for layer in layers(module)[1] or [module]:
        layer.compile()


def layers(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the decoder layers of a model, none where it has no such list: that with the most parameters, as one
    of experts lies inside it."""
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()), default=("", nn.ModuleList()))


def _config(spec: ModelSpec, vocabulary: int) -> Any:
    architecture = spec.architecture or "LlamaConfig"
    values = {"vocab_size": vocabulary, **(PRESETS[spec.preset] if spec.preset else spec.config)}
    with large_import():
        import transformers

        models: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        family: Any = getattr(transformers, architecture, None)  # one of the library's own names, and of its classes
        known_model = family in models
        if known_model:
            _sound(architecture, lambda: models[family])  # which imports its module
    if not known_model:
        raise UsageError(
            f"model.architecture: {architecture} is not a causal language model that transformers "
            f"{transformers.__version__} has: take another (LlamaConfig is one), or another version of it"
        )
    known = _known_keys(family)
    if unknown := sorted(values.keys() - known):
        raise UsageError(f"model.config: {architecture} does not know {unknown[0]}")
    if "is_decoder" in known:  # else BERT and similar models would see the token that they must predict
        values = {**values, "is_decoder": True}
    return _sound(architecture, lambda: family(**values))


def _known_keys(family: Any) -> set[str]:
    """A config class takes any key and ignores unknown ones: a typo would train another model."""
    return {*family().to_dict(), *family.attribute_map, *_ALSO_KNOWN}


def _check_sizes(config: Any, vocabulary: int, sequence_length: int) -> None:
    text = config.get_text_config()
    if text.vocab_size < vocabulary:
        raise UsageError(f"model.config: vocab_size must be at least {vocabulary}, as the data has so many tokens")
    longest = getattr(text, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < sequence_length:
        name = type(config).__name__
        raise UsageError(f"data.sequence_length: {name} with this config takes at most {longest} tokens")


def _check_tables(config: Any) -> None:
    name, text = type(config).__name__, config.get_text_config()
    if name in _TABLES:
        positions, width = _TABLES[name]
        if getattr(text, positions) * getattr(text, width) > MAX_TABLE:
            raise UsageError(f"model.config: {name} has more than {MAX_TABLE} positions times {width}")
    if any(factor > 1 for factor in _rotary_factors(config.to_dict())):  # the table would be wider than a head
        raise UsageError("model.config: partial_rotary_factor must be at most 1")


def _rotary_factors(values: dict[str, Any]) -> Iterator[float]:
    """Those of a config, under whichever kind of layers they are."""
    for key, value in values.items():
        if key == "partial_rotary_factor":
            yield value or 0
        elif isinstance(value, dict):
            yield from _rotary_factors(value)


def _construct(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    def make() -> nn.Module:
        text = config.get_text_config()
        if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:  # a class's default, for another tokenizer
            text.pad_token_id = None
        module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
        table = module.get_input_embeddings()
        if getattr(table, "padding_idx", None) is not None:  # nothing is padded here: that token learns as any other
            table.padding_idx = None
        return module  # type: ignore[no-any-return]

    return _sound(type(config).__name__, make)


def _sound(architecture: str, make: Callable[[], T]) -> T:
    """Turns whatever transformers raises about a manifest's values into a UsageError."""
    try:
        return make()
    except (OutOfMemory, UsageError):
        raise
    except Exception as error:  # its models raise everything from KeyError to AssertionError
        why = in_one_line(error)
        raise UsageError(f"model.config: {architecture} cannot be built from it: {why}") from error


def _leave_mask_to_attention(module: nn.Module) -> None:
    """Where every layer's mask is the causal one and nothing else, let torch's attention apply it by its own flag.

    By transformers' own way a model asks in each forward pass whether positions or paddings want another mask, which
    waits for the GPU, and a compiled model gets a mask of (batch, 1, length, length) always: no flash attention. An
    attention under a name of one's own gets no mask. What the model would ask for is found by asking for it: a short
    text goes through with a mask function that takes notes, and must give the same to the bit.
    """
    from transformers import AttentionMaskInterface

    own: Any = module
    if getattr(own.config, "_attn_implementation", None) != "sdpa":  # as with softcapping
        return
    plain: list[bool] = []

    def note(*_: Any, allow_is_causal_skip: bool = False, local_size: int | None = None, **__: Any) -> None:
        plain.append(allow_is_causal_skip and local_size is None)

    AttentionMaskInterface.register(f"{CAUSAL}_noted", note)
    register_attention()
    was_training = module.training
    module.eval()
    try:
        expected = _short_logits(module)
        own.set_attn_implementation(f"{CAUSAL}_noted")
        same = torch.equal(_short_logits(module), expected)
    except Exception:  # noqa: BLE001 (its models raise everything; whether it can be trained is found by `try_out`)
        same = False
    module.train(was_training)
    own.set_attn_implementation(CAUSAL if same and plain and all(plain) else "sdpa")


def register_attention() -> None:
    """In transformers' list, which is each process's own."""
    from transformers import AttentionInterface

    for name in (CAUSAL, f"{CAUSAL}_noted"):
        AttentionInterface.register(name, _attention)


def _attention(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Any]:
    """torch's. On a CPU in fp32, as its backward pass in bf16 takes five times as long there (torch 2.13)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return sdpa_attention_forward(module, query, *others, **options)  # type: ignore[no-any-return]
    exact = [other.float() if isinstance(other, Tensor) else other for other in others]
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(module, query.float(), *exact, **options)  # type: ignore[no-any-return]


def _short_logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(input_ids=torch.arange(8)[None], use_cache=False).logits
    return logits


@contextmanager
def _bounded(max_parameters: int) -> Iterator[None]:
    """Stop in the middle of building a model that this machine could not hold."""
    elements = modules = 0

    def on_parameter(_module: nn.Module, _name: str, parameter: Tensor | None) -> None:
        nonlocal elements
        elements += 0 if parameter is None else parameter.numel()
        if elements > max_parameters:
            raise OutOfMemory(
                f"the run's model has more than {rate(max_parameters)} parameters: the weights and their gradient do "
                "not fit into this machine's memory. Join another run, or use a larger machine"
            )

    def on_module(_module: nn.Module, _name: str, _submodule: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MAX_MODULES:
            raise UsageError(f"model.config: the model has more than {MAX_MODULES} parts")

    hooks = [
        register_module_parameter_registration_hook(on_parameter),
        register_module_buffer_registration_hook(on_parameter),  # a table of positions may be larger than the weights
        register_module_module_registration_hook(on_module),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def offline() -> Iterator[None]:
    """Let nothing in here reach a model hub, whatever a config asks for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
