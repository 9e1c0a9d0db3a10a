"""A replica and its threads on a pretended GPU: nothing waits that need not, and little crosses between the devices.

What it counts a GPU would do; what it computes is a CPU's, so results can be compared to the bit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from pretended_device import CUDA, PretendedGpu, Seen, pretended_gpu
from replicas import HeldUp, assert_same, exchange, live_state, small_text, train
from test_thread import answer, running, swap

from noloco_node.core import outer
from noloco_node.core.codecs.by_name import codec, rehearse
from noloco_node.core.codecs.codec import Packed
from noloco_node.core.gpu import wait
from noloco_node.core.kernels import BLOCK, Grid, for_device, reference
from noloco_node.errors import OutOfMemory
from noloco_node.run.schema import DataSpec, InnerSpec, Manifest, ModelSpec
from noloco_node.training import background_copy, language, memory_budget
from noloco_node.training.build import build_replica
from noloco_node.training.mailbox import Command, Correct, Ready
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.replica import Replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS

STEPS, EXAMPLES, LENGTH = 2, 4, 64
PAGEABLE = 1 << 20
"""Bytes of the largest copy that may wait for the system to find its pages."""
AT_FIRST = 2
"""Boundaries until memory that is used again and again is there."""


TINY = ModelSpec(preset="tiny")
"""0.4 M parameters, 1.6 MB a vector."""
LARGER = ModelSpec(
    architecture="LlamaConfig",
    config={"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "tie_word_embeddings": True},
)
"""1.7 M parameters: two fragments as a node has them."""


def run(precision: str, model: ModelSpec) -> Manifest:
    return Manifest(
        name="pretended",
        rounds=9,
        model=model,
        data=DataSpec(sequence_length=LENGTH),
        inner=InnerSpec(steps=STEPS, batch_tokens=LENGTH * EXAMPLES, precision=precision),
    )


@pytest.fixture(params=["beside θ", "in host memory"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """With φ and δ on the GPU, and with a GPU that is too small for them. Evaluations are short."""
    monkeypatch.setattr(language, "EVAL_TOKENS", LENGTH * EXAMPLES)
    if request.param == "in host memory":
        monkeypatch.setattr(memory_budget, "slow_fits", lambda *_: False)
    with pretended_gpu() as gpu:
        yield gpu
        assert not gpu.races


@pytest.fixture
def replica(gpu: PretendedGpu) -> Iterator[Callable[..., Replica]]:
    """Makes one, on the pretended GPU where nothing else is said."""
    with ExitStack() as made:

        def make(
            device: str = "cuda", peer: str = "a", precision: str = "bf16", model: ModelSpec = TINY, **options: Any
        ) -> Replica:
            options = {"micro_batch": EXAMPLES, "corpus": small_text(), "threads": 1, **options}
            return made.enter_context(closing(build_replica(run(precision, model), peer, device=device, **options)))

        yield make


def lines(seen: Seen) -> str:
    """What a failed assertion shows."""
    return "\n".join(f"{wait.thread}: {wait.what} at {wait.where}" for wait in seen.waits)


def test_a_replica_s_whole_life(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    """No operation finds tensors of two devices."""
    it = replica(micro_batch=None)
    it.try_out()
    train(it, 2 * STEPS)
    assert it.micro_batch == EXAMPLES, "found by trying"
    it.snapshot()
    it.boundary()
    c = torch.full((5000,), 1e-4, device=it.theta.device)
    it.slow.apply(7, c, it.round)
    assert it.losses() != it.losses_without()
    it.slow.take_back()
    saved, copied = it.state(), live_state(it)
    assert all(tensor.device.type == "cpu" for tensor in [*saved.weights.values(), *saved.outer.values()])
    loss = it.evaluate()
    it.try_state(copied)
    it.adopt(9, copied)
    train(it, 1)
    it.load(saved)
    assert it.evaluate() == pytest.approx(loss, rel=1e-3) and it.theta.is_cuda and it.round == 3
    it.restore(saved)
    it.restart()
    train(it, STEPS)
    it.sample([0, 1])
    it.theta[3] = torch.nan
    it.discard()
    train(it, STEPS)


def test_in_fp32_it_computes_what_a_cpu_does(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    """With partners, and after a checkpoint."""
    pairs = []
    for device in ("cuda", "cpu"):
        one, other = (replica(device, peer, "fp32") for peer in "ab")
        for _ in range(2):
            for it in (one, other):
                for _ in range(STEPS):
                    it.step()
            exchange(one, other, (codec("lattice:4"), codec("lattice:4")), 1 << 17)
        again = replica(device, "a", "fp32")
        again.load(one.state())
        again.step()
        pairs.append((again.state(), again.evaluate()))
    (there, loss), (here, same) = pairs
    assert loss == same
    assert all(torch.equal(there.weights[name], here.weights[name]) for name in here.weights)
    assert all(torch.equal(there.outer[name], here.outer[name]) for name in here.outer)


@pytest.mark.parametrize("name", ["lattice:4", "int8", "bf16", "fp32"])
def test_a_rehearsal_codes_there(gpu: PretendedGpu, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """What will be launched in a swap is compiled then. Without a driver Triton fails, and one line says so."""
    rehearse(name, torch.device("cuda"))
    rehearse(name, torch.device("cuda"))
    assert len(caplog.messages) == (name == "lattice:4")


def test_blocks_that_are_sent_again_wait_for_nothing(gpu: PretendedGpu) -> None:
    """By plain torch operations on every device, on groups of a few blocks."""
    kernels, ones, u = for_device("cuda"), torch.ones(9, device="cuda"), torch.ones(9, BLOCK, device="cuda")
    grid, which = Grid(ones, ones / 2, 7), torch.arange(3, device="cuda")
    codes, _ = kernels.encode(u, grid, 4)
    reference.steps(u, grid, which)
    with gpu.watching() as seen:
        k = reference.steps(u, grid, which)
        reference.unpack(codes, 4)
        reference.resolve(u, grid, which, k & 0xFFF, 12, torch.zeros_like(u))
    assert not seen.waits and not seen.copies, lines(seen)


def test_the_thread_that_makes_a_replica_chooses_its_gpu(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    """Triton starts a kernel on the GPU that its thread has chosen, wherever the kernel's vectors are."""
    with running(replica, codec=codec("lattice:4")) as one:
        one.thread.begin()
        one.offer()
    assert gpu.chosen == {"training": 0}


# ---- one replica: what waits, what crosses ---------------------------------------------------------------------------
def test_a_fragment_that_is_sent_once_is_waited_for_three_times(gpu: PretendedGpu) -> None:
    """Its ranges, its codes, and what the partner's codes say; the correction that is kept is not read."""
    u = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(1))
    rehearse("lattice:4", CUDA)
    sides = (u.to(CUDA), u + 1e-3 * u.sin())
    mine, theirs = (codec("lattice:4").converse(u, 0, bytes(16), torch.full((64,), 1e-2)) for u in sides)
    with gpu.watching() as seen:
        ranges, codes = (mine.open(), theirs.open()), list[bytes]()
        for side, payload in ((mine, ranges[1]), (theirs, ranges[0])):
            reply = side.receive(payload).reply
            assert reply
            codes.append(reply)
        received = mine.receive(codes[1])
        assert received.correction is not None and received.most == 8
        kept = Packed(received.correction, received.unit, 1.0, received.most)
    assert mine.stats.missed == 0 and len(seen.waits) == 3, lines(seen)
    assert kept.tensors[0].dtype == torch.int8
    assert torch.equal(kept.unscaled(CUDA), received.correction)


def test_memory_that_another_program_gives_back_is_used_again_a_step_later(
    gpu: PretendedGpu, replica: Callable[..., Replica]
) -> None:
    it = replica(micro_batch=None)
    train(it, 2)
    whole, taken, there = it.micro_batch, it._gradients.activations, gpu.total_bytes
    assert whole == EXAMPLES and taken
    it._optimizer.free_gradients()
    gpu.total_bytes = gpu.allowed_bytes = gpu.allocated + 4 * it.parameters + taken // 2
    it.step()
    assert it.micro_batch < whole
    gpu.total_bytes = gpu.allowed_bytes = there
    it.step()
    assert it.micro_batch == whole


def test_what_is_made_again_in_the_next_step_is_not_spare(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    it = replica(micro_batch=None)
    spare = it._gradients.spare_bytes
    assert spare() is None, "no micro-batch was tried"
    train(it, 2)
    whole = spare()
    assert whole is not None and 0 < whole < gpu.total_bytes
    it._optimizer.free_gradients()
    without = spare()
    assert without is not None and without <= whole
    it._optimizer.restart()
    fresh = spare()
    assert fresh is not None and fresh <= without


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_step_waits_once(gpu: PretendedGpu, replica: Callable[..., Replica], micro_batches: int) -> None:
    it = replica(micro_batch=EXAMPLES // micro_batches)
    train(it, 1)
    with gpu.watching() as seen:
        it.step()
    assert len(seen.waits) == 1, lines(seen)
    assert seen.bytes(to_gpu=False) <= 16


def test_an_evaluation_waits_once(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    """However many micro-batches it has; after each phase."""
    it = replica(micro_batch=1)
    train(it, 2)
    assert it.position.phase_step == 0
    with gpu.watching() as seen:
        it.evaluate()
    assert len(seen.waits) == 1, lines(seen)


def test_a_boundary_waits_a_few_times(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    it = replica()
    for _ in range(AT_FIRST + 1):
        it.step(), it.step()
        with gpu.watching() as seen:
            offered = it.snapshot()
            it.boundary()
        del offered
    assert len(seen.waits) <= 4, lines(seen)
    assert seen.pageable <= PAGEABLE


def test_a_correction_waits_for_nothing(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    it = replica()
    it.step(), it.step(), it.snapshot(), it.boundary()
    c = torch.full((it.parameters,), 1e-4, device=it.theta.device)
    with gpu.watching() as seen:
        for start in range(0, it.parameters, 1 << 17):
            it.slow.apply(start, c[start : start + (1 << 17)], it.round)
    assert not seen.waits, lines(seen)
    assert seen.pageable <= PAGEABLE


def test_a_correction_that_finds_no_memory_midway_lands_once(
    gpu: PretendedGpu, replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is longer than what is worked on at once. Its first piece landed twice, and the length owed there never."""
    monkeypatch.setattr(outer, "PIECE", 1 << 12)
    one, other = replica(), replica()
    c, failed = torch.full((3 << 12,), 1e-4, device=CUDA), 0
    for each in (one, other):
        each.slow.load_scales([1.25] * len(each.slow.scales))
        train(each, 1)
        each.step(), each.step(), each.snapshot(), each.boundary()
    while True:
        gpu.allowed_bytes = gpu.allocated + (failed << 13)
        try:
            one.slow.apply(0, c, one.round)
        except torch.OutOfMemoryError:
            failed += 1
        else:
            break
    gpu.allowed_bytes = gpu.total_bytes
    other.slow.apply(0, c, other.round)
    assert failed
    for mine, theirs in ((one.theta, other.theta), (one.phi, other.phi), (one.delta, other.delta)):
        assert torch.equal(mine.cpu(), theirs.cpu())
    one.snapshot(), other.snapshot()
    assert one.slow.scales == other.slow.scales


@pytest.mark.parametrize("name", ["lattice:4", "fp32"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_what_a_partner_counts_on_takes_no_more_memory(gpu: PretendedGpu, name: str, where: str) -> None:
    """Where a correction is whole, the partner may add it. There is memory for it then, or the swap ends before."""
    rehearse(name, CUDA)
    posts: list[Command] = []
    u = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(1))
    moved = torch.ones(64), torch.full((64,), float(BLOCK))
    with closing(CodecThread(codec(name), posts.append, 64 * BLOCK)) as thread:
        mine = Offer(thread, 1, u.clone().to(where), moved, torch.device(CUDA))
        failed = 0
        while not posts:
            theirs = codec(name).converse(u + 1e-3 * u.sin(), 0, bytes(16), moved[0])
            said, answer = theirs.open(), mine.open(0, bytes(16)).result()
            if name != "fp32":
                said, answer = theirs.receive(answer).reply, mine.receive(0, said).result()
            gpu.allowed_bytes = gpu.allocated + (failed << 14)
            try:
                scale = mine.receive(0, said).result()
            except OutOfMemory:
                failed += 1
            else:
                gpu.allowed_bytes = gpu.allocated
                assert scale == 1
                mine.apply(0, 0.5)
                mine.stats().result()
                assert posts
            gpu.allowed_bytes = gpu.total_bytes
            thread.codec.forget()
        assert failed
        (correction,) = posts
        assert isinstance(correction, Correct) and correction.correction.is_cuda
        offered = thread.do(1, mine._u.cpu).result()
        wait(correction.ready, torch.device(CUDA))
        added = correction.correction.cpu()
        assert correction.kept and torch.equal(added, correction.kept.applied(CUDA).cpu()) and added.any()
        assert torch.equal(offered, u + added)


# ---- threads that swap -----------------------------------------------------------------------------------------------
def test_a_gpu_and_a_cpu_swap(gpu: PretendedGpu, replica: Callable[..., Replica]) -> None:
    """Corrections are opposite to the bit. A round brings 0.6 bytes a parameter to the host, and the training thread
    waits once a step, a few times at the boundary, and for no correction."""
    options = {"rounds": AT_FIRST + 2, "fragment_elements": FRAGMENT_ELEMENTS, "blocking": True}
    build = partial(replica, model=LARGER)
    with ExitStack() as both:
        one = both.enter_context(running(partial(build, "cuda", "a"), codec=codec("lattice:4"), **options))
        parameters = one.next(Ready).parameters  # models are not built on two threads at once
        other = both.enter_context(running(partial(build, "cpu", "b"), codec=codec("lattice:4"), **options))
        one.thread.begin()
        other.thread.begin()
        offers = one.offer(), other.offer()
        for _ in range(AT_FIRST + 1):
            with gpu.watching() as seen:
                corrections = swap(*offers)
                for each in (one, other):
                    each.thread.swapping(False)
                    each.thread.round_over(offers[0].round)
                offers = one.offer(), other.offer()
            assert len(corrections) > 1
            assert all(torch.equal(mine, -theirs) for mine, theirs in corrections)
    own, codecs = seen.on("training"), seen.on("codec")  # without this test's
    assert len(own.on("", "_step").waits) == STEPS, lines(own.on("", "_step"))
    assert not own.on("", "_correct").waits, lines(own.on("", "_correct"))
    assert len(own.on("", "_boundary").waits) <= 4, lines(own.on("", "_boundary"))
    assert len(codecs.waits) <= 9 * len(corrections), lines(codecs)
    assert max(own.pageable, codecs.pageable) <= PAGEABLE
    if offers[0]._u.is_cuda:  # else φ, δ and u cross too, piece by piece, and nobody waits
        evaluated = own.on("", "evaluate").bytes(to_gpu=False)  # does not grow with the model
        crossed = own.bytes(to_gpu=False) + codecs.bytes(to_gpu=False) - evaluated
        assert crossed <= 0.6 * parameters, f"{crossed / parameters:.3f} bytes a parameter"


def test_a_checkpoint_and_a_joining_nodes_copy_are_page_locked_and_the_training_thread_waits_for_neither(
    gpu: PretendedGpu, replica: Callable[..., Replica]
) -> None:
    with running(replica, codec=codec("lattice:4")) as one:
        one.thread.begin()
        one.offer()
        with gpu.watching() as seen:
            state, copied = one.thread.state(), one.thread.live_state()
            assert not answer(state).outer["phi"].is_cuda and answer(copied)
    assert seen.pageable <= PAGEABLE
    asked = [seen.on("training", within) for within in ("copy_state", "copy_slow")]
    assert not any(each.waits or each.copies for each in asked)


def test_a_copy_is_of_the_moment_it_was_asked_for(
    gpu: PretendedGpu, replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step, a boundary and a correction change everything, and the copy's threads and this one both read."""
    monkeypatch.setattr(background_copy, "PIECE_BYTES", 1 << 14)
    it = replica()
    train(it, STEPS + 1)
    state, slow = it.state(), live_state(it)
    again, copied = it.copy_state(), it.copy_slow()
    it.step()
    it.snapshot()
    it.boundary()
    it.slow.apply(7, torch.full((5000,), 1e-4, device=it.theta.device), it.round)
    assert_same(asdict(again.result()), asdict(state))
    assert copied.result() == (state.round, slow)


@pytest.mark.parametrize("room", ["enough", "some", "none"])
def test_a_step_waits_for_no_copy_where_the_gpu_has_room(
    gpu: PretendedGpu, replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """The copy's threads get no turn before the step is over: what it changes is kept on the GPU until they read it."""
    monkeypatch.setattr(background_copy, "PIECE_BYTES", 1 << 14)
    it = replica()
    train(it, STEPS + 1)
    before, state = gpu.allocated, it.state()
    it.copies = it.slow._copies = copies = HeldUp(it.theta.device)
    copies.spare = lambda: {"enough": 1 << 40, "some": 1 << 20, "none": 0}[room]
    again = it.copy_state()
    with gpu.watching() as seen:
        it.step()
    assert (len(seen.waits) == 1) == (room == "enough"), lines(seen)
    kept = gpu.allocated - before
    assert (kept > 8 * it.parameters) == (room == "enough") and (kept > 1 << 19) == (room != "none"), kept
    copies.complete()
    assert_same(asdict(again.result()), asdict(state))
    it._optimizer.free_gradients()
    assert gpu.allocated <= before, "given back as it was read"
