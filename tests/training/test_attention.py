"""Attention: where the causal mask is the only one it is torch's own flag, compiled and not, and nothing is read."""

from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.run.schema import ModelSpec
from noloco_node.training import language, model

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LENGTH = 24
CAUSAL = {
    "Llama": ("LlamaConfig", GROUPED),
    "Qwen2": ("Qwen2Config", GROUPED),
    "Qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "Mistral": ("MistralConfig", {**GROUPED, "sliding_window": None}),
    "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0}),
}
OTHERS = {
    "Mistral with a window": ("MistralConfig", {**GROUPED, "sliding_window": 8}),
    "Qwen2 with a window": (
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "Gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    "Bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
}
traced = pytest.mark.filterwarnings("ignore")
"""torch's compiler warns of its own parts."""
Named = tuple[str, dict[str, Any]]


def built(named: Named) -> Any:
    return model.build(ModelSpec(architecture=named[0], config=named[1]), 256, 1, LENGTH).train()


def windows() -> Tensor:
    return torch.randint(0, 256, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def learned(module: nn.Module) -> list[Tensor]:
    """Its loss and gradients."""
    module.zero_grad()
    torch.manual_seed(1)  # for dropout
    loss = model.next_token_loss(module, windows())
    loss.backward()
    return [loss, *(p.grad for p in module.parameters() if p.grad is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Reads(TorchDispatchMode):
    """What the CPU would wait for: a tensor's value is read."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += call._schema.name in {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CAUSAL)
def test_loss_and_gradients_stay_the_same_and_nothing_is_read(name: str) -> None:
    ours, theirs = built(CAUSAL[name]), built(CAUSAL[name])
    assert ours.config._attn_implementation == model.CAUSAL
    theirs.set_attn_implementation("sdpa")
    assert same(learned(ours), learned(theirs))
    with Reads() as reads:
        learned(ours)
    assert reads.count == 0


def test_a_value_that_is_read_is_counted() -> None:
    llama = built(CAUSAL["Llama"])
    llama.set_attn_implementation("sdpa")
    with Reads() as reads:
        learned(llama)
    assert reads.count > 0, "or the test above proves nothing"


class Attends(TorchDispatchMode):
    """The types in which torch's attention computes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in call._schema.name:
            self.types |= {part.dtype for part in args if isinstance(part, Tensor) and part.is_floating_point()}
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "types"), [(model.CAUSAL, {torch.float32}), ("sdpa", {torch.bfloat16, torch.float32})]
)
def test_on_a_cpu_attention_is_in_fp32_where_products_are_in_bf16(name: str, types: set[torch.dtype]) -> None:
    """torch's own has the sums of the softmax alone in fp32."""
    llama = built(CAUSAL["Llama"])
    llama.set_attn_implementation(name)
    with Attends() as attends, torch.autocast("cpu", torch.bfloat16):
        loss = model.next_token_loss(llama, windows())
        torch.autograd.grad(loss, list(llama.parameters()))
    assert attends.types == types


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_with_another_mask_keeps_it(name: str) -> None:
    ours = built(OTHERS[name])
    assert ours.config._attn_implementation in {"sdpa", "eager"}
    assert ours.training


def test_building_leaves_the_weights_and_the_config_alone() -> None:
    ours = built(CAUSAL["Llama"])
    assert model.CAUSAL not in str(ours.config.to_dict()), "an export names no attention of ours"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What torch.compile traces; it runs without the code generator, which takes a minute."""
    found: list[Any] = []

    def kept(graph: Any, _: object) -> Any:
        found.append(graph)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=kept))
    yield found
    torch._dynamo.reset()


def attention_of(graphs: list[Any]) -> set[tuple[object, bool]]:
    """Of each call of torch's attention: `is_causal`, and whether it has a mask."""
    calls = [node for graph in graphs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    return {(call.kwargs["is_causal"], call.kwargs["attn_mask"] is not None) for call in calls}


@traced
@pytest.mark.parametrize("name", CAUSAL)
def test_one_layer_is_compiled_for_all_and_keeps_flash_attention(name: str, graphs: list[Any]) -> None:
    plain, compiled = built(CAUSAL[name]), built(CAUSAL[name])
    model.compile_layers(compiled)
    if name == "GPT-2":  # whose dropout in attention draws other numbers where it is traced
        plain.eval()
        compiled.eval()
    assert same(learned(compiled), learned(plain))
    assert len(graphs) == 1
    assert attention_of(graphs) == {(True, False)}


@traced
def test_a_window_stays_a_mask_when_compiled(graphs: list[Any]) -> None:
    plain, compiled = (built(OTHERS["Mistral with a window"]) for _ in range(2))
    model.compile_layers(compiled)
    assert same(learned(compiled), learned(plain))
    assert len(graphs) == 1
    assert attention_of(graphs) == {(False, True)}


def test_layers_are_compiled_and_not_the_experts_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    module = nn.Module()
    module.layers = nn.ModuleList(Layer() for _ in range(3))
    compiled: list[nn.Module] = []

    def noted(layer: nn.Module) -> None:
        compiled.append(layer)

    monkeypatch.setattr(nn.Module, "compile", noted)
    model.compile_layers(module)
    assert compiled == list(module.layers)


@traced
def test_a_text_is_written_without_compiling_for_each_length(graphs: list[Any]) -> None:
    compiled = built(CAUSAL["Llama"])
    expected = language.Window(compiled.eval(), LENGTH, [1, 2, 3]).logits()
    model.compile_layers(compiled)
    writing = language.Window(compiled, LENGTH, [1, 2, 3])
    assert torch.equal(writing.logits(), expected)
    writing.add(4)
    writing.logits()
    assert not graphs


@traced
def test_a_model_without_layers_of_one_kind_is_compiled_whole(graphs: list[Any]) -> None:
    class Whole(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return given + 1

    module = Whole()
    model.compile_layers(module)
    module(torch.ones(1, 2))
    assert len(graphs) == 1
