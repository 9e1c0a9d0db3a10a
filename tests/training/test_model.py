"""Models: the same from the same seed, laid out alike, and a stranger's manifest builds nothing that harms."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import SMALL
from torch import nn

from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.run.schema import ModelSpec
from noloco_node.training import model

TINY = ModelSpec(preset="tiny")


def small(architecture: str = "LlamaConfig", **values: Any) -> ModelSpec:
    return ModelSpec(architecture=architecture, config={**SMALL, **values})


def test_the_same_seed_gives_the_same_weights() -> None:
    one, again, other = (model.build(small(), 256, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_building_leaves_the_chance_of_others_alone() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    model.build(small(), 256, 1)
    assert torch.equal(torch.randn(3), expected)


def test_arithmetic_is_counted_as_papers_do() -> None:
    """6 for each parameter that is multiplied with, and attention's products over a window."""
    tied = model.build(small(tie_word_embeddings=True), 256, 1)
    apart = model.build(small(tie_word_embeddings=False), 256, 1)
    attention = 12 * SMALL["num_hidden_layers"] * SMALL["hidden_size"] * 16
    products = sum(p.numel() for p in tied.parameters())
    assert model.flops_per_token(tied, 16) == 6 * products + attention
    assert model.flops_per_token(apart, 16) == 6 * products + attention, "a table that is only looked up is no product"
    experts = {"num_local_experts": 4, "num_key_value_heads": 2}
    assert model.flops_per_token(model.build(small("MixtralConfig", **experts), 256, 1), 16) is None


def test_the_tiny_preset() -> None:
    tiny = model.build(TINY, 256, 1, 128)
    assert 0.3e6 < sum(p.numel() for _, p in model.parameters(tiny)) < 0.5e6
    assert all(p.dtype == torch.float32 for p in tiny.parameters())


@pytest.mark.parametrize(("name", "millions"), [("125m", 134), ("350m", 374), ("1b", 1345), ("7b", 6738)])
def test_the_presets_have_the_sizes_of_the_papers(name: str, millions: float) -> None:
    """On the meta device, so that none of them costs memory."""
    config = model._config(ModelSpec(preset=name), 32_000)
    with torch.device("meta"):
        module = model._construct(config)
    found = sum(p.numel() for p in module.parameters()) / 1e6
    print(f"{name}: {found:.1f} M parameters with 32,000 tokens")  # noqa: T201
    assert found == pytest.approx(millions, abs=1)


def test_a_models_vocabulary_is_the_datas_or_its_own() -> None:
    assert model.sizes(TINY, 256)[1] == 256 and model.sizes(small(vocab_size=500), 256)[1] == 500


def test_the_layout_digest_sees_names_shapes_and_order() -> None:
    def digest(**values: Any) -> bytes:
        return model.layout_digest(model.build(small(**values), 256, 1))

    assert digest() == digest() and len(digest()) == 32
    assert len({digest(), digest(num_hidden_layers=2), digest(intermediate_size=17), digest(attention_bias=True)}) == 4
    half = model.build(small(), 256, 1).to(torch.float64)
    assert model.layout_digest(half) != digest()


def test_matrices_come_first_and_tied_parameters_once() -> None:
    tied = model.parameters(model.build(small(tie_word_embeddings=True), 256, 1))
    loose = model.parameters(model.build(small(tie_word_embeddings=False), 256, 1))
    assert [n for n, _ in loose if n not in dict(tied)] == ["lm_head.weight"]
    dims = [p.dim() for _, p in loose]
    assert dims == sorted(dims, reverse=True)


@pytest.mark.parametrize("tied", [True, False])
def test_flat_vectors_are_the_model(tied: bool) -> None:
    module, untouched = (model.build(small(tie_word_embeddings=tied), 256, 1) for _ in range(2))
    windows = torch.randint(0, 256, (2, 9))
    theta = model.flatten(module)
    losses = [model.next_token_loss(m, windows) for m in (module, untouched)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for mine, other in zip(module.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    theta.zero_()
    assert all(not p.any() for p in module.parameters())
    assert module.lm_head.weight.data_ptr() == theta.data_ptr() or not tied


def test_the_loss_predicts_the_next_token() -> None:
    class Copier(nn.Module):
        """Certain that the next token is the present one plus 1."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            logits = 100.0 * nn.functional.one_hot((input_ids + 1) % 8, 8).float()
            return type("Output", (), {"logits": logits})

    counting = torch.arange(6).repeat(2, 1)
    assert model.next_token_loss(Copier(), counting) < 1e-6
    assert model.next_token_loss(Copier(), counting.flip(1)) > 50


def test_an_encoder_is_made_to_look_back_only() -> None:
    bert = model.build(small("BertConfig"), 256, 1).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8] ^= 1
    before, after = (bert(input_ids=t).logits[0, :8] for t in (tokens, changed))
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["FooConfig", "AutoConfig", "ViTConfig", "PreTrainedConfig", "BitsAndBytesConfig"])
def test_what_is_no_causal_language_model_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        model.build(ModelSpec(architecture=name, config={}), 256, 1)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"hiden_size": 8}, "hiden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 3}, "attention"),
        ({"hidden_size": 0}, "LlamaConfig"),
        ({"hidden_act": "magic"}, "LlamaConfig"),
        ({"vocab_size": 100}, "vocab_size must be at least 256"),
        ({"max_position_embeddings": 8}, "at most 8 tokens"),
    ],
)
def test_values_that_do_not_fit_are_one_sentence(values: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names) as error:
        model.build(small(**values), 256, 1, sequence_length=16)
    assert "\n" not in str(error.value)


def test_a_dtype_from_the_manifest_changes_nothing() -> None:
    module = model.build(small(dtype="bfloat16"), 256, 1)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_model_beyond_this_machine_is_given_up_before_it_is_made() -> None:
    with pytest.raises(OutOfMemory, match="parameters"):
        model.build(small(hidden_size=1 << 20, intermediate_size=1 << 24), 256, 1)


def test_a_model_of_endless_parts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_MODULES", 200)
    with pytest.raises(UsageError, match="more than 200 parts"):
        model.build(small(num_hidden_layers=100), 256, 1)


def test_a_table_beyond_this_machine_is_given_up_too() -> None:
    """GPT-J's table of positions is no parameter."""
    with pytest.raises(OutOfMemory, match="do not fit"):
        model.build(ModelSpec(architecture="GPTNeoConfig", config={"max_position_embeddings": 1 << 24}), 256, 1)


@pytest.mark.parametrize("architecture", sorted(model.TABLES_IN_PYTHON))
def test_a_table_that_is_computed_in_python_is_given_up_first(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(architecture=architecture, config={"max_position_embeddings": 1 << 20})
    monkeypatch.setattr(model, "_construct", lambda *_: pytest.fail("it was made"))
    with pytest.raises(UsageError, match=f"{architecture} has more than 2097152 positions times hidden_size"):
        model.build(spec, 256, 1)
    with pytest.raises(UsageError, match="times hidden_size"):
        model.outline(spec, 256)


NEOX = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
PER_LAYER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2e5}


@pytest.mark.parametrize(
    ("architecture", "config", "why"),
    [
        ("MptConfig", {"d_model": 16, "n_heads": 4, "n_layers": 1, "max_seq_len": 1 << 20}, "positions times n_heads"),
        ("GPTNeoXConfig", {**NEOX, "partial_rotary_factor": 2e5}, "partial_rotary_factor must be at most 1"),
        ("GPTNeoXConfig", {**NEOX, "rope_parameters": PER_LAYER}, "partial_rotary_factor must be at most 1"),
        ("Gemma3TextConfig", {"rope_parameters": {"full_attention": PER_LAYER}}, "must be at most 1"),
    ],
)
def test_a_table_that_a_forward_pass_would_make_is_given_up_first(
    architecture: str, config: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_construct", lambda *_: pytest.fail("it was made"))
    with pytest.raises(UsageError, match=why):
        model.build(ModelSpec(architecture=architecture, config=config), 1 << 18, 1)


def test_all_models_that_compute_a_table_in_python_are_known() -> None:
    """As transformers writes it; another version may have more of them."""
    import transformers

    found = set()
    for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        folder = Path(sys.modules[config.__module__].__file__ or "").parent
        if any("np.power(10000" in path.read_text() for path in folder.glob("modeling_*.py")):
            found.add(config.__name__)
    assert found <= model.TABLES_IN_PYTHON and found


def test_nothing_asks_a_hub_while_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    seen = [constants.HF_HUB_OFFLINE]
    monkeypatch.setattr(model, "_config", lambda *_: seen.append(constants.HF_HUB_OFFLINE) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.build(small(), 256, 1)
    seen.append(constants.HF_HUB_OFFLINE)
    assert seen == [seen[0], True, seen[0]]


def test_a_token_that_a_class_pads_with_learns_as_any_other() -> None:
    spec = ModelSpec(architecture="OPTConfig", config={**SMALL_OPT, "pad_token_id": 1})
    module: Any = model.build(spec, 64, 1, 16)
    table = module.get_input_embeddings()
    module(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert table.weight.grad[1].abs().sum() > 0


SMALL_OPT = {
    "hidden_size": 16,
    "ffn_dim": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "word_embed_proj_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
