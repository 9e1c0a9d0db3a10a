"""A transformers Trainer as a node, alone, and a model with adapters of peft."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_device import pretended_gpu
from torch import nn

from noloco_node.errors import UsageError
from noloco_node.loop.task import Trained
from noloco_node.training import model

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")


class FakeSwarm:
    """Keeps what it is told."""

    over = False

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.left = False

    def __enter__(self) -> "FakeSwarm":
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True

    def step(self, loss: Any) -> None:
        self.losses.append(float(loss))


class Mean(nn.Module):
    """Its loss is 1 where its weights are 0, and 4 where the labels are 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.layer(inputs)
        return {"loss": nn.functional.mse_loss(made, labels), "logits": made}


class Share(Mean):
    """As transformers' own models are: told how many labels a step has."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **named: Any) -> dict[str, torch.Tensor]:
        made = self.layer(inputs)
        return {"loss": (made - labels).square().sum() / named["num_items_in_batch"], "logits": made}


def callback_of(enter: Callable[..., Any]) -> Any:
    from noloco_node.loop.hugging_face import SwarmCallback  # late: it imports transformers

    return SwarmCallback(enter)


def train(net: nn.Module, data: list[Any], callbacks: Any, folder: Path, held_out: Any = None, **given: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(folder), **{**quiet, **given})
    return Trainer(net, arguments, train_dataset=data, eval_dataset=held_out, callbacks=callbacks).train()


@pytest.mark.timeout(300)
def test_a_trainer_trains_a_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from noloco_node import loop

    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path / "home"))
    run = tmp_path / "run.toml"
    run.write_text('name = "hf"\nrounds = 3\nmodel = { task = "net" }\ninner = { steps = 5, batch_tokens = 4 }\n')
    data = [{"inputs": torch.randn(8), "labels": torch.ones(2)} for _ in range(64)]
    callback = callback_of(lambda model, optimizer: loop.start(run, model, optimizer, listen="/ip4/127.0.0.1/tcp/0"))
    how = {"max_steps": 1000, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    done = train(Mean(), data, [callback], tmp_path / "out", **how)
    assert done.global_step == 15, "three rounds of five steps"
    assert callback.swarm is None
    assert list((tmp_path / "home").glob("runs/*/checkpoints/*"))


def test_of_a_model_with_adapters_they_alone_are_averaged() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(nn.Sequential(nn.Linear(8, 6)), peft.LoraConfig(r=4, target_modules=["0"]))
    trained = Trained(adapted)
    assert sum(weights.numel() for weights in trained.parameters()) == 4 * (8 + 6)
    flat = model.flatten(trained)
    frozen, before = adapted.base_model.model[0].base_layer.weight.clone(), adapted(torch.ones(1, 8))
    flat += 0.1
    assert torch.equal(adapted.base_model.model[0].base_layer.weight, frozen)
    assert not torch.allclose(adapted(torch.ones(1, 8)), before), "they lie where they are averaged"


@pytest.mark.parametrize("kind", [Mean, Share])
def test_the_loss_of_a_step_is_that_of_all_its_micro_batches(kind: type[nn.Module], tmp_path: Path) -> None:
    data = [{"inputs": torch.randn(8), "labels": torch.full((2,), 1.0 + (at % 4 < 2))} for at in range(16)]
    swarm = FakeSwarm()
    how = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "train_sampling_strategy": "sequential"}
    callback = callback_of(lambda model, optimizer: swarm)
    train(kind(), data, [callback], tmp_path, max_steps=2, learning_rate=0.0, **how)
    assert swarm.losses == pytest.approx([2.5, 2.5])


@pytest.mark.parametrize("ends", ["in an epoch", "with an epoch", "as nothing gets better"])
def test_the_node_leaves_with_the_weights_of_the_last_step(ends: str, tmp_path: Path) -> None:
    """load_best_model_at_end puts older ones in their place, and the node would save them as the newest."""
    from transformers import EarlyStoppingCallback

    class Weights(FakeSwarm):
        trained = left_with = torch.empty(0)

        def step(self, loss: Any) -> None:
            self.trained = net.layer.weight.detach().clone()

        def __exit__(self, *_: object) -> None:
            self.left_with = net.layer.weight.detach().clone()

    net, swarm = Mean(), Weights()
    callbacks = [callback_of(lambda model, optimizer: swarm)]
    how: dict[str, Any] = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    if ends == "in an epoch":
        how = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    elif ends == "as nothing gets better":
        how |= {"num_train_epochs": 9, "save_strategy": "best", "metric_for_best_model": "loss"}
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=1))
    example = {"inputs": torch.ones(8), "labels": torch.ones(2)}
    held_out = [{**example, "labels": -torch.ones(2)}]  # the more is trained, the worse it becomes
    how |= {"per_device_train_batch_size": 4, "learning_rate": 0.01, "load_best_model_at_end": True}
    train(net, [example] * 8, callbacks, tmp_path, held_out, **how)
    assert not torch.equal(net.layer.weight, swarm.trained), "older weights were loaded"
    assert torch.equal(swarm.left_with, swarm.trained)


def test_a_share_of_several_processes_counts_for_all() -> None:
    callback = callback_of(lambda model, optimizer: FakeSwarm())
    for scaled, expected in ((True, 6.0), (False, 1.5)):
        for loss in (1.0, 0.5):
            callback._look(nn.Identity(), (), {"num_items_in_batch": 8}, {"loss": torch.tensor(loss)})
        arguments = SimpleNamespace(world_size=4, average_tokens_across_devices=scaled)
        assert callback._step_loss(arguments) == expected


def test_a_training_that_was_interrupted_is_left_before_the_next_one_begins() -> None:
    """Its node would have the home still."""
    swarms = [FakeSwarm(), FakeSwarm()]
    coming = iter(swarms)
    callback, model = callback_of(lambda model, optimizer: next(coming)), Mean()
    for _ in swarms:
        callback.on_train_begin(None, None, None, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert [swarm.left for swarm in swarms] == [True, False] and callback.swarm is swarms[1]
    assert len(model._forward_hooks) == 1


def test_a_training_that_could_not_begin_leaves_the_model_as_it_was() -> None:
    """Else each micro-batch's loss would count twice in the next one."""

    def enter(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        raise UsageError("as where another node has the home")

    callback, model = callback_of(enter), Mean()
    with pytest.raises(UsageError):
        callback.on_train_begin(None, None, None, model=model, optimizer=None)
    assert not model._forward_hooks


def test_losses_of_a_step_may_lie_on_several_devices() -> None:
    """As with nn.DataParallel, which a Trainer uses where it sees several GPUs."""
    with pretended_gpu():
        callback, step = callback_of(lambda model, optimizer: FakeSwarm()), SimpleNamespace(world_size=1)
        for loss, device in ((1.0, "cuda"), (2.0, "cpu")):
            callback._look(nn.Identity(), (), {}, {"loss": torch.tensor(loss, device=device)})
        assert callback._step_loss(step) == 1.5
