"""One replica on the device: beside one on a CPU, resumed, compiled, with little memory, with φ and δ on the host."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch
from checks.models import (
    replica,
    require_close_losses,
    require_close_vectors,
    require_same_vectors,
    same_each_time,
    small_run,
    vectors,
)
from checks.place import Place, Seen, Skip, require_close, require_same
from replicas import live_state, train
from torch import Tensor

from noloco_node.core.codecs.codec import BLOCK
from noloco_node.training import memory_budget
from noloco_node.training.inner import gradients
from noloco_node.training.replica import Replica

CPU = Place(torch.device("cpu"), quick=True)
STEPS = 10
FP32, BF16 = 1e-3, 2e-2
"""How far losses may be from those of a CPU in fp32, relatively: sums in another order; products in bf16."""
FRAGMENT = 1 << 18


def losses_are_those_of_a_cpu(place: Place) -> Seen:
    here, there = (train(replica(p, small_run(place)), STEPS) for p in (place, CPU))
    require_close_losses("fp32", here, there, FP32)
    half = train(replica(place, small_run(place, precision="bf16")), STEPS)
    require_close_losses("bf16", half, there, BF16)
    assert half != here or not place.on_gpu, "bf16 changes bits"
    worst = max(abs(a / b - 1) for a, b in zip(half, there, strict=True))
    return Seen(facts={"fp32": here, "bf16": half, "cpu": there, "bf16_worst": worst})


def a_run_gives_the_same_bits_again(place: Place) -> None:
    """Else nothing below means anything."""
    with same_each_time():
        one, other = (_trained(place, STEPS) for _ in range(2))
    require_same_vectors("a second time", one, other)


def the_usual_algorithms_too(place: Place) -> Seen:
    """Whether two runs are equal to the bit without asking for it: nobody relies on it."""
    one, other = (_trained(place, STEPS, precision="bf16") for _ in range(2))
    return Seen(facts={"equal": all(torch.equal(one[name], other[name]) for name in one)})


def _trained(place: Place, steps: int, precision: str = "fp32") -> dict[str, Tensor]:
    inner = replica(place, small_run(place, precision=precision))
    train(inner, steps)
    return vectors(inner)


def a_resumed_replica_goes_on_to_the_bit(place: Place) -> None:
    for precision in ("fp32", "bf16"):
        with same_each_time():
            run = small_run(place, precision=precision)
            whole = replica(place, run)
            train(whole, 6)
            saved = whole.state()
            resumed = replica(place, run)
            train(resumed, 1)  # so that everything must be replaced
            resumed.load(saved)
            require_same_vectors(f"{precision}, right after", vectors(resumed), vectors(whole))
            assert train(whole, 6) == train(resumed, 6), f"{precision}: the losses"
            require_same_vectors(f"{precision}, six steps later", vectors(resumed), vectors(whole))


def two_processes_share_a_batch(place: Place) -> Seen:
    """On one GPU by gloo, as NCCL wants one for each. Sums in another order."""
    run = small_run(place)
    alone = train(replica(place, run), STEPS)
    device = str(place.device)
    with closing(replica(place, run, device=f"{device},{device}")) as shared:
        together = train(shared, STEPS)
    require_close_losses("by two processes", together, alone, FP32)
    return Seen(facts={"alone": alone, "together": together})


def a_checkpoint_lies_on_the_cpu(place: Place) -> None:
    inner = replica(place, small_run(place))
    train(inner, 5)
    state = inner.state()
    moments = [part for each in state.inner["optimizer"].values() for part in each.values()]
    tensors = [*state.weights.values(), *state.outer.values(), *(m for m in moments if isinstance(m, Tensor))]
    assert len(tensors) >= 3 * len(state.weights) and all(tensor.device.type == "cpu" for tensor in tensors)
    before = [tensor.clone() for tensor in tensors]
    train(inner, 5)
    for number, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        require_same(f"tensor {number} of a checkpoint, while training goes on", tensor, old)


def the_micro_batch_is_found(place: Place) -> Seen:
    place.require_gpu("a CPU takes the task's own number")
    run = small_run(place, batch_tokens=128 * (8 if place.quick else 256))
    inner = replica(place, run, micro_batch=None)
    inner.try_out()
    loss = inner.step()
    whole = replica(place, run, micro_batch=4)
    require_close("the first loss, with other micro-batches", loss, whole.step(), FP32)
    assert inner.micro_batches == 1, f"{inner.micro_batch} at once, though all of them fit"
    return Seen(facts={"micro_batch": inner.micro_batch})


def a_boundary_is_that_of_a_cpu(place: Place) -> None:
    """Snapshot, movement, local step, a correction in time and one that is late: with the same state."""
    one, other = replica(place, small_run(place)), replica(CPU, small_run(place))
    train(one, 6)
    other.load(one.state())
    c = torch.randn(one.parameters, generator=torch.Generator().manual_seed(1)) * 1e-4
    for round_ in range(2):
        us, moved = zip(*(inner.snapshot() for inner in (one, other)), strict=True)
        for inner in (one, other):
            inner.boundary()
        assert float((us[0].cpu() - us[1]).norm()) <= 1e-6 * float(us[1].norm()), "u"
        for name, mine, theirs in zip(("peaks", "squares"), *moved, strict=True):
            assert torch.allclose(mine.cpu(), theirs, rtol=1e-3, atol=1e-12), f"{name} of the movement"
        for offered in (one.round, one.round - 1)[: round_ + 1]:
            for inner in (one, other):
                _apply(inner, c, offered)
        require_close_vectors(f"round {round_}", vectors(one), vectors(other), 1e-6)
        for inner in (one, other):
            inner.slow.let_stay()
    assert one.round == other.round == 3


def a_correction_can_be_taken_back(place: Place) -> None:
    """At once and a boundary later; trying it changes no bit."""
    for later in (0, 1):
        with same_each_time():
            _taken_back(place, later)


def _taken_back(place: Place, later: int) -> None:
    one, without = replica(place, small_run(place)), replica(place, small_run(place))
    for inner in (one, without):
        train(inner, 3)
        inner.step()
        inner.snapshot()
        inner.boundary()
    c = torch.randn(one.parameters, generator=torch.Generator().manual_seed(1)) * 1e-3
    _apply(one, c, one.round)
    before = vectors(one)
    with_it, tried, partner = one.losses(), one.losses_without(), one.losses_without(partner=1)
    require_same_vectors("after the losses without it", vectors(one), before)
    require_close("the held-out loss without it", tried.held_out, without.losses().held_out, 1e-5)
    assert len({with_it.held_out, tried.held_out, partner.held_out}) == 3
    for _ in range(later):
        for inner in (one, without):
            inner.boundary()
    one.slow.take_back()
    assert not one.slow.has_swapped
    require_close_vectors(f"taken back {later} boundaries later", vectors(one), vectors(without), 1e-6)


def slow_weights_on_the_host_give_the_same(place: Place) -> Seen:
    """φ, δ and u in host memory, as on a card that is too small for them."""
    place.require_gpu("a CPU has one memory only")
    with same_each_time():
        one = replica(place, small_run(place))
        with _slow_on_the_host():
            other = replica(place, small_run(place))
        assert one.phi.is_cuda and one.delta.is_cuda, "they fit"
        assert not other.phi.is_cuda and not other.delta.is_cuda, "they are to be on the host"
        pinned = {"φ": other.phi.is_pinned(), "δ": other.delta.is_pinned()}
        c = torch.randn(one.parameters, generator=torch.Generator().manual_seed(1)) * 1e-4
        for _ in range(3):
            for inner in (one, other):
                inner.step()
                inner.snapshot()
                inner.boundary()
                _apply(inner, c, inner.round)
            require_close_vectors("on the host", vectors(other), vectors(one), 1e-6)
            for inner in (one, other):
                inner.slow.let_stay()
        saved = other.state()
        with _slow_on_the_host():
            resumed = replica(place, small_run(place))
        resumed.load(saved)
        assert train(resumed, 5) == train(other, 5)
        require_same_vectors("resumed", vectors(resumed), vectors(other))
    return Seen(facts={"page_locked": pinned})


@contextmanager
def _slow_on_the_host() -> Iterator[None]:
    with patch.object(memory_budget, "slow_fits", lambda *_: False):
        yield


def a_peers_state_is_tried_and_adopted(place: Place) -> None:
    one, other = replica(place, small_run(place)), replica(place, small_run(place), "b")
    train(other, 8)
    state = live_state(other)
    before = vectors(one)
    trial = one.try_state(state)
    require_same_vectors("after a trial", vectors(one), before)
    require_close("the loss of its weights", trial.theirs, other.evaluate(), 1e-5)
    one.adopt(other.round, state)
    require_same("φ", one.phi.cpu(), other.phi.cpu())
    require_same("δ", one.delta.cpu(), other.delta.cpu())
    require_same("θ", one.theta.cpu(), other.phi.cpu())
    blocks = [0, one.parameters // BLOCK // 2]
    assert one.sample(blocks) == other.sample(blocks)
    train(one, 6)


def compiled_gives_the_same_losses(place: Place) -> Seen:
    if place.quick:
        place.require_gpu("compiling takes half a minute of a CPU")
    usual = train(replica(place, small_run(place, precision="bf16")), STEPS)
    faster = train(replica(place, small_run(place, precision="bf16"), compiled=True), STEPS)
    require_close_losses("compiled", faster, usual, BF16)
    return Seen(facts={"usual": usual, "compiled": faster})


def fp16_with_a_scale_gives_the_same_losses(place: Place) -> Seen:
    """As a GPU without bf16 computes: forced here."""
    place.require_gpu("a CPU's products are fp32")
    run = small_run(place, precision="bf16")
    usual = train(replica(place, run), STEPS)
    with patch.object(gradients, "products", lambda *_: torch.float16):
        inner = replica(place, run)
        seen = train(inner, STEPS)
        scale = inner._gradients._scale
        assert scale is not None and scale.value >= 1
        require_close_losses("fp16", seen, usual, BF16)
        assert inner.skipped == 0 and inner.last_norm < 100, inner.last_norm
    return Seen(facts={"bf16": usual, "fp16": seen, "scale": scale.value})


def moments_of_8_bits_resume_and_train(place: Place) -> Seen:
    if find_spec("bitsandbytes") is None:
        raise Skip("no bitsandbytes")
    with same_each_time():
        run = small_run(place, precision="bf16")
        usual = train(replica(place, run), STEPS)
        inner = replica(place, run, moments="8bit")
        seen = train(inner, STEPS)
        require_close_losses("8 bits", seen, usual, 5 * BF16)
        resumed = replica(place, run, moments="8bit")
        resumed.load(inner.state())
        assert train(inner, 4) == train(resumed, 4)
        require_same_vectors("resumed", vectors(resumed), vectors(inner))
    return Seen(facts={"32 bits": usual, "8 bits": seen})


def nonfinite_numbers_are_found(place: Place) -> None:
    inner = replica(place, small_run(place))
    train(inner, 3)
    inner.theta[inner.parameters // 2] = float("nan")
    assert not torch.isfinite(torch.tensor(inner.step())), "its loss"
    assert inner.skipped == 1
    try:
        inner.boundary()
    except Exception as error:  # noqa: BLE001
        assert type(error).__name__ == "NonFinite", error
    else:
        raise AssertionError("a boundary with NaN")
    inner.discard()
    train(inner, 2)
    assert torch.isfinite(inner.theta).all()


def _apply(inner: Replica, c: Tensor, offered_round: int) -> None:
    """Fragment by fragment, as they come."""
    here = c.to(inner.theta.device)
    for start in range(0, inner.parameters, FRAGMENT):
        inner.slow.apply(start, here[start : start + FRAGMENT], offered_round)


CHECKS = (
    losses_are_those_of_a_cpu,
    a_run_gives_the_same_bits_again,
    the_usual_algorithms_too,
    a_resumed_replica_goes_on_to_the_bit,
    a_checkpoint_lies_on_the_cpu,
    two_processes_share_a_batch,
    the_micro_batch_is_found,
    a_boundary_is_that_of_a_cpu,
    a_correction_can_be_taken_back,
    slow_weights_on_the_host_give_the_same,
    a_peers_state_is_tried_and_adopted,
    nonfinite_numbers_are_found,
    fp16_with_a_scale_gives_the_same_losses,
    moments_of_8_bits_resume_and_train,
    compiled_gives_the_same_losses,
)
