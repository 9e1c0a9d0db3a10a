"""Tasks that a volunteer has installed: found by name, trained like a language model, and refused in one sentence."""

import math
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replicas import small_run, small_text, train
from torch import Tensor, nn

from noloco_node.checkpoints import checkpoint
from noloco_node.errors import Incompatible, UsageError
from noloco_node.node.build_training import using
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec
from noloco_node.training import tasks
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica
from noloco_node.training.task import Batch, Task


def run_of(name: str, batch: int = 32, steps: int = 10, **options: Any) -> Manifest:
    return Manifest(
        name="task",
        rounds=6,
        model=ModelSpec(task=name, options=options),
        inner=InnerSpec(steps=steps, batch_tokens=batch, learning_rate=0.01),
    )


def replica(run: Manifest, peer: str = "a") -> Replica:
    return build_replica(run, peer, device="cpu", threads=1)


class Own:
    """What somebody writes: this model, and a line to be found."""

    tokens_per_example = 1
    micro_examples = 4

    def __init__(self, module: nn.Module, stream: "Points") -> None:
        self._module, self._stream = module, stream

    def model(self) -> nn.Module:
        return self._module

    def stream(self, peer_id: str) -> "Points":
        return self._stream

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0]).squeeze(1) - batch[1]).square().mean()

    def evaluate(self, module: nn.Module, examples: int) -> Any:
        return float(self.loss(module, Points().next(8)))


class Points:
    position: Any = 0

    def seek(self, position: Any) -> None:
        self.position = position

    def next(self, examples: int) -> Batch:
        x = torch.linspace(-1, 1, 4 * examples).view(examples, 4)
        return x, x.sum(1)


def own(module: nn.Module, stream: Points | None = None) -> Replica:
    task = Own(module, stream or Points())
    return build_replica(run_of("own", batch=4), "a", device="cpu", threads=1, brought=task)


def test_images_are_told_apart() -> None:
    inner = replica(run_of("blobs"))
    assert inner.evaluate() == pytest.approx(math.log(4), abs=0.2)
    train(inner, 60)
    assert inner.evaluate() < 0.5 and inner.round == 6


def test_everything_is_determined_by_run_and_peer() -> None:
    one, again, other = (replica(run_of("blobs"), peer) for peer in "aab")
    assert torch.equal(one.theta, other.theta), "all begin alike"
    assert train(one, 4) == train(again, 4) != train(other, 4)


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    run = run_of("blobs", steps=3)
    straight, stopped = replica(run), replica(run)
    losses, first = train(straight, 8), train(stopped, 4)
    checkpoint.save(tmp_path, stopped.state(), run.run_id, stopped.layout)
    resumed = replica(run)
    found = checkpoint.newest(tmp_path, run.run_id, resumed.layout).checkpoint
    assert found is not None
    resumed.load(found)
    assert first + train(resumed, 4) == losses
    assert torch.equal(resumed.theta, straight.theta)


def test_a_task_that_does_not_know_a_position_begins_anew() -> None:
    inner = replica(run_of("blobs"))
    begin, state = inner.stream.position, inner.state()
    state.inner["position"] = -1
    inner.load(state)
    assert inner.stream.position == begin


class MaxNorm(nn.Module):
    """A constraint as it is often written: the parameter becomes another tensor."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.inner, self._left = nn.Linear(4, 1), after

    def forward(self, x: Tensor) -> Tensor:
        self._left -= 1
        if self._left < 0:
            self.inner.weight.data = torch.renorm(self.inner.weight.data, 2, 0, 2.0)
        found: Tensor = self.inner(x)
        return found


@pytest.mark.parametrize("after", [0, 1, 4])
def test_weights_that_are_not_changed_in_place_are_noticed(after: int) -> None:
    """They would be trained, and neither saved nor sent."""
    inner = own(MaxNorm(after))
    with pytest.raises(UsageError, match=r"in place, as `p\.data\.copy_"):
        inner.try_out()
        train(inner, 4)
    assert inner.steps == max(0, after - 1)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_weights_that_no_checkpoint_holds_are_refused(kind: torch.dtype) -> None:
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, dtype=kind))
    with pytest.raises(UsageError, match=f"must be float32, and some are {str(kind)[6:]}: use inner.precision"):
        own(mixed)


def test_gradients_that_have_no_norm_are_found_before_the_first_step() -> None:
    class Table(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.argmax(1))

    own(Table(4, 1)).try_out()
    with pytest.raises(UsageError, match=r"cannot be trained on its data: .*Sparse"):
        own(Table(4, 1, sparse=True)).try_out()


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


def test_running_statistics_are_refused_where_training_changes_them() -> None:
    """They are neither saved nor sent."""
    with pytest.raises(UsageError, match=r"the model's part 1 keeps running statistics.*track_running_stats=False"):
        own(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    for fine in (nn.BatchNorm1d(4, track_running_stats=False), Frozen(4)):
        own(nn.Sequential(nn.Linear(4, 4), fine, nn.Linear(4, 1))).try_out()


class Forces(Own):
    """A loss with a gradient of its own, as of energies and forces."""

    def __init__(self, *, anywhere: bool) -> None:
        super().__init__(nn.Linear(4, 1), Points())
        self._anywhere = anywhere

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with torch.set_grad_enabled(self._anywhere or torch.is_grad_enabled()):
            x = batch[0].detach().requires_grad_()
            (forces,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            return (forces - batch[0]).square().mean()

    def evaluate(self, module: nn.Module, examples: int) -> Any:
        with torch.enable_grad():
            return self.loss(module, Points().next(8))


def test_a_loss_that_needs_gradients_is_found_before_a_swap_is_judged_by_it() -> None:
    def made(anywhere: bool) -> Replica:
        return build_replica(run_of("own", batch=4), "a", device="cpu", brought=Forces(anywhere=anywhere))

    made(False).try_out()
    with pytest.raises(UsageError, match=r"also work without gradients \(`with torch\.enable_grad\(\)"):
        made(False).try_out(losses=True)
    fine = made(True)
    fine.try_out(losses=True)
    assert type(fine.evaluate()) is float, "whatever the task returns: it is written as JSON"


def test_an_evaluation_that_fails_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = own(nn.Linear(4, 1))
    for wrong in (torch.zeros(2), None):
        monkeypatch.setattr(Own, "evaluate", lambda *_, wrong=wrong: wrong)
        with pytest.raises(UsageError, match="the task cannot be evaluated: "):
            inner.try_out(losses=True)


def test_a_loss_of_one_element_is_as_good_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried out before the first step and found to work, works in it."""
    plain, kept, found = own(nn.Linear(4, 1)), own(nn.Linear(4, 1)), Own.loss
    kept.theta.copy_(plain.theta)
    expected = plain.step()
    monkeypatch.setattr(Own, "loss", lambda *given: found(*given)[None])
    kept.try_out(losses=True)
    assert kept.step() == expected


def test_a_stream_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = own(nn.Linear(4, 1))
    inner.step()
    monkeypatch.setattr(Points, "next", lambda *_: next(iter(())))
    for again in (inner.step, inner.try_out):
        with pytest.raises(UsageError, match="examples have ended: a stream is endless"):
            again()


class Place(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("position", "why"),
    [
        (np.int64(7), r"holds a numpy\.int64"),
        ({"at": [np.float64(7)]}, r"holds a numpy\.float64"),
        (torch.zeros(2), r"holds a torch\.Tensor"),
        (Place(at=1), r"holds a .*\.Place"),
        (b"abc", r"holds a builtins\.bytes"),
        (list(range(10_000)), "has more than 10000 values"),
        (1 << 3000, "has a number of more than 2000 bits"),
    ],
)
def test_a_position_that_no_checkpoint_gives_back_is_refused(position: Any, why: str) -> None:
    inner = own(nn.Linear(4, 1))
    inner.stream.seek(position)
    with pytest.raises(UsageError, match=f"the stream's position {why}"):
        inner.try_out()


@pytest.mark.parametrize(
    "position", [np.random.default_rng(1).bit_generator.state, random.Random(1).getstate(), list(range(9000)), None]
)
def test_a_position_of_plain_values_comes_back(position: Any, tmp_path: Path) -> None:
    inner, run = own(nn.Linear(4, 1)), run_of("own", batch=4)
    inner.stream.seek(position)
    inner.try_out()
    checkpoint.save(tmp_path, inner.state(), run.run_id, inner.layout)
    found = checkpoint.newest(tmp_path, run.run_id, inner.layout, use=using(run, inner, inner.load))
    assert found.checkpoint and inner.stream.position == position


def test_a_stream_may_change_its_position_in_place() -> None:
    class Counted(Points):
        def __init__(self) -> None:
            self.position = {"at": 0}

        def next(self, examples: int) -> Batch:
            self.position["at"] += 1
            return super().next(examples)

    inner = own(nn.Linear(4, 1), Counted())
    inner.try_out()
    inner.step()
    state = inner.state()
    inner.fetch()
    assert state.inner["position"] == inner.state().inner["position"] == {"at": 1}, "that batch is not trained yet"


def test_a_paced_step_takes_its_time_and_hardly_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = replica(run_of("paced", batch=8, step_s=0.05))
    assert 90_000 < inner.parameters < 110_000
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(sys.modules["paced_task"], "time", clock)
    inner.step()
    began, cpu = now, time.process_time()
    losses = train(inner, 20)
    assert now - began == pytest.approx(1.0)
    assert time.process_time() - cpu < 0.5
    assert losses[-1] < losses[0], "and it learns"


def test_a_task_that_is_not_installed_is_said_with_the_remedy() -> None:
    with pytest.raises(Incompatible, match=r"protein, which is not installed here \(installed are: blobs, paced, s"):
        replica(run_of("protein"))


@pytest.mark.parametrize(("options", "why"), [({"noisy": 1}, "does not know noisy"), ({"noise": -1.0}, "from 0 on")])
def test_options_that_the_task_refuses_are_the_manifests_fault(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"model.options: the task blobs cannot be made from them: .*{why}"):
        replica(run_of("blobs", **options))


def test_what_is_no_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd-1.dist-info").mkdir()
    (tmp_path / "odd-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (tmp_path / "odd-1.dist-info" / "entry_points.txt").write_text(
        f"[{tasks.GROUP}]\nfraction = fractions:Fraction\nabsent = no_such_module:Task\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, error, why in (
        ("fraction", UsageError, "cannot be made"),
        ("absent", UsageError, "no_such_module"),
    ):
        with pytest.raises(error, match=why):
            replica(run_of(name))


def test_a_model_that_cannot_compute_activations_twice_is_said() -> None:
    run = run_of("blobs")
    twice = run.model_copy(update={"inner": InnerSpec(batch_tokens=32, checkpoint_activations=True)})
    with pytest.raises(UsageError, match="must be false"):
        replica(twice)


def test_a_batch_that_is_no_whole_number_of_examples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import blobs_task

    monkeypatch.setattr(blobs_task.Blobs, "tokens_per_example", 5)
    with pytest.raises(UsageError, match="multiple of 5"):
        replica(run_of("blobs", batch=32))
    assert replica(run_of("blobs", batch=30))._gradients.examples == 6


def test_the_built_in_task_is_one_by_the_same_protocol() -> None:
    assert isinstance(tasks.load(small_run(), corpus=small_text()), Task)
