"""The batched Llama against transformers' own, replica by replica."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from noloco_node.errors import UsageError
from noloco_node.simulate.batched_llama import BatchedLlama, Shape, stacked

SMALL = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


def replicas(count, **changed):
    modules = []
    for seed in range(count):
        torch.manual_seed(seed)
        modules.append(LlamaForCausalLM(LlamaConfig(**{**SMALL, "initializer_range": 0.3, **changed})))
    layout = {name: parameter.shape for name, parameter in modules[0].named_parameters()}
    theta = torch.stack([torch.cat([p.detach().flatten() for p in module.parameters()]) for module in modules])
    return modules, layout, theta


@pytest.mark.parametrize(
    "changed", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2, "head_dim": 8, "rope_theta": 100.0}]
)
def test_losses_and_gradients_are_transformers(changed):
    modules, layout, theta = replicas(3, **changed)
    tokens = torch.randint(32, (3, 2, 17), generator=torch.Generator().manual_seed(1))
    weights = {name: weight.requires_grad_() for name, weight in stacked(theta, layout).items()}
    losses = BatchedLlama(Shape.of(modules[0].config), layout).loss(weights, tokens)
    gradients = dict(zip(weights, torch.autograd.grad(losses.sum(), list(weights.values())), strict=True))
    for row, module in enumerate(modules):
        logits = module(tokens[row, :, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[row, :, 1:].flatten())
        expected.backward()
        torch.testing.assert_close(losses[row], expected, rtol=1e-5, atol=1e-5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name][row], parameter.grad, rtol=1e-3, atol=1e-5)


def test_bf16_products_change_the_loss_by_little():
    modules, layout, theta = replicas(2)
    tokens = torch.randint(32, (2, 2, 17), generator=torch.Generator().manual_seed(1))
    exact, rough = (
        BatchedLlama(Shape.of(modules[0].config), layout, dtype).loss(stacked(theta, layout), tokens)
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.02)
    assert not torch.equal(rough, exact)


@pytest.mark.parametrize("changed", [{"attention_bias": True}, {"hidden_act": "gelu"}])
def test_what_it_does_not_compute_it_refuses(changed):
    with pytest.raises(UsageError, match="plain Llamas only"):
        Shape.of(LlamaConfig(**{**SMALL, **changed}))
