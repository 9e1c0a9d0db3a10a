"""What fits: decisions about memory as functions of numbers, and the search for a micro-batch on a pretended GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replicas import small_replica

from noloco_node.errors import OutOfMemory
from noloco_node.host import memory
from noloco_node.host.config import EIGHT_BIT, FULL
from noloco_node.host.gpu_peaks import bf16_flops
from noloco_node.training import memory_budget
from noloco_node.training.memory_budget import CALM_STEPS, MicroBatch

GB = 10**9


def test_the_slow_weights_lie_on_the_gpu_where_half_of_it_stays_free() -> None:
    assert memory_budget.slow_fits(10**9, free=46 * GB, moments=FULL)
    assert not memory_budget.slow_fits(10**9, free=46 * GB - 2, moments=FULL)
    assert memory_budget.slow_fits(10**9, free=35 * GB, moments=EIGHT_BIT)


def test_on_a_cpu_the_slow_weights_are_beside_the_fast_ones() -> None:
    theta = torch.arange(5.0)
    phi, delta = memory_budget.slow_vectors(theta, 1.0, FULL)
    assert torch.equal(phi, theta) and phi.data_ptr() != theta.data_ptr() and not delta.any()


def each(found: memory_budget.Plan) -> tuple[float, float]:
    return found.device_bytes / found.parameters, found.host_bytes / found.parameters


def test_what_a_run_takes_for_each_parameter() -> None:
    """θ, gradient, moments, bf16; φ, δ, the length that is owed, an offer, corrections; a checkpoint."""
    plan = memory_budget.plan
    assert each(plan(10**9)) == pytest.approx((0, 1.06 * (16 + 15) + 20))
    assert plan(10**9).host_least_bytes == pytest.approx(1.06 * (16 + 15) * 10**9)
    assert each(plan(10**9, moments=EIGHT_BIT)) == pytest.approx((0, 1.06 * (10 + 15) + 14), abs=0.1)
    assert each(plan(10**9, on_gpu=True)) == (16, 19 + 20)
    assert each(plan(10**9, on_gpu=True, bf16=True)) == (18, 19 + 20)
    assert each(plan(10**9, on_gpu=True, bf16=True, slow_on_gpu=True)) == (18 + 15, 20)
    assert each(plan(10**9, on_gpu=True, bf16=True, moments=EIGHT_BIT)) == pytest.approx((12, 19 + 14), abs=0.1)


def test_the_largest_model_that_fits() -> None:
    most = memory_budget.most_parameters
    assert most(None, 10 * GB) == int(10 * GB / (1.06 * 31)) and most(None, None) is None
    assert most(None, 10 * GB, bf16=True) == int(10 * GB / (1.06 * 33))
    card, here = 24 << 30, 64 * GB
    found = most(card, here, bf16=True), most(card, here, EIGHT_BIT, bf16=True)
    assert found == pytest.approx((0.97 * card / 18, 0.97 * card / 12.03), rel=0.001)
    assert most(card, 10 * GB) == int(10 * GB / 19), "a checkpoint's copy may go to the disk"


def test_activations_are_counted_without_the_weights_in_bf16_that_were_measured_with_them() -> None:
    found = memory_budget.plan(10**6, on_gpu=True, bf16=True, activations=5 * 10**6, program=7)
    assert {item.what: item.bytes for item in found.device}["activations"] == 3 * 10**6
    assert found.device_bytes == 21 * 10**6 and found.host_bytes == 39 * 10**6 + 7
    assert memory_budget.plan(10**6, activations=5 * 10**6).host_bytes == (1.06 * 36 + 20) * 10**6


def test_what_does_not_fit_is_said_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 32_860_000)
    memory_budget.check(lambda _: memory_budget.plan(10**6), FULL, torch.device("cpu"), 1.0)
    with pytest.raises(
        OutOfMemory, match=r"needs 32.9 MB and there are 32.9 MB here \(weights 4.0 MB, gradient"
    ) as why:
        memory_budget.check(lambda _: memory_budget.plan(10**6 + 1), FULL, torch.device("cpu"), 1.0)
    assert str(why.value).endswith("use a larger machine, or join another run")


@pytest.fixture
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 24 GiB, on which another program has 1 GB."""
    total = 24 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - GB, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(memory, "total_bytes", lambda: 64 * GB)


def one_b(activations: int) -> Callable[[str], memory_budget.Plan]:
    """The preset `1b` with 32,000 tokens."""
    return lambda kind: memory_budget.plan(
        1_345_000_000, on_gpu=True, bf16=True, moments=kind, activations=activations + 2_690_000_000
    )


@pytest.mark.usefixtures("_card")
def test_one_b_on_24_gb_wants_8_bits() -> None:
    card = torch.device("cuda")
    memory_budget.check(one_b(2 * GB), EIGHT_BIT, card, 1.0)
    with pytest.raises(OutOfMemory, match=r"moments 10.8 GB.*weights in bf16 2.7 GB.*activations 2.0 GB") as why:
        memory_budget.check(one_b(2 * GB), FULL, card, 1.0)
    assert "use --moments 8bit, with which it needs 18.2 GB, or a larger card" in str(why.value)
    with pytest.raises(OutOfMemory, match="end other programs there, or use a larger card"):
        memory_budget.check(one_b(20 * GB), FULL, card, 1.0)
    with pytest.raises(OutOfMemory, match=r"needs 18.2 GB and there are 12.9 GB of the GPU \(weights"):
        memory_budget.check(one_b(2 * GB), EIGHT_BIT, card, 0.5)


@pytest.mark.usefixtures("_card")
def test_who_holds_the_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GB, 24 << 30))
    with pytest.raises(OutOfMemory, match=r"there are 10.0 GB of the GPU, as other programs have 15.8 GB \("):
        memory_budget.check(one_b(0), EIGHT_BIT, torch.device("cuda"), 1.0)


def test_the_hosts_memory_can_be_out_too() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert memory_budget.is_out_of_memory(found.value) and memory_budget.is_out_of_memory(MemoryError())
    assert not memory_budget.is_out_of_memory(RuntimeError("shapes do not fit"))


def test_a_copy_for_a_joining_node_is_made_only_where_there_is_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = small_replica()
    needed = 28 * replica.parameters
    monkeypatch.setattr(memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(OutOfMemory, match="a copy of the state"):
        replica.copy_slow()
    for free in (needed, None):
        monkeypatch.setattr(memory, "free_bytes", lambda free=free: free)
        small_replica().copy_slow()


def tries(examples: int, room: int, each: int, fixed: int = 0) -> list[int]:
    """The sizes that a GPU would try whose examples take so many bytes."""
    micro, sizes = MicroBatch(examples, None), []
    while True:
        sizes.append(micro.size)
        if not micro.may_grow(fixed + each * micro.size, room):
            return sizes


def test_a_micro_batch_doubles_while_twice_as_much_fits() -> None:
    assert tries(64, room=1000, each=1) == [1, 2, 4, 8, 16, 32, 64]
    assert tries(50, room=1000, each=1) == [1, 2, 4, 8, 16, 32, 50]
    assert tries(64, room=1000, each=100) == [1, 2, 4, 8]
    assert tries(64, room=1000, each=10, fixed=300) == [1, 2, 4, 8, 16]
    assert tries(64, room=100, each=100) == [1]
    for room in range(10, 1000, 37):
        assert tries(256, room, each=5)[-1] * 5 <= room or room < 10


def test_a_micro_batch_that_is_given_is_settled() -> None:
    given = MicroBatch(64, 8)
    assert given.settled and not given.may_grow(0, 10**9) and given.size == 8
    assert MicroBatch(4, 100).size == 4


def test_one_that_did_not_fit_while_it_was_searched_is_found() -> None:
    found = MicroBatch(64, None)
    assert not found.settled and found.may_grow(1, 100) and found.size == 2
    assert found.halve() and found.settled and found.size == 1 and not found.halve()
    for _ in range(3 * CALM_STEPS):
        found.stepped()
    assert found.size == 1


def test_one_that_is_halved_later_grows_back_after_calm_steps() -> None:
    micro = MicroBatch(50, 50)
    for size in (25, 12, 6):
        assert micro.halve() and micro.size == size
    sizes = []
    for _ in range(5 * CALM_STEPS):
        micro.stepped()
        sizes.append(micro.size)
    assert list(dict.fromkeys(sizes)) == [6, 12, 24, 48, 50]
    assert [sizes.count(size) for size in (6, 12, 24, 48)] == [CALM_STEPS - 1, *[CALM_STEPS] * 3]
    micro.halve()
    for _ in range(CALM_STEPS - 1):
        micro.stepped()
    assert micro.size == 25 and micro.halve() and micro.size == 12, "which begins to count again"
    for _ in range(CALM_STEPS - 1):
        micro.stepped()
    assert micro.size == 12


def test_one_that_is_halved_grows_back_at_once_where_it_fits_again() -> None:
    """A program that took the GPU's memory has ended. After a try that failed nothing but calm steps is trusted."""
    micro = MicroBatch(64, 64)
    for _ in range(6):
        micro.halve()
    micro.stepped(lambda: False)
    assert micro.size == 1
    micro.stepped(lambda: True)
    assert micro.size == 64
    micro.stepped(lambda: True)
    for _ in range(2):  # the second time it fitted by its number only
        micro.halve()
        micro.stepped(lambda: True)
    for _ in range(CALM_STEPS - 2):
        assert micro.size == 32
        micro.stepped(lambda: True)
    micro.stepped(lambda: True)
    assert micro.size == 64
    assert micro.halve() and micro.size == 32
    micro.stepped(lambda: True)
    assert micro.size == 64, "it has fitted since"


def test_one_that_was_halved_for_long_grows_back_at_once_too() -> None:
    micro = MicroBatch(64, 64)
    for _ in range(3):
        micro.halve()
    for _ in range(CALM_STEPS):
        micro.stepped(lambda: False)
    assert micro.size == 16
    micro.stepped(lambda: True)
    assert micro.size == 64


def test_the_search_leaves_no_trace_in_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real search, on a CPU that is asked for its memory as if it were a GPU."""
    sure, searching = small_replica(), small_replica()
    gradients = searching._gradients
    gradients._micro = MicroBatch(gradients.examples, None)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda *_: 1000 + gradients._needed_bytes())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    compiled: list[int] = []
    gradients._compile = lambda: compiled.append(searching.micro_batch)
    assert searching.step() == sure.step() and searching.micro_batch == 4
    assert compiled == [4], "once, when the size is known"
    assert torch.equal(searching.theta, sure.theta)


@pytest.mark.parametrize("to_the_disk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_plan_is_what_a_process_has_at_most_on_a_cpu(to_the_disk: bool, tmp_path: Path) -> None:
    """Measured in a process of its own; with 104 M parameters it is as close."""
    script = Path(__file__).parent.parent / "helpers" / "memory_peak.py"
    said = subprocess.run(
        [sys.executable, str(script), "1024", "1", FULL, *([str(tmp_path)] if to_the_disk else [])],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    found = json.loads(said)
    if found["peak"] is None:
        pytest.skip("this system does not say what a process had in memory")
    assert found["plan"] == pytest.approx(found["peak"], rel=0.1), found
    assert found["peak"] < 1.05 * found["plan"], found


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")


@needs_gpu
def test_slow_weights_in_pinned_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = small_replica(device="cuda")
    monkeypatch.setattr(memory_budget, "free_bytes", lambda *_: 0)
    phi, delta = memory_budget.slow_vectors(on_gpu.theta, 1.0, FULL)
    assert phi.is_pinned() and delta.is_pinned() and torch.equal(phi, on_gpu.theta.cpu())


@needs_gpu
def test_a_replica_whose_slow_weights_are_elsewhere_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = small_replica(device="cuda")
    monkeypatch.setattr(memory_budget, "slow_fits", lambda *_: False)
    apart = small_replica(device="cuda")
    assert beside.phi.is_cuda and not apart.phi.is_cuda
    for replica in (beside, apart):
        for _ in range(7):
            replica.step()
            if replica.position.phase_over:
                replica.boundary()
        replica.slow.apply(5, torch.ones(10), replica.round)
    assert torch.allclose(beside.phi.cpu(), apart.phi, atol=1e-5)


@needs_gpu
def test_on_a_gpu_memory_and_its_share_of_the_arithmetic_are_known() -> None:
    """The share only for a card that is in the table."""
    replica = small_replica(device="cuda")
    replica.step()
    assert replica.device_bytes and replica.device_limit_bytes
    assert 0 < replica.device_bytes < replica.device_limit_bytes
    known = bf16_flops(torch.cuda.get_device_name())
    share = replica.mfu(1000.0)
    assert share is None if known is None else share and 0 < share < 1
