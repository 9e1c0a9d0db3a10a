"""Page-locked memory and copies; streams and events are tried on the pretended GPU and on a real one."""

import gc
import weakref

import numpy as np
import pytest
import torch
from pretended_device import pretended_gpu

from noloco_node.core import gpu

CPU = torch.device("cpu")


class Driver:
    """Of a GPU that is not there: what was registered with it."""

    class cudaError:  # noqa: N801 - the driver's own name
        success = 0

    def __init__(self, allows: bool = True) -> None:
        self.allows = allows
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802
        if self.allows:
            self.registered[address] = size
        return 0 if self.allows else 1

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_pinned_memory_has_its_exact_size_and_is_given_back_with_its_last_view(driver: Driver) -> None:
    memory = gpu.pinned(1000, torch.bfloat16)
    assert memory.dtype is torch.bfloat16 and driver.registered == {memory.data_ptr(): 2000}
    part = memory[10:20]
    del memory
    gc.collect()
    assert driver.registered
    del part
    gc.collect()
    assert not driver.registered


def test_where_the_driver_refuses_it_is_ordinary_memory(driver: Driver) -> None:
    driver.allows = False
    assert gpu.pinned(10).copy_(torch.arange(10.0)).sum() == 45
    assert not driver.registered and len(gpu.pinned(0)) == 0


def test_memory_is_lent_again_when_nothing_refers_to_it(driver: Driver) -> None:
    lender = gpu.Reused(100)
    first = lender.take()
    part, where = first[:10], first.data_ptr()
    del first
    gc.collect()
    second = lender.take()
    assert second.data_ptr() != where  # a part of the first is in use
    part.fill_(1.0)
    del part
    gc.collect()
    assert lender.take().data_ptr() == where
    assert len(driver.registered) == 2  # and never registered again


def test_without_a_spare_one_what_was_lent_first_goes_once_a_further_one_was_wanted() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def make(elements: int) -> torch.Tensor:
        made.append(weakref.ref(memory := torch.empty(elements)))
        return memory

    lender = gpu.Reused(4, make, spare=False)
    first = lender.take()
    second = lender.take().fill_(1.0)
    del first
    gc.collect()
    assert [memory() is None for memory in made] == [True, False]
    del second
    gc.collect()
    assert lender.take().sum() == 4 and len(made) == 2, "the memory of the second one"


def test_what_is_lent_outlives_its_lender(driver: Driver) -> None:
    lender = gpu.Reused(4)
    gone, lent = weakref.ref(lender), lender.take().zero_()
    del lender
    gc.collect()
    assert gone() is None and lent.sum() == 0 and driver.registered


def test_on_a_cpu_nothing_is_copied_and_nothing_waits() -> None:
    tensors = torch.arange(3), torch.ones(2)
    arrays = gpu.to_host(*tensors)
    assert all(np.shares_memory(a, t.numpy()) for a, t in zip(arrays, tensors, strict=True))
    array = np.ones(4, np.float32)
    assert np.shares_memory(gpu.to_device(array, CPU).numpy(), array)
    assert gpu.side_stream(CPU) is None and gpu.record(CPU) is None
    gpu.wait(None, CPU)
    gpu.reach(None)
    gpu.keep(tensors)
    with gpu.on(None):
        pass


def test_a_loop_on_a_stream_of_its_own_takes_turns_with_the_training_thread():
    with pretended_gpu() as watched:
        theta, own = torch.zeros(8, device="cuda"), torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            theta.add_(1)
            with gpu.lent(theta.device), torch.cuda.stream(torch.cuda.default_stream()):
                theta.add_(1)
            theta.add_(1)
        assert not watched.races
        with torch.cuda.stream(own), torch.cuda.stream(torch.cuda.default_stream()):
            theta.add_(1)
        assert watched.races, "which the test would see"
