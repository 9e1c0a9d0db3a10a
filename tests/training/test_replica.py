"""One replica: against a plain loop, resumed, corrected, and with numbers that are not finite."""

import gc
import math
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replicas import SMALL, exchange, live_state, small_replica, small_run, small_text, timed_run, train
from torch import Tensor, nn

from noloco_node.bench import plain_loop
from noloco_node.checkpoints import checkpoint
from noloco_node.core import outer
from noloco_node.core.codecs.by_name import codec
from noloco_node.data.corpus import Corpus
from noloco_node.data.stream import TokenStream
from noloco_node.errors import Diverged, NonFinite, OutOfMemory, PeerMisbehaved, UsageError
from noloco_node.host import memory
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec, OuterSpec
from noloco_node.training import build, language, model
from noloco_node.training.build import build_replica
from noloco_node.training.inner import gradients
from noloco_node.training.inner.schedule import Position, learning_rate
from noloco_node.training.replica import LOSSES, WARM_UP_STEPS, Replica
from noloco_node.training.slow_weights import first_nonfinite
from noloco_node.training.task import Batch


# ---- against what it should be ---------------------------------------------------------------------------------------
def plain_training(run: Manifest, peer: str) -> Iterator[float]:
    """The paper without a partner, around a plain loop in PyTorch: per-parameter lists, no flat vectors."""
    spec, outer, length = run.inner, run.outer, run.data.sequence_length
    net = model.build(run.model, 256, run.seed, length)
    batches = TokenStream(small_text().train, length, run.seed, peer)
    slow = [p.detach().clone() for p in net.parameters()]
    momentum = [torch.zeros_like(p) for p in slow]
    examples = spec.batch_tokens // length
    steps = plain_loop.train(net, lambda: batches.next(examples)[0], spec, run.rounds * spec.steps, examples)
    for step, loss in enumerate(steps, 1):
        yield loss
        if step % spec.steps == 0:
            with torch.no_grad():
                for p, phi, d in zip(net.parameters(), slow, momentum, strict=True):
                    d.mul_(outer.alpha).add_(outer.beta * (p - phi))
                    phi.add_(d)
                    p.copy_(phi)


def test_losses_are_those_of_a_plain_loop() -> None:
    run = small_run(steps=5, rounds=4, warmup=0.3, learning_rate=0.02, clip=0.5)
    ours = train(small_replica("a", run), 20)
    assert ours == pytest.approx(list(plain_training(run, "a")), abs=1e-6, rel=1e-6)
    assert ours[-1] < ours[0] - 0.5, "and it learns"


def test_everything_is_determined_by_run_and_peer() -> None:
    one, again, other = small_replica("a"), small_replica("a"), small_replica("b")
    assert torch.equal(one.theta, other.theta), "all begin alike"
    assert train(one, 7) == train(again, 7) != train(other, 7)
    assert torch.equal(one.theta, again.theta)


def test_micro_batches_add_up_to_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small_replica()
    monkeypatch.setattr(language, "MICRO_LOGITS", 16 * 256)
    one_by_one = small_replica()
    assert whole.step() == pytest.approx(one_by_one.step(), rel=1e-6)
    moments = [replica.state().inner["optimizer"] for replica in (whole, one_by_one)]
    for place, moment in moments[0].items():
        assert torch.allclose(moment["exp_avg"], moments[1][place]["exp_avg"], atol=1e-7)


def test_activations_computed_twice_change_nothing() -> None:
    run = small_run()
    twice_run, once_run = (
        run.model_copy(update={"inner": InnerSpec(batch_tokens=64, checkpoint_activations=again)})
        for again in (True, False)
    )
    twice, once = small_replica(run=twice_run), small_replica(run=once_run)
    assert all(layer.gradient_checkpointing for layer in twice.module.model.layers)
    here = build_replica(once_run, "a", device="cpu", threads=1, checkpoint_activations=True, corpus=small_text())
    not_here = build_replica(twice_run, "a", device="cpu", threads=1, checkpoint_activations=False, corpus=small_text())
    assert all(layer.gradient_checkpointing for layer in here.module.model.layers)
    assert not any(layer.gradient_checkpointing for layer in not_here.module.model.layers)
    assert train(twice, 4) == train(once, 4) == train(here, 4) == train(not_here, 4)


def test_a_volunteers_micro_batch_changes_rounding_only() -> None:
    whole = small_replica()
    by_three = build_replica(small_run(), "a", device="cpu", threads=1, micro_batch=3, corpus=small_text())
    assert by_three.micro_batch == 3 and whole.micro_batch == 4
    assert train(by_three, 6) == pytest.approx(train(whole, 6), rel=1e-5)
    assert by_three.evaluate() == pytest.approx(whole.evaluate(), rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
def test_a_compiled_model_learns_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Traced, and run without the code generator, which takes a minute."""
    caplog.set_level("INFO", "noloco_node")
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    compiled = build_replica(small_run(), "a", device="cpu", threads=1, compiled=True, corpus=small_text())
    plain_one = small_replica()
    assert train(compiled, 5) == pytest.approx(train(plain_one, 5), rel=1e-4)
    assert compiled.evaluate() == pytest.approx(plain_one.evaluate(), rel=1e-4)
    assert compiled.layout == plain_one.layout
    assert caplog.text.count("torch compiled the model in ") == 1


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_that_does_not_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=broken))
    replica = build_replica(small_run(), "a", device="cpu", threads=1, compiled=True, corpus=small_text())
    with pytest.raises(UsageError, match=r"no compiler found.* Start without --compile"):
        replica.step()


def test_the_schedule_rises_and_falls_over_the_run() -> None:
    spec = InnerSpec(learning_rate=1.0, warmup=0.1, final_learning_rate=0.2)
    assert learning_rate(spec, 0.05) == 0.5
    assert learning_rate(spec, 0.1) == 1.0
    assert learning_rate(spec, 0.55) == pytest.approx(0.6)
    assert learning_rate(spec, 1.0) == learning_rate(spec, 3.0) == pytest.approx(0.2)
    stays = InnerSpec(learning_rate=1.0, warmup=0.1, schedule="wsd", cooldown=0.4, final_learning_rate=0.2)
    assert learning_rate(stays, 0.05) == 0.5
    assert learning_rate(stays, 0.1) == learning_rate(stays, 0.6) == 1.0
    assert learning_rate(stays, 0.7) == pytest.approx(0.6), "a quarter of the way, half of the fall"
    assert learning_rate(stays, 1.0) == learning_rate(stays, 3.0) == pytest.approx(0.2)
    assert learning_rate(InnerSpec(learning_rate=1.0, schedule="wsd", cooldown=0.0), 1.0) == 1.0
    assert learning_rate(InnerSpec(learning_rate=1.0, warmup=1.0), 1.0) == 1.0
    assert learning_rate(InnerSpec(learning_rate=1.0, warmup=0.0), 0.0) == 1.0


def test_evaluation_is_the_same_text_for_everyone_and_changes_nothing() -> None:
    one, other = small_replica("a"), small_replica("b")
    assert one.evaluate() == other.evaluate() == pytest.approx(math.log(256), abs=0.5)
    first = train(one, 4), one.evaluate()
    again = small_replica("a")
    losses = []
    for _ in range(4):
        again.evaluate()
        losses += train(again, 1)
    assert (losses, again.evaluate()) == first


# ---- resuming --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("before", [0, 1, 3, 4, 6])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, before: int) -> None:
    run = small_run(steps=3)
    straight = small_replica("a", run)
    losses = train(straight, 9)
    stopped = small_replica("a", run)
    first = train(stopped, before)
    checkpoint.save(tmp_path, stopped.state(), run.run_id, stopped.layout)
    resumed = small_replica("a", run)
    train(resumed, 2)  # whatever it did before, the checkpoint decides
    found = checkpoint.newest(tmp_path, run.run_id, resumed.layout).checkpoint
    assert found is not None and found.step == before
    resumed.load(found)
    assert first + train(resumed, 9 - before) == losses
    assert everything(resumed) == everything(straight)


def test_a_phase_by_time_ends_with_the_first_step_beyond_it_and_the_overrun_counts() -> None:
    replica = small_replica(run=timed_run(1.0))
    lengths = []
    for _ in range(6):
        while not replica.position.phase_over:
            replica.step()
            replica.position.spend(0.4)
        lengths.append(replica.position.phase_step)
        replica.boundary()
    assert lengths == [3, 2, 3, 2, 3, 2], "six phases of a second are fifteen steps of 0.4 s"
    assert (replica.round, replica.steps) == (6, 15)
    replica.position.spend(50.0)
    assert not replica.position.phase_over, "at least one step"


def test_of_a_phase_by_time_so_many_steps_are_left_as_come() -> None:
    position = Position(timed_run(60.0).inner, 100)
    left = []
    while not position.phase_over:
        left.append(position.steps_left(29.0))
        position.step()
        position.spend(29.0)
    assert left == [3, 2, 1]


def test_the_schedule_of_phases_by_time_follows_rounds() -> None:
    run = timed_run(1.0, rounds=4)
    replica, rates = small_replica(run=run), []
    for _ in range(4):
        while not replica.position.phase_over:
            replica.step()
            rates.append(replica._optimizer._adamw.param_groups[0]["lr"])
            replica.position.spend(0.25)
        replica.boundary()
    assert rates == [learning_rate(run.inner, step / 16) for step in range(16)]


def test_a_phase_by_time_is_resumed_where_it_was() -> None:
    run = timed_run(1.0)
    straight, resumed = small_replica("a", run), small_replica("a", run)

    def go(replica: Replica, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(replica.step())
            replica.position.spend(0.375)
            if replica.position.phase_over:
                replica.boundary()
        return losses

    losses = go(straight, 9)
    first = go(resumed, 4)
    saved = resumed.state()
    resumed = small_replica("a", run)
    resumed.load(saved)
    assert first + go(resumed, 5) == losses
    assert everything(resumed) == everything(straight) and resumed.steps == 9


def everything(replica: Replica) -> Any:
    state = replica.state()
    return plain([state.round, state.step, state.weights, state.outer, state.inner])


def plain(value: Any) -> Any:
    """Tensors as lists, so that == compares bits."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_a_model_with_dropout_resumes_too() -> None:
    run = small_run().model_copy(update={"model": small_run().model.model_copy(update={"config": DROPOUT})})
    straight = small_replica("a", run)
    train(straight, 2)
    state = straight.state()
    losses = train(straight, 3)
    straight.load(state)
    assert train(straight, 3) == losses


DROPOUT = {**small_run().model.config, "attention_dropout": 0.5}


def test_a_state_knows_the_losses_it_was_taken_at() -> None:
    replica = small_replica()
    assert (replica.state().eval_loss, replica.state().loss) == (None, None)
    losses = train(replica, LOSSES + 2)
    seen = replica.evaluate()
    saved = replica.state()
    assert (saved.eval_loss, saved.loss) == (seen, pytest.approx(sum(losses[-LOSSES:]) / LOSSES))
    replica.restore(saved)
    assert (replica.state().eval_loss, replica.state().loss) == (None, None), "they were those of other weights"
    own, other = small_text(), small_text()
    other.held_out[7] ^= 1
    again, elsewhere = (build_replica(small_run(), "b", device="cpu", threads=1, corpus=text) for text in (own, other))
    assert saved.measured_on == again.state().measured_on != elsewhere.state().measured_on


def test_a_saved_state_is_a_copy() -> None:
    replica = small_replica()
    train(replica, 2)
    state = replica.state()
    before = plain([state.weights, state.outer, state.inner])
    train(replica, 4)
    assert plain([state.weights, state.outer, state.inner]) == before


def test_weights_are_saved_under_the_models_own_names() -> None:
    replica = small_replica()
    train(replica, 2)
    module = model.build(small_run().model, 256, 5)
    missing, unexpected = module.load_state_dict(replica.state().weights, strict=False)
    assert unexpected == [] and missing == ["lm_head.weight"], "tied: it is the embedding"
    assert torch.equal(module.lm_head.weight, replica.module.lm_head.weight)


def test_a_replica_whose_text_became_shorter_goes_on_at_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    """It refused the checkpoint: a node alone in its run began no more until somebody moved it away."""
    trained, replica = small_replica(), small_replica()
    train(trained, 2)
    state = trained.state()
    state.inner["position"] = (0, 10**6)
    replica.load(state)
    assert torch.equal(replica.theta, trained.theta) and replica.stream.position == (0, 0)
    assert "the data, or Python, has changed" in caplog.text
    train(replica, 2)


# ---- with others -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_two_replicas_meet_and_their_mean_is_kept(name: str) -> None:
    one, other = small_replica("a"), small_replica("b")
    alone = small_replica("a"), small_replica("b")
    codecs = codec(name), codec(name)
    for r in range(3):
        for replica in (one, other):
            train_phase(replica)
        if r == 0:
            for replica in alone:
                train(replica, 3)
        corrections = exchange(one, other, codecs)
        assert all(torch.equal(mine, -theirs) for mine, theirs in corrections)
        assert any(mine.any() for mine, _ in corrections)
        if r == 0:
            mean, kept = ((x.phi + y.phi) / 2 for x, y in ((one, other), alone))
            assert torch.allclose(mean, kept, rtol=0, atol=2e-7)
            apart, before = ((x.phi - y.phi).norm() for x, y in ((one, other), alone))
            assert apart < before
    assert one.round == other.round == 3 and not torch.equal(one.theta, other.theta)


def train_phase(replica: Replica) -> None:
    while not replica.position.phase_over:
        replica.step()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_equal_replicas_stay_equal_to_the_bit(name: str) -> None:
    one, other, alone = (small_replica("a") for _ in range(3))
    codecs = codec(name), codec(name)
    for _ in range(5):
        train_phase(one)
        train_phase(other)
        exchange(one, other, codecs)
    train(alone, 15)
    for vector in ("theta", "phi", "delta"):
        assert torch.equal(getattr(one, vector), getattr(other, vector))
        assert torch.equal(getattr(one, vector), getattr(alone, vector)), "who meets itself is alone"


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_late_correction_of_a_slice(late: int) -> None:
    replica = small_replica()
    train(replica, 3 * (2 + late) + 1)
    before = [v.clone() for v in (replica.theta, replica.phi, replica.delta)]
    c = torch.randn(50)
    replica.slow.apply(100, c, offered_round=2)
    alpha = OuterSpec().alpha
    moved, kept = sum(alpha**k for k in range(late + 1)), alpha**late
    for now, then, factor in zip(
        (replica.theta, replica.phi, replica.delta), before, (moved, moved, kept), strict=True
    ):
        assert torch.allclose(now[100:150] - then[100:150], factor * c, atol=1e-6)
        assert torch.equal(now[:100], then[:100]) and torch.equal(now[150:], then[150:])


def long_stepping() -> Replica:
    """A replica that knows that averaging takes a part of its updates' length."""
    replica = small_replica()
    assert replica.slow.scales
    replica.slow.load_scales([1.4] * len(replica.slow.scales))
    return replica


def test_what_is_owed_comes_with_the_correction_of_its_own_offer() -> None:
    replica = long_stepping()
    train_phase(replica)
    moved = replica.theta - replica.phi
    replica.snapshot()
    replica.boundary()
    before = replica.phi.clone()
    nothing = torch.zeros(replica.parameters)
    replica.slow.apply(0, nothing, offered_round=1)
    assert torch.allclose(replica.phi - before, 0.4 * OuterSpec().beta * moved, atol=1e-4)
    before = replica.phi.clone()
    train_phase(replica)
    replica.snapshot()  # of round 2, while a swap of round 1 begins
    replica.boundary()
    phi = replica.phi.clone()
    replica.slow.apply(0, nothing, offered_round=1)
    assert torch.equal(replica.phi, phi), "nothing of what the newer offer is owed"


def test_nothing_is_owed_for_an_offer_that_was_not_made() -> None:
    """A phase that ends in NaN is thrown away, and a swap of the offer before may just have begun."""
    replica = long_stepping()
    train_phase(replica)
    replica.snapshot()
    replica.boundary()
    train_phase(replica)
    replica.theta[7] = math.nan
    with pytest.raises(NonFinite):
        replica.snapshot()
    replica.discard()
    replica.slow.apply(0, torch.zeros(replica.parameters), offered_round=1)
    assert replica.phi.isfinite().all() and replica.theta.isfinite().all()
    train_phase(replica)
    assert replica.snapshot()[0].isfinite().all()


def test_a_phase_that_was_thrown_away_makes_no_correction_late() -> None:
    """δ did not age in it, and φ did not move."""
    replica = small_replica()
    train(replica, 6)
    train(replica, 2)
    replica.discard()
    train(replica, 3)
    assert replica.round == 4
    before = [v.clone() for v in (replica.phi, replica.delta)]
    c, alpha = torch.full((50,), 0.5), OuterSpec().alpha
    replica.slow.apply(0, c, offered_round=2)
    replica.slow.apply(50, c, offered_round=3)
    for late, part in ((1, slice(50)), (1, slice(50, 100))):
        moved, kept = sum(alpha**k for k in range(late + 1)), alpha**late
        assert torch.allclose(replica.phi[part] - before[0][part], moved * c, atol=1e-6)
        assert torch.allclose(replica.delta[part] - before[1][part], kept * c, atol=1e-6)


@pytest.mark.parametrize("afresh", [Replica.restart, Replica.discard])
def test_an_adamw_that_begins_afresh_is_warmed_up(afresh: Callable[[Replica], None]) -> None:
    replica = small_replica()
    train(replica, 5)
    assert not replica.warming_up
    afresh(replica)
    for _ in range(WARM_UP_STEPS):
        assert replica.warming_up
        train(replica, 1)
    assert not replica.warming_up


def test_one_that_goes_back_is_as_warm_as_it_was() -> None:
    replica = small_replica()
    train(replica, 4)
    warm = replica.state()
    replica.restart()
    train(replica, 2)
    fresh = replica.state()
    replica.restore(warm)
    assert not replica.warming_up
    replica.restore(fresh)
    assert replica.warming_up


def test_a_joining_node_becomes_a_copy_of_its_donor() -> None:
    donor, joining = small_replica("a"), small_replica("b")
    train(donor, 7)
    train(joining, 2)
    joining.adopt(donor.round, live_state(donor))
    assert torch.equal(joining.phi, donor.phi) and torch.equal(joining.delta, donor.delta)
    assert torch.equal(joining.theta, donor.phi) and joining.steps == 6
    assert joining.state().inner["optimizer"] == {}, "moments of other weights would mislead"
    train(joining, 3)
    assert joining.round == 3


def test_after_a_peers_state_adamw_is_warmed_up_before_anything_is_offered() -> None:
    donor, joining, plain = small_replica("a"), small_replica("b"), small_replica("b")
    train(donor, 7)
    joining.adopt(donor.round, live_state(donor))
    plain.position.round = donor.round
    shares = []
    for step in range(WARM_UP_STEPS + 1):
        assert joining.warming_up is (step < WARM_UP_STEPS)
        rates = []
        for replica in (joining, plain):
            replica.step()
            rates.append(replica._optimizer._adamw.param_groups[0]["lr"])
        shares.append(rates[0] / rates[1])
    assert shares == pytest.approx([(step + 1) / (WARM_UP_STEPS + 1) for step in range(WARM_UP_STEPS + 1)])


@pytest.mark.parametrize("damage", ["short", "long", "nan", "inf"])
def test_a_state_that_no_peer_could_have_is_refused(damage: str) -> None:
    replica = small_replica()
    before = everything(replica)
    phi, delta = replica.phi.clone(), replica.delta.clone()
    delta[-1] = {"nan": math.nan, "inf": math.inf}.get(damage, 0.0)
    live = phi.numpy().tobytes() + delta.numpy().tobytes()
    live = {"short": live[:-4], "long": live + bytes(4)}.get(damage, live)
    with pytest.raises(PeerMisbehaved):
        replica.adopt(5, live)
    assert everything(replica) == before


def test_a_peers_state_is_tried_without_a_trace() -> None:
    donor, replica = small_replica("a"), small_replica("b")
    train(donor, 7)
    train(replica, 4)
    before, own = everything(replica), replica.losses().held_out
    trial = replica.try_state(live_state(donor))
    assert everything(replica) == before
    assert trial.own == own and trial.theirs == pytest.approx(evaluated_at(donor.phi))
    assert 0 < trial.added < 0.1 and trial.new == small_replica().evaluate() != trial.own
    assert trial.later == pytest.approx(evaluated_at(donor.phi + replica.slow.settings.alpha * donor.delta))
    before = everything(replica)  # other replicas were made meanwhile: they set the seed
    spoiled = donor.phi.numpy().tobytes() + (1e6 * torch.ones_like(donor.delta)).numpy().tobytes()
    trial = replica.try_state(spoiled)
    assert trial.later > trial.theirs and trial.added > 1000, "good weights with a momentum that spoils them"
    with pytest.raises(PeerMisbehaved):
        replica.try_state(b"short")
    assert everything(replica) == before


def test_an_evaluation_in_a_phase_is_of_the_slow_weights_and_leaves_no_trace() -> None:
    replica = small_replica()
    train(replica, 4)
    before = everything(replica)
    found = replica.evaluate()
    assert everything(replica) == before
    assert found == evaluated_at(replica.phi) != replica.losses().held_out


def evaluated_at(phi: torch.Tensor) -> float:
    replica = small_replica()
    replica.theta.copy_(phi)
    return replica.evaluate()


def test_blocks_of_the_slow_weights() -> None:
    replica = small_replica()
    train(replica, 4)
    last = (replica.parameters - 1) // 256
    blocks = torch.frombuffer(bytearray(replica.sample([1, last, 0])), dtype=torch.float32)
    assert torch.equal(blocks, torch.cat([replica.phi[256:512], replica.phi[256 * last :], replica.phi[:256]]))
    with pytest.raises(PeerMisbehaved):
        replica.sample([last + 1])


def test_after_an_earlier_round_was_adopted_corrections_land_again() -> None:
    donor, replica = small_replica("a"), small_replica("b")
    train(donor, 4)
    train(replica, 7)
    replica.restore(replica.state())
    assert replica.round == 2
    replica.adopt(donor.round, live_state(donor))
    assert replica.round == 1
    before = replica.phi.clone()
    replica.slow.apply(0, torch.ones(10), offered_round=1)
    assert torch.equal(replica.phi, before), "that was for other weights"
    train(replica, 3)
    before = replica.phi.clone()
    replica.slow.apply(0, torch.ones(10), offered_round=2)
    assert not torch.equal(replica.phi[:10], before[:10])


# ---- what is not finite ----------------------------------------------------------------------------------------------
def test_a_step_without_a_finite_loss_is_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    before = replica.theta.clone()
    loss = replica._gradients._loss
    monkeypatch.setattr(replica._gradients, "_loss", lambda micro: loss(micro) * math.inf)
    assert not math.isfinite(replica.step())
    assert torch.equal(replica.theta, before) and (replica.skipped, replica.position.phase_step) == (1, 1)
    assert replica.stream.position == (0, 4), "the batch that did it is behind us"
    monkeypatch.undo()
    assert math.isfinite(replica.step()) and not torch.equal(replica.theta, before)


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    before = replica.theta.clone()
    backward = replica._gradients._backward

    def poisoned(micro: Batch, share: float) -> torch.Tensor:
        loss = backward(micro, share)
        replica.module.lm_head.weight.grad[0, 5] = math.nan
        return loss

    monkeypatch.setattr(replica._gradients, "_backward", poisoned)
    assert math.isfinite(replica.step())
    assert torch.equal(replica.theta, before) and replica.skipped == 1
    monkeypatch.undo()
    replica.step()
    assert replica.theta.isfinite().all()


def test_ten_skipped_steps_in_a_row_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    loss = replica._gradients._loss
    monkeypatch.setattr(replica._gradients, "_loss", lambda micro: loss(micro) * math.nan)
    train(replica, 9)
    monkeypatch.undo()
    train(replica, 1)
    monkeypatch.setattr(replica._gradients, "_loss", lambda micro: loss(micro) * math.nan)
    train(replica, 9)
    with pytest.raises(NonFinite, match="10 steps in a row"):
        replica.step()
    assert replica.skipped == 19 and replica.steps == 20


def test_weights_go_back_and_the_run_goes_on() -> None:
    replica, alone = small_replica(), small_replica()
    train(replica, 4)
    saved = replica.state()
    train(replica, 4)
    position, rate = replica.stream.position, replica.position.progress
    replica.theta[0] = replica.phi[0] = math.nan
    replica.restore(saved)
    assert torch.equal(replica.phi, saved.outer["phi"]) and replica.theta.isfinite().all()
    assert plain(replica.state().inner["optimizer"]) == plain(saved.inner["optimizer"])
    assert (replica.round, replica.steps, replica.stream.position) == (2, 8, position)
    assert replica.position.progress == rate
    before = replica.phi.clone()
    replica.slow.apply(0, torch.ones(10), offered_round=2)
    assert torch.equal(replica.phi, before), "that was for other weights"
    train(replica, 1)
    replica.slow.apply(0, torch.ones(10), offered_round=3)
    assert not torch.equal(replica.phi[:10], before[:10])
    assert all(map(math.isfinite, train(replica, 3)))
    with pytest.raises(Diverged):
        alone.phi[0] = math.nan
        alone.restart()


@pytest.mark.parametrize(("at", "name"), [(0, "model.embed_tokens.weight"), (-1, "model.norm.weight")])
def test_a_vector_that_is_not_finite_is_not_offered(at: int, name: str) -> None:
    replica = small_replica()
    train(replica, 4)
    phi, delta = replica.phi.clone(), replica.delta.clone()
    replica.theta[at] = math.nan
    with pytest.raises(NonFinite, match=name):
        replica.snapshot()
    with pytest.raises(NonFinite, match=name):
        replica.boundary()
    assert torch.equal(replica.phi, phi) and torch.equal(replica.delta, delta) and replica.round == 1
    replica.discard()
    assert torch.equal(replica.theta, phi) and (replica.round, replica.position.phase_step) == (2, 0)
    assert all(map(math.isfinite, train(replica, 3)))


def test_large_numbers_are_finite_although_their_sum_is_not() -> None:
    vector = torch.full((outer.PIECE + 9,), 3e38)
    assert first_nonfinite(vector) is None
    vector[-1], vector[-2] = math.inf, -math.inf
    assert first_nonfinite(vector) == len(vector) - 2


def test_when_the_slow_weights_are_gone_too_it_has_diverged() -> None:
    replica = small_replica()
    replica.phi[3] = math.inf
    with pytest.raises(Diverged):
        replica.discard()


# ---- memory and devices ----------------------------------------------------------------------------------------------
def test_a_model_that_cannot_be_trained_here_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights alone, of random numbers, may be all the memory that there is."""
    monkeypatch.setattr(memory, "total_bytes", lambda: 60_000)
    monkeypatch.setattr(model, "build", lambda *_: pytest.fail("it was made"))
    with pytest.raises(OutOfMemory, match=r"slow weights and momentum 21\.7 kB"):
        small_replica()


@pytest.mark.parametrize(
    ("architecture", "config"), [("LlamaConfig", SMALL), ("GPT2Config", {"n_embd": 8, "n_layer": 1, "n_head": 2})]
)
def test_examples_that_do_not_fit_on_a_cpu_are_refused_before_one_is_tried(
    architecture: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's attention keeps the square of the length here, as it has a dropout."""
    length, spec = 1024, ModelSpec(architecture=architecture, config=config)
    run = small_run().model_copy(update={"model": spec, "data": DataSpec(sequence_length=length)})
    run = run.model_copy(update={"inner": InnerSpec(batch_tokens=2 * length, precision="fp32")})
    text = Corpus(np.arange(9000, dtype=np.uint8), np.arange(9000, dtype=np.uint8))
    replica = build_replica(run, "a", device="cpu", threads=1, corpus=text)
    loss, lengths = replica._task.loss, []
    needed = gradients.BACKWARD * 2 * replica._gradients._kept_bytes(tuple(part[:1] for part in replica.stream.next(1)))
    monkeypatch.setattr(replica._task, "loss", lambda *batch: lengths.append(batch[1][0].shape[1] - 1) or loss(*batch))
    monkeypatch.setattr(memory, "free_bytes", lambda: int(0.95 * needed))
    with pytest.raises(OutOfMemory, match="an example of 1024 tokens"):
        replica.try_out()
    assert max(lengths) <= 256
    monkeypatch.setattr(memory, "free_bytes", lambda: int(1.05 * needed))
    replica.try_out()
    assert max(lengths) == 1024


def test_on_a_cpu_with_amx_only_products_are_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = small_replica()
    monkeypatch.setattr(gradients, "multiplies_bf16", lambda _: True)
    half = small_replica(run=small_run(precision="bf16"))
    losses = train(half, 3)
    assert losses == pytest.approx(train(exact, 3), rel=5e-3)
    assert not torch.equal(half.theta, exact.theta) and half.theta.dtype == torch.float32
    assert half.evaluate() == pytest.approx(exact.evaluate(), rel=5e-3)
    copies = [item.bytes for item in half.memory_plan().host if item.what == "weights in bf16"]
    assert copies == [2 * half.parameters]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept_for_the_backward_pass_grows_with_the_examples(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast's copies of the weights are no part of it."""
    monkeypatch.setattr(gradients, "multiplies_bf16", lambda _: True)
    replica = small_replica(run=small_run(precision=precision))
    (windows,) = replica.stream.next(4)
    one, two, four = (replica._gradients._kept_bytes((windows[:count],)) for count in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=0.02)
    assert one < 1.1 * (two - one)


def test_what_is_measured_is_freed_again() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(type(found) is Tensor for found in gc.get_objects())

    replica = small_replica()
    one = tuple(part[:1] for part in replica.stream.next(1))
    before = tensors()
    assert replica._gradients._kept_bytes(one) > 0
    assert tensors() == before


def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(build, "has_nvidia_card", lambda _: True)
    for device, said in (("cpu", False), ("auto", True)):
        caplog.clear()
        small_replica(device=device)
        assert ("this machine has an NVIDIA GPU; torch" in caplog.text) == said, "it is asked for, or it is taken"


def test_trying_out_changes_nothing() -> None:
    """With dropout, which draws from the random state."""
    dropout = ModelSpec(architecture="GPT2Config", config={"n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.5})
    run = small_run().model_copy(update={"model": dropout})
    with torch.random.fork_rng():
        sure = small_replica(run=run)
        plain = [sure.step() for _ in range(3)]
    with torch.random.fork_rng():
        tried = small_replica(run=run)
        tried.try_out()
        assert [tried.step() for _ in range(3)] == plain
    assert torch.equal(tried.theta, sure.theta)


@pytest.mark.parametrize(("examples", "judged"), [(2, 1), (16, 4), (2048, 1024 // 16)])
def test_a_swap_is_judged_by_a_quarter_of_a_batch_and_no_more_than_1024_tokens(examples, judged):
    run = small_run()
    run = run.model_copy(update={"inner": run.inner.model_copy(update={"batch_tokens": 16 * examples})})
    replica = small_replica(run=run)
    replica.step()
    assert [len(part) for part in replica._own_examples] == [judged]
