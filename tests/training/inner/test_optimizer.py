"""AdamW's moments: as torch has them, or of 8 bits by bitsandbytes, which is an extra."""

import importlib.util
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import small_run, small_text, train

from noloco_node.checkpoints import checkpoint
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.errors import UsageError
from noloco_node.host.config import EIGHT_BIT, FULL, MOMENTS
from noloco_node.node.build_training import using
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec
from noloco_node.training.build import build_replica
from noloco_node.training.inner import optimizer
from noloco_node.training.inner.optimizer import SMALL, Optimizer
from noloco_node.training.replica import WARM_UP_STEPS, Replica

has_8bit = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: the extra 8bit"
)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
RUN = small_run(rounds=20).model_copy(
    update={"model": ModelSpec(architecture="LlamaConfig", config={**WIDE, "tie_word_embeddings": True})}
)
"""Large enough that most of its tensors have moments of 8 bits, and some do not."""


def replica(moments: str) -> Replica:
    return build_replica(RUN, "a", device="cpu", threads=1, corpus=small_text(), moments=moments)


def flat(state: Mapping[int, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    return {f"{place}.{name}": value for place, moments in state.items() for name, value in moments.items()}


def same(one: Replica, other: Replica) -> bool:
    mine, theirs = flat(one._optimizer.state()), flat(other._optimizer.state())
    moments = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return moments and torch.equal(one.theta, other.theta)


@has_8bit
def test_8_bits_take_a_quarter_of_the_memory_and_the_parameters_stay_views() -> None:
    small, full = replica(EIGHT_BIT), replica(FULL)
    for each in (small, full):
        train(each, 3)
    taken = [sum(value.nbytes for value in flat(each._optimizer.state()).values()) for each in (small, full)]
    assert taken[0] / small.parameters == pytest.approx(2 + 8 / 256, rel=0.05)
    assert taken[1] / small.parameters == pytest.approx(8, rel=0.01)
    coded = [p.numel() >= SMALL for _, p, _, _ in small._optimizer._places()]
    assert coded == ["absmax1" in moments for moments in small._optimizer.state().values()] and not all(coded)
    theta = small.theta.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == theta for p in small.module.parameters())


@has_8bit
def test_8_bits_learn_as_quickly() -> None:
    losses = {kind: train(replica(kind), 60) for kind in MOMENTS}
    assert losses[EIGHT_BIT][0] == losses[FULL][0] and losses[EIGHT_BIT] != losses[FULL]
    assert losses[EIGHT_BIT][-1] == pytest.approx(losses[FULL][-1], rel=0.02)


@pytest.mark.parametrize("kind", [FULL, pytest.param(EIGHT_BIT, marks=has_8bit)])
def test_a_checkpoint_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    first, again = replica(kind), replica(kind)
    train(first, 4)
    checkpoint.save(tmp_path, first.state(), RUN.run_id, first.layout)
    keeper = CheckpointKeeper(tmp_path, RUN.run_id)
    assert keeper.resume(again.layout, using(RUN, again, again.load), again.parameters)
    assert same(first, again) and not again.warming_up
    assert train(first, 5) == train(again, 5) and same(first, again)


@has_8bit
@pytest.mark.parametrize(("wrote", "reads"), [(FULL, EIGHT_BIT), (EIGHT_BIT, FULL)])
def test_a_checkpoint_of_the_other_kind_is_read_and_adamw_begins_afresh(
    wrote: str, reads: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, again = replica(wrote), replica(reads)
    train(first, 4)
    checkpoint.save(tmp_path, first.state(), RUN.run_id, first.layout)
    keeper = CheckpointKeeper(tmp_path, RUN.run_id)
    assert keeper.resume(again.layout, using(RUN, again, again.load), again.parameters)
    assert torch.equal(again.theta, first.theta) and not again._optimizer.state() and again.warming_up
    assert again.steps == first.steps and "other --moments" in caplog.text
    assert all(map(math.isfinite, train(again, WARM_UP_STEPS))) and not again.warming_up


@has_8bit
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(absmax2=-m["absmax2"] - 1), "absmax2 of the optimizer is below zero"),
        (lambda m: m.update(absmax1=m["absmax1"] + math.inf), "absmax1 holds NaN or Inf"),
        (lambda m: m.update(absmax1=m["absmax1"][1:]), "AdamW is not of this model"),
        (lambda m: m.update(state1=m["state1"].float()), "state1 is no tensor of 8-bit numbers"),
        (lambda m: m.pop("absmax2"), "AdamW is not of this model"),
        (lambda m: (m.pop("absmax1"), m.pop("absmax2")), "AdamW is not of this model"),
        (lambda m: m.update(step=torch.tensor(-1.0)), "step of the optimizer"),
    ],
)
def test_crafted_moments_of_8_bits_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    first, again = replica(EIGHT_BIT), replica(EIGHT_BIT)
    train(first, 2)
    state = first.state()
    change(state.inner["optimizer"][0])
    checkpoint.save(tmp_path, state, RUN.run_id, first.layout)
    found = checkpoint.newest
    with pytest.raises(Exception, match=says) as refused:
        result = found(tmp_path, RUN.run_id, again.layout, use=using(RUN, again, again.load))
        assert result.checkpoint is None
        raise ValueError(result.skipped[0])
    assert refused.value and not again._optimizer.state()


def test_without_its_library_8_bits_are_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match=r"--moments 8bit needs another package: .* -m pip install"):
        replica(EIGHT_BIT)


def test_moments_are_torchs_own_to_the_bit() -> None:
    """They are made before the first step, so that a step changes nothing where there is no memory for them."""
    ours, plain = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    plain.load_state_dict(ours.state_dict())
    spec = InnerSpec(batch_tokens=1)
    mine, theirs = Optimizer(ours, spec), Optimizer(plain, spec)._adamw
    for _ in range(3):
        for module in (ours, plain):
            module.zero_grad()
            module(torch.ones(2, 5)).square().sum().backward()
        norm = mine.norm()
        mine.step(0.1)
        torch.nn.utils.clip_grads_with_norm_(plain.parameters(), spec.clip, norm)
        for group in theirs.param_groups:
            group["lr"] = 0.1
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_where_there_is_no_memory_for_the_moments_no_parameter_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Linear(5, 3)
    before = [p.detach().clone() for p in module.parameters()]
    mine = Optimizer(module, InnerSpec(batch_tokens=1))
    module(torch.ones(2, 5)).sum().backward()
    mine.norm()
    made, zeros = [], torch.zeros_like

    def some(*args: Any) -> torch.Tensor:
        made.append(zeros(*args))
        if len(made) == 3:
            raise torch.OutOfMemoryError
        return made[-1]

    monkeypatch.setattr(optimizer.torch, "zeros_like", some)
    with pytest.raises(torch.OutOfMemoryError):
        mine.step(0.1)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    mine.step(0.1)
    assert not torch.equal(module.weight, before[0])
    assert torch.load(io.BytesIO(_saved(mine.state())), weights_only=True).keys() == {0, 1}


def _saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@has_8bit
def test_what_8_bits_do_to_the_loss() -> None:
    """The `tiny` preset on Python's own library, three seeds, the same batches: held-out losses after 600 steps."""
    found = {}
    for seed in (1, 2, 3):
        for kind in MOMENTS:
            inner = InnerSpec(steps=50, batch_tokens=2048)
            run = Manifest(name="moments", seed=seed, rounds=12, model=ModelSpec(preset="tiny"), inner=inner)
            trained = build_replica(run, "a", device="cpu", threads=1, moments=kind)
            train(trained, 600)
            found[seed, kind] = trained.evaluate()
            print(f"seed {seed}, {kind}: {found[seed, kind]:.4f}", flush=True)  # noqa: T201
    assert all(abs(found[seed, EIGHT_BIT] / found[seed, FULL] - 1) < 0.01 for seed in (1, 2, 3))


def test_two_gradients_in_one_memory_make_room_for_one() -> None:
    """As autograd has them where two parameters of other shapes are added to the same."""
    pair = torch.nn.ParameterList([torch.randn(2, 3), torch.randn(3, 2)])
    (pair[0].view(6) + pair[1].view(6)).square().sum().backward()
    gradients = [p.grad.data_ptr() for p in pair if p.grad is not None]
    assert gradients[0] == gradients[1], "or the test proves nothing"
    one, other = Optimizer(pair, InnerSpec()).room(list(pair))
    assert one.data_ptr() == gradients[0] != other.data_ptr()
    assert (one.shape, other.shape) == ((2, 3), (3, 2))
