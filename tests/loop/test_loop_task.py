"""A loop as a replica sees it: its steps are counted, its optimizer's moments kept, and it stays what it was."""

import asyncio
import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.optimizer import _global_optimizer_pre_hooks

from noloco_node.checkpoints import checkpoint
from noloco_node.errors import DiskFull, NolocoError, NonFinite, OutOfMemory, UsageError
from noloco_node.loop.swarm import Swarm, _flags, join, start
from noloco_node.loop.task import Loop, Trained
from noloco_node.loop.turns import Turns
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec
from noloco_node.training import model
from noloco_node.training.build import build_replica
from noloco_node.training.inner.gradients import NotMeasured, ShortOfMemory

RUN = Manifest(name="loop", model=ModelSpec(task="mine"), inner=InnerSpec(steps=4, batch_tokens=16))


class Mine:
    """A loop on a thread of its own, which makes a step whenever one is wanted, until the test is over."""

    running: ClassVar[list[Turns]] = []

    def __init__(
        self,
        made: nn.Module,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self.module = made
        self.optimizer = kind([p for p in made.parameters() if p.requires_grad], lr=0.01)
        self.turns = Turns()
        self.running.append(self.turns)
        self.task = Loop(made, self.optimizer, evaluate, self.turns)
        self.replica = build_replica(RUN, "peer", brought=self.task, device="cpu")
        self.replica.try_out()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        generator = torch.Generator().manual_seed(1)
        loss = 0.0
        while self.turns.wait(loss):
            found = self.module(torch.randn(8, 4, generator=generator)).square().mean()
            found.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss = found.item()

    def step(self) -> float | None:
        assert self.replica.has_data(60.0)
        self.replica.fetch()
        return self.replica.step()


@pytest.fixture(autouse=True)
def loops_end() -> Iterator[None]:
    yield
    while Mine.running:
        Mine.running.pop().close()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))


def test_a_step_of_the_loop_is_a_step_of_the_replica() -> None:
    mine = Mine(small())
    before = mine.replica.theta.clone()
    losses = [mine.step() for _ in range(4)]
    assert all(loss is not None and loss > 0 for loss in losses)
    assert mine.replica.position.phase_over and mine.replica.tokens == 4 * 16
    assert not torch.equal(mine.replica.theta, before), "the model's weights are views of one vector"
    assert mine.replica.last_rate == 0.01


def test_a_boundary_and_a_correction_change_the_loops_own_model() -> None:
    mine = Mine(small())
    mine.step()
    mine.replica.snapshot()
    mine.replica.boundary()
    before = mine.module[0].weight.clone()
    mine.replica.slow.apply(0, torch.ones(mine.replica.parameters), 1)
    assert torch.allclose(mine.module[0].weight, before + 1)


def test_what_the_node_changes_is_seen_and_what_the_loop_changes_is_not() -> None:
    """By which an island knows when to send weights, and when moments too."""
    mine, seen = Mine(small()), []

    def look() -> None:
        seen.append((mine.task.theta._version, mine.task.moments.changes))

    look()
    mine.step()
    look()
    assert seen[0] == seen[1]
    saved = mine.replica.state()
    for change in (
        mine.replica.boundary,
        lambda: mine.replica.slow.apply(0, torch.ones(3), 1),
        mine.replica.slow.take_back,
    ):
        change()
        look()
        assert seen[-1][0] > seen[-2][0] and seen[-1][1] == seen[0][1]
    for change in (lambda: mine.replica.load(saved), mine.replica.restart, lambda: mine.replica.restore(saved)):
        change()
        look()
        assert seen[-1][1] > seen[-2][1]


def test_it_is_no_step_that_nothing_was_waited_for() -> None:
    """As when a swap is judged."""
    mine = Mine(small())
    assert not mine.replica.has_data(0.0)


def test_weights_that_are_not_trained_are_not_averaged() -> None:
    made = small()
    made[0].requires_grad_(False)
    mine = Mine(made)
    assert mine.replica.parameters == made[2].weight.numel() + made[2].bias.numel()
    assert mine.replica.layout != model.layout_digest(made[2]), "what they lie in counts"
    frozen = made[0].weight.clone()
    mine.step()
    assert torch.equal(made[0].weight, frozen)
    made[0].to(torch.bfloat16)
    assert mine.replica.layout == model.layout_digest(Trained(made)), "but not in which precision it is held"


def test_adamws_moments_come_back_with_a_checkpoint() -> None:
    one, other = Mine(small()), Mine(small())
    for _ in range(3):
        one.step()
    saved = one.replica.state()
    other.replica.load(saved)
    assert other.replica.steps == 3
    for ours, theirs in zip(one.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, value in one.optimizer.state[ours].items():
            assert torch.equal(other.optimizer.state[theirs][name], value), name
    other.step()


OTHERS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, partial(torch.optim.AdamW, amsgrad=True)]


@pytest.mark.parametrize("before", [torch.optim.AdamW, None])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_optimizers_moments_begin_afresh(
    kind: Callable[..., torch.optim.Optimizer], before: Callable[..., torch.optim.Optimizer] | None
) -> None:
    """With a checkpoint of its own, and with one of AdamW."""
    one, other = Mine(small(), before or kind), Mine(small(), kind)
    one.step()
    saved = one.replica.state()
    assert bool(saved.inner["optimizer"]) == (before is not None)
    other.step()
    other.replica.load(saved)
    assert torch.equal(other.replica.theta, one.replica.theta)
    assert not other.optimizer.state and other.replica.warming_up
    other.step()


def test_what_torch_and_accelerate_put_around_them_changes_nothing() -> None:
    """Else a partner without it would be of another model, and the moments would be nobody's."""
    accelerate = pytest.importorskip("accelerate", reason="whose wrapper is tried")
    bare, made = small(), small()
    compiled = torch.compile(made, backend="eager")
    assert model.layout_digest(Trained(compiled)) == model.layout_digest(Trained(bare))
    assert model.layout_digest(Trained(nn.DataParallel(compiled))) == model.layout_digest(Trained(bare))
    by_parts = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4).requires_grad_(False))
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    assert model.layout_digest(Trained(by_parts)) == model.layout_digest(Trained(whole)), "only some of its parts"
    adamw = torch.optim.AdamW(made.parameters(), lr=0.01)
    given = accelerate.Accelerator(cpu=True).prepare(adamw)
    replica = build_replica(RUN, "peer", brought=Loop(compiled, given, None, Turns()), device="cpu")
    compiled(torch.ones(1, 4)).sum().backward()
    given.step()
    assert torch.equal(replica.theta, torch.cat([p.flatten() for _, p in model.parameters(made)])), "it has stepped"
    assert len(replica.state().inner["optimizer"]) == 4
    replica.close()


def test_moments_that_were_there_are_kept() -> None:
    made = small()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = {at: each["exp_avg"].clone() for at, each in enumerate(optimizer.state.values())}
    turns = Turns()
    replica = build_replica(RUN, "peer", brought=Loop(made, optimizer, None, turns), device="cpu")
    saved = replica.state().inner["optimizer"]
    assert sorted(float(each["exp_avg"].sum()) for each in saved.values()) == sorted(
        float(of.sum()) for of in before.values()
    )


def test_a_copy_of_the_state_is_as_it_was_before_the_loops_next_step() -> None:
    mine = Mine(nn.Sequential(nn.Linear(4, 1 << 19), nn.Linear(1 << 19, 1)))
    mine.step()
    theta = mine.replica.theta.clone()
    copy = mine.replica.copy_state()
    mine.step()
    state = copy.result(10)
    assert torch.equal(torch.cat([w.flatten() for w in state.weights.values()]), theta)


def test_a_copy_is_secured_before_any_optimizer_changes_a_weight_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a checkpoint would have the weights of two moments, where another one than the loop named steps first."""
    mine, secured = Mine(small()), list[str]()
    monkeypatch.setattr(mine.replica.copies, "secure", secured.append)
    another, stranger = (torch.optim.SGD(made.parameters(), lr=0.1) for made in (mine.module[2], small()))
    stranger.step()
    assert secured == []
    another.step()
    assert secured == ["theta", "moments"]
    mine.turns.close()
    mine.replica.close()
    another.step()
    assert secured == ["theta", "moments"]


def test_weights_that_the_loop_broke_become_the_slow_ones_again() -> None:
    mine = Mine(small())
    mine.step()
    mine.replica.boundary()
    slow = mine.replica.phi.clone()
    mine.step()
    with torch.no_grad():
        mine.module[0].weight.fill_(math.nan)
    with pytest.raises(NonFinite):
        mine.replica.boundary()
    mine.replica.discard()
    assert torch.equal(mine.replica.theta, slow)
    assert not mine.optimizer.state, "its moments were of the broken ones"
    mine.step()


def test_a_model_that_was_moved_is_noticed() -> None:
    mine = Mine(small())
    mine.step()
    mine.module[0].weight.data = mine.module[0].weight.data.clone()
    with pytest.raises(UsageError, match="moved, replaced"):
        mine.step()


def test_a_model_that_is_frozen_later_is_noticed() -> None:
    mine = Mine(small())
    mine.step()
    mine.module[0].requires_grad_(False)
    with pytest.raises(UsageError, match="frozen or unfrozen"):
        mine.step()


def test_what_is_there_stays_as_it_is() -> None:
    """The modes of the model's parts, the random numbers, and where weights that are not trained lie."""
    made = nn.Sequential(small(), nn.Linear(2, 2, device="meta").requires_grad_(False))
    made[0][1].eval()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(made[0].parameters())
    build_replica(RUN, "peer", brought=Loop(made, optimizer, None, Turns()), device="cpu")
    assert torch.equal(torch.rand(1), expected)
    assert made.training and not made[0][1].training
    assert made[1].weight.is_meta


def test_flags_are_typed_as_they_are_meant() -> None:
    assert _flags({"linger": 0, "home": "/a b", "web": None, "start_over": True}) == [
        *("--linger", "0"),
        *("--home", "/a b"),
        "--start-over",
    ]
    assert _flags({"bootstrap": ["/ip4/a", "/ip4/b"], "announce": ()}) == [
        "--bootstrap",
        "/ip4/a",
        "--bootstrap",
        "/ip4/b",
    ]
    for name, value in (("device", "cpu"), ("compile", True), ("moments", "8bit")):
        with pytest.raises(UsageError, match=f"{name}: that is the loop's own"):
            _flags({name: value})


def test_a_swarm_is_entered_first() -> None:
    made = small()
    swarm = join("nn1", made, torch.optim.AdamW(made.parameters()))
    with pytest.raises(UsageError, match="to be entered"):
        swarm.step(1.0)
    with pytest.raises(UsageError, match="invitation"), swarm:
        pass
    with pytest.raises(UsageError, match="entered once"), swarm:
        pass


@pytest.mark.timeout(300)
def test_signals_are_given_back_by_the_swarm_that_took_them(tmp_path: Path) -> None:
    """Of two in one script the inner one leaves first, and one that fails as it is entered never had them. What the
    loop logs, and its warnings, go where they went before."""
    before, made = signal.signal(signal.SIGTERM, signal.SIG_DFL), [small(), small(), small()]
    root = logging.getLogger()
    logs = root.level, list(root.handlers), warnings.showwarning
    given = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in made]

    def entered(name: str) -> Any:
        run = tmp_path / f"{name}.toml"
        run.write_text(f'name = "{name}"\nmodel = {{ task = "mine" }}\n')
        return start(run, *given.pop(), home=tmp_path / name, listen="/ip4/127.0.0.1/tcp/0")

    try:
        with pytest.raises(UsageError, match="invitation"), join("nn1", *given.pop()):
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with entered("outer"):
            with entered("inner"):
                pass
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert (root.level, list(root.handlers), warnings.showwarning) == logs
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.timeout(300)
def test_what_was_lost_is_said_where_the_script_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's own error is raised then, and nobody sees the node's."""

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("the disk is full")

    monkeypatch.setattr(checkpoint, "save", full)
    (tmp_path / "run.toml").write_text(
        'name = "mine"\nmodel = { task = "mine" }\ninner = { steps = 1, batch_tokens = 16 }\n'
    )
    made = small()
    swarm = start(
        tmp_path / "run.toml",
        made,
        torch.optim.SGD(made.parameters(), lr=0.1),
        home=tmp_path / "home",
        listen="/ip4/127.0.0.1/tcp/0",
    )
    with pytest.raises(ZeroDivisionError), swarm:
        for _ in range(3):
            swarm.step(1.0)
        raise ZeroDivisionError
    assert "what was trained is lost (the disk is full)" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_status_that_is_asked_for_as_the_node_ends_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """As after the step at which the run was over, while the node's thread is still ending."""
    run, made, said = tmp_path / "run.toml", small(), list[BaseException]()
    run.write_text('name = "one"\nrounds = 1\nmodel = { task = "mine" }\ninner = { steps = 1 }\n')
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with start(run, made, optimizer, home=tmp_path / "home", listen="/ip4/127.0.0.1/tcp/0") as swarm:
        end = swarm._turns.end

        def ends() -> None:
            try:
                swarm.status()
            except Exception as error:  # noqa: BLE001 - whatever it is
                said.append(error)
            end()

        swarm._turns.end = ends
        while not swarm.over:
            swarm.step(0.5)
    (error,) = said
    assert isinstance(error, NolocoError) and str(error) == "the node does not run"


def test_an_optimizer_of_other_weights_is_refused() -> None:
    """As one that was made before the model was wrapped, or its class."""
    made, other = small(), small()
    for optimizer in (torch.optim.AdamW(other.parameters()), torch.optim.AdamW, [torch.optim.AdamW(made.parameters())]):
        with pytest.raises(UsageError, match="none of the weights that are trained"):
            join("nn1", made, optimizer)  # type: ignore[arg-type]
    some = nn.ModuleList([made, other])
    Loop(some, torch.optim.AdamW(made.parameters()), None, Turns())


def test_a_run_that_trains_a_language_model_is_refused() -> None:
    """Its invitation would bring volunteers who train another model."""
    made = small()
    task = Loop(made, torch.optim.SGD(made.parameters(), lr=0.1), None, Turns())
    with pytest.raises(UsageError, match="trains a language model"):
        build_replica(Manifest(name="loop"), "peer", brought=task, device="cpu")


@pytest.mark.parametrize("loss", [0.5, np.float64(0.5), np.float32(0.5), torch.tensor([0.5], requires_grad=True)])
def test_a_steps_loss_becomes_a_plain_number(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others in a checkpoint, as numpy's, make it one that nobody can read."""
    made, told = small(), []
    swarm = join("nn1", made, torch.optim.AdamW(made.parameters()))
    monkeypatch.setattr(swarm, "_thread", threading.current_thread())
    monkeypatch.setattr(swarm, "_wait", told.append)
    swarm.step(loss)
    assert told == [0.5] and type(told[0]) is float


def test_an_evaluation_leaves_every_part_in_its_mode() -> None:
    seen = []
    made = small()
    mine = Mine(made, evaluate=lambda: float(seen.append((made.training, torch.is_grad_enabled())) or 2.5))
    made[1].eval()
    assert mine.replica.evaluate() == 2.5
    assert seen == [(False, False)]
    assert made.training and made[0].training and not made[1].training


def test_an_evaluation_that_does_not_fit_is_not_tried_for_ever() -> None:
    tries = []

    def evaluate() -> float:
        tries.append(1)
        raise torch.OutOfMemoryError

    mine = Mine(small(), evaluate=evaluate)
    with pytest.raises(OutOfMemory, match="the loop's evaluation") as raised:
        mine.replica.evaluate()
    assert not isinstance(raised.value, ShortOfMemory) and len(tries) == 2


def test_an_optimizer_outlives_its_node_and_holds_nothing_of_it() -> None:
    before = {*_global_optimizer_pre_hooks}
    mine = Mine(small())
    mine.step()
    ours = {*_global_optimizer_pre_hooks} - before
    assert ours
    mine.turns.close()
    mine.replica.close()
    assert not ours & {*_global_optimizer_pre_hooks}


def test_a_swap_is_judged_by_the_loops_evaluation_alone() -> None:
    """The examples of its steps are the loop's own: the node has none to measure a second loss with."""
    mine = Mine(small(), evaluate=lambda: 0.5)
    mine.step()
    found = mine.replica.losses()
    assert found.held_out == 0.5 and not found.own_counts


def test_without_an_evaluation_nothing_is_measured() -> None:
    mine = Mine(small())
    with pytest.raises(NotMeasured):
        mine.replica.evaluate()


@pytest.mark.parametrize("trains", [True, False])
def test_statistics_that_stay_this_nodes_own_are_said(trains: bool, caplog: pytest.LogCaptureFixture) -> None:
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).train(trains))
    Loop(made, torch.optim.SGD(made.parameters(), lr=0.1), None, Turns())
    assert ("part 1 keeps running statistics" in caplog.text) == trains


@pytest.mark.parametrize("spoil", ["half", "frozen"])
def test_weights_that_cannot_be_averaged_are_refused(spoil: str) -> None:
    made = small()
    made.requires_grad_(False) if spoil == "frozen" else made.half()
    with pytest.raises(
        UsageError, match="no weights to train" if spoil == "frozen" else "float32, and some are float16"
    ):
        Loop(made, torch.optim.SGD(made.parameters(), lr=0.1), None, Turns())


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("version", [1, 2])
def test_weights_of_which_a_process_has_a_part_are_refused(version: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cpu = torch.device("cpu")
        first = lambda: FullyShardedDataParallel(small(), device_id=cpu)  # noqa: E731
        made = first() if version == 1 else fully_shard(small(), mesh=DeviceMesh("cpu", [0]))
        with pytest.raises(UsageError, match="use DistributedDataParallel in place of FSDP"):
            Loop(made, torch.optim.SGD(made.parameters(), lr=0.1), None, Turns())
    finally:
        dist.destroy_process_group()


def test_a_status_that_an_ending_loop_takes_and_does_not_give_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a TimeoutError: between its last task and its end, a loop takes calls that it never makes."""
    made = small()
    swarm = Swarm(["join"], made, torch.optim.SGD(made.parameters(), lr=0.1), None, {})
    monkeypatch.setattr("noloco_node.loop.swarm.ANSWER_S", 0.05)
    swarm._loop, swarm._node = asyncio.new_event_loop(), object()
    with pytest.raises(NolocoError, match="the node does not run"):
        swarm.status()
    swarm._loop.close()
    with pytest.raises(NolocoError, match="the node does not run"):
        swarm.status()
