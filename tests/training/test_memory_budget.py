"""What fits: decisions about memory as functions of numbers, and the search for a micro-batch on a pretended GPU."""

import pytest
import torch
from replicas import small_replica

from noloco_node.errors import OutOfMemory
from noloco_node.host import memory
from noloco_node.host.gpu_peaks import bf16_flops
from noloco_node.training import memory_budget, model
from noloco_node.training.memory_budget import MicroBatch

GB = 10**9


def test_the_slow_weights_lie_on_the_gpu_where_half_of_it_stays_free() -> None:
    assert memory_budget.slow_fits(10**9, free=36 * GB)
    assert not memory_budget.slow_fits(10**9, free=36 * GB - 2)


def test_on_a_cpu_the_slow_weights_are_beside_the_fast_ones() -> None:
    theta = torch.arange(5.0)
    phi, delta = memory_budget.slow_vectors(theta, 1.0)
    assert torch.equal(phi, theta) and phi.data_ptr() != theta.data_ptr() and not delta.any()


def test_what_does_not_fit_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "memory_bytes", lambda: 51 * 10**6)
    memory_budget.check(10**6, torch.device("cpu"), 1.0)
    with pytest.raises(OutOfMemory, match=r"51 bytes each\) and there are 51.0 MB"):
        memory_budget.check(10**6 + 1, torch.device("cpu"), 1.0)


def test_beside_a_gpu_an_offer_and_a_checkpoint_need_room_and_the_slow_weights_where_it_is_small() -> None:
    assert memory_budget.beside_gpu_bytes(10**9, of_gpu=40 * GB) == 25
    assert memory_budget.beside_gpu_bytes(10**9, of_gpu=39 * GB) == 35


def test_a_copy_for_a_joining_node_is_made_only_where_there_is_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (28 * 10**6, None):
        monkeypatch.setattr(memory, "free_bytes", lambda free=free: free)
        memory_budget.check_copy(10**6)
    monkeypatch.setattr(memory, "free_bytes", lambda: 28 * 10**6 - 1)
    with pytest.raises(OutOfMemory, match="a copy of the state"):
        memory_budget.check_copy(10**6)


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


def test_a_micro_batch_that_is_given_or_was_halved_is_settled() -> None:
    given = MicroBatch(64, 8)
    assert given.settled and not given.may_grow(0, 10**9) and given.size == 8
    assert MicroBatch(4, 100).size == 4
    found = MicroBatch(64, None)
    assert not found.settled and found.may_grow(1, 100) and found.size == 2
    found.halve()
    assert found.settled and found.size == 1
    with pytest.raises(OutOfMemory, match="one example"):
        found.halve()


def test_the_search_leaves_no_trace_in_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real search, on a CPU that is asked for its memory as if it were a GPU."""
    sure, searching = small_replica(), small_replica()
    searching._gradients._micro = MicroBatch(searching._gradients.examples, None)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda *_: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    monkeypatch.setattr(memory_budget, "MOMENT_BYTES", 0)
    assert searching.step() == sure.step() and searching.micro_batch == 4
    assert torch.equal(searching.theta, sure.theta)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")


@needs_gpu
def test_slow_weights_in_pinned_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = small_replica(device="cuda")
    monkeypatch.setattr(memory_budget, "free_bytes", lambda *_: 0)
    phi, delta = memory_budget.slow_vectors(on_gpu.theta, 1.0)
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
            if replica.phase_over:
                replica.boundary()
        replica.apply(5, torch.ones(10), replica.round)
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
