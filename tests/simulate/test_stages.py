"""A model cut into stages: the same arithmetic as the whole one, whoever computes which part of it."""

from collections import Counter

import pytest
import torch
from test_experiment import INNER, MODEL, SMALL, curve, workload

from noloco_node.core.codecs.activations import CODECS
from noloco_node.errors import UsageError
from noloco_node.run.schema import ModelSpec
from noloco_node.simulate.replicas import ReplicaBatch
from noloco_node.simulate.settings import Settings
from noloco_node.simulate.stages import MICRO_BATCHES, Cut, Routes
from noloco_node.training.model import build, next_token_loss

DEEP = ModelSpec(
    architecture="LlamaConfig", config={**MODEL.config, "num_hidden_layers": 2, "tie_word_embeddings": False}
)
TOKENS = torch.randint(0, 256, (4, 8, 17), generator=torch.Generator().manual_seed(1))


def settings(**changed):
    return Settings(**{**SMALL, "model": DEEP, "inner": INNER, **changed})


def replicas(**changed):
    return ReplicaBatch(build(DEEP, 256, 1), settings(**changed))


def spread_out(batch):
    """Replicas that differ, so that it matters whose weights are used."""
    batch.theta += 0.1 * torch.randn(batch.theta.shape, generator=torch.Generator().manual_seed(2))
    return batch


def by_name(batch, row, stages):
    """The gradients of a row's parameters."""
    found = {}
    for stage in range(stages):
        layout, own = batch.layout(stage), batch.gradients[row, batch.columns(stage)]
        parts = own.split([shape.numel() for shape in layout.values()])
        found |= {name: part.view(shape) for (name, shape), part in zip(layout.items(), parts, strict=True)}
    return found


def test_layers_are_cut_in_equal_parts_and_the_ends_have_the_rest():
    cut = Cut(build(DEEP, 256, 1), 2)
    assert cut.ends == ["model.layers.0"]
    for name, stage in cut.stage_of.items():
        assert stage == (0 if name.startswith(("model.embed", "model.layers.0.")) else 1), name
    with pytest.raises(UsageError, match="2 layers makes 1 to 2 stages, not 3"):
        Cut(build(DEEP, 256, 1), 3)
    assert set(Cut(build(MODEL, 256, 1), 1).stage_of.values()) == {0}


def test_fixed_routes_of_exact_activations_are_the_whole_model():
    whole, cut = replicas(), replicas(stages=2, routing="fixed")
    routes = Routes(settings(stages=2, routing="fixed")).next()
    torch.testing.assert_close(cut.backward(TOKENS, routes), whole.backward(TOKENS))
    for row in range(4):
        expected, got = by_name(whole, row, 1), by_name(cut, row, 2)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
def test_a_gradient_lies_where_its_route_went(codec):
    batch = spread_out(replicas(stages=2, activations=codec))
    losses = batch.backward(TOKENS, [[(0, 2), (1, 3), (2, 0), (3, 1)]])
    for row, other in ((0, 2), (3, 1)):
        module = build(DEEP, 256, 1)
        for stage, replica in ((0, row), (1, other)):
            at = batch.columns(stage).start
            for name, shape in batch.layout(stage).items():
                module.get_parameter(name).data = batch.theta[replica, at : at + shape.numel()].view(shape).clone()
                at += shape.numel()
        loss = next_token_loss(module, TOKENS[row])
        loss.backward()
        torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-3, atol=0)
        for stage, replica in ((0, row), (1, other)):
            for name in batch.layout(stage):
                got, exact = by_name(batch, replica, 2)[name], module.get_parameter(name).grad
                assert (got - exact).norm() <= (1e-6 if codec == "fp32" else 0.02) * exact.norm(), name


def test_each_replica_gets_as_many_micro_batches_by_whatever_route():
    for routing in ("random", "fixed"):
        routes = Routes(settings(stages=2, routing=routing, inner=INNER.model_copy(update={"batch_tokens": 128})))
        step = routes.next()
        assert len(step) == MICRO_BATCHES
        for stage in range(2):
            assert set(Counter(route[stage] for ways in step for route in ways).values()) == {MICRO_BATCHES}
        straight = [[(row, row) for row in range(4)]] * MICRO_BATCHES
        assert (step == straight) == (routing == "fixed")


def test_each_stage_averages_in_pairs_of_its_own():
    whole = curve(workload(model=DEEP), "noloco")
    cut = curve(workload(model=DEEP, stages=2, activations="int8"), "noloco")
    alone = curve(workload(model=DEEP, stages=2, activations="int8"), "local")
    assert (cut.bytes_per_param, cut.tokens) == (pytest.approx(whole.bytes_per_param), whole.tokens)
    assert cut.averaged_model_loss[-1] == pytest.approx(whole.averaged_model_loss[-1], rel=0.03)
    assert cut.replica_std[-1] < alone.replica_std[-1]
    assert (whole.bytes_per_token, cut.bytes_per_token) == (0, 2 * (16 + 2))


def test_stages_have_no_defences_yet():
    with pytest.raises(UsageError, match="--no-defences"):
        settings(stages=2, defences=True)
