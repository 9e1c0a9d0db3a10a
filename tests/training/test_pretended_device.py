"""The pretended GPU of tests/helpers: it fails where a GPU would, and counts what a GPU would do."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pretended_device import PretendedGpu, pretended_gpu
from torch import Tensor, nn

CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


def made(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


# ---- devices ---------------------------------------------------------------------------------------------------------
def test_tensors_say_where_they_are(gpu: PretendedGpu) -> None:
    there, here = made(4), torch.ones(4)
    assert there.is_cuda and there.device == torch.device("cuda", 0) and not there.is_cpu
    assert not here.is_cuda and here.device == CPU
    for same in (there[1:], there.view(2, 2), there + 1, there.clone(), torch.zeros_like(there), copy.deepcopy(there)):
        assert same.is_cuda
    for back in (there.cpu(), there.to("cpu"), there.to(here), torch.empty_like(there, device="cpu")):
        assert back.device == CPU
    assert here.to("cuda", torch.float64).dtype == torch.float64
    assert here.to(there).is_cuda and here.cuda().is_cuda and torch.tensor([1], device="cuda:0").is_cuda


@pytest.mark.parametrize(
    "mixed",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.cat([there[None, 0], here[0:1]]),
        lambda there, here: here.add_(there),
        lambda there, here: torch.stack([there[0], here[0]]),
        lambda there, here: here @ there,
        lambda there, here: torch._foreach_add_([there, there], [there, here]),
        lambda there, here: here + there[0],
    ],
)
def test_operations_on_both_devices_fail(gpu: PretendedGpu, mixed: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=r"same device, found .*(cuda:0.*cpu|cpu.*cuda:0)"):
        mixed(made(4), torch.ones(4))
    with pytest.raises(TypeError, match="numpy"):
        made(4).numpy()


def test_a_number_may_lie_on_the_cpu(gpu: PretendedGpu) -> None:
    with gpu.watching() as seen:
        assert (made(4) * torch.tensor(2.0)).is_cuda
    assert not seen.waits and not seen.copies


def test_a_module_trains_on_it(gpu: PretendedGpu) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    there = copy.deepcopy(here).to("cuda")
    losses = []
    for module, device in ((here, "cpu"), (there, "cuda")):
        descent = torch.optim.AdamW(module.parameters(), fused=True)
        for _ in range(3):
            descent.zero_grad()
            loss = module(torch.ones(2, 4, device=device)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            descent.step()
        losses.append(loss.item())
        assert all(p.is_cuda == p.grad.is_cuda == (device == "cuda") for p in module.parameters() if p.grad is not None)
    assert losses[0] == losses[1]


def test_products_are_in_bf16_where_autocast_says_so(gpu: PretendedGpu) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        product = made(2, 4) @ made(4, 2)
        assert torch.is_autocast_enabled("cuda")
    assert product.dtype == torch.bfloat16 and product.is_cuda
    with torch.autocast("cuda", torch.bfloat16, enabled=False):
        assert (made(2, 4) @ made(4, 2)).dtype == torch.float32


def test_nothing_stays_patched() -> None:
    def patched() -> list[object]:
        cuda, tensor = torch.cuda, torch.Tensor
        return [cuda.is_available, cuda.Stream, cuda.stream, torch.autocast, threading.Thread.run, tensor.device]

    before = patched()
    with pytest.raises(ZeroDivisionError), pretended_gpu() as gpu:
        there = made(4)
        assert patched() != before
        raise ZeroDivisionError
    assert patched() == before
    assert there.device == torch.ones(1).device == CPU and "device" not in torch.Tensor.__dict__
    del there
    assert gpu.allocated == 0


def test_threads_that_are_started_inside_see_it_too(gpu: PretendedGpu) -> None:
    with gpu.watching() as seen, ThreadPoolExecutor(1, "other") as pool:
        there = pool.submit(made, 4).result()
        assert pool.submit(lambda: float(there.sum())).result() == 4
    assert [wait.thread for wait in seen.waits] == ["other_0"]
    assert len(seen.on("other").waits) == 1 and not seen.on("training").waits


# ---- copies and waits ------------------------------------------------------------------------------------------------
def pinned(size: int) -> Tensor:
    return torch.zeros(size, pin_memory=True)


@pytest.mark.parametrize(
    ("copied", "to_gpu", "is_pinned", "waited"),
    [
        (lambda there: there.cpu(), False, False, True),
        (lambda there: there.to("cpu", non_blocking=True), False, True, False),
        (lambda there: torch.empty(4).copy_(there), False, False, True),
        (lambda there: torch.empty(4).copy_(there, non_blocking=True), False, False, True),
        (lambda there: pinned(4).copy_(there, non_blocking=True), False, True, False),
        (lambda there: pinned(9)[5:].copy_(there, False), False, True, True),
        (lambda there: there.tolist(), False, False, True),
        (lambda there: torch.ones(4).to("cuda"), True, False, True),
        (lambda there: torch.ones(4).to("cuda", non_blocking=True), True, False, False),
        (lambda there: torch.ones(4).pin_memory().to("cuda", non_blocking=True), True, True, False),
        (lambda there: there.copy_(pinned(4), non_blocking=True), True, True, False),
        (lambda there: there.copy_(pinned(4).to(torch.int32), non_blocking=True), True, False, False),
        (lambda there: there.copy_(pinned(8)[::2], non_blocking=True), True, False, False),
        (lambda there: torch.tensor([1.0] * 4, device="cuda"), True, False, True),
    ],
)
def test_copies(
    gpu: PretendedGpu, copied: Callable[[Tensor], object], to_gpu: bool, is_pinned: bool, waited: bool
) -> None:
    there = made(4)
    with gpu.watching() as seen:
        copied(there)
    (one,) = seen.copies
    assert (one.to_gpu, one.bytes, one.pinned, one.waited) == (to_gpu, 16, is_pinned, waited)
    assert len(seen.waits) == waited and seen.bytes(to_gpu) == 16 and seen.pageable == (0 if is_pinned else 16)


@pytest.mark.parametrize(
    "waits",
    [
        lambda there: there[0].item(),
        lambda there: float(there.sum()),
        lambda there: bool((there > 0).all()),
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
        lambda there: torch.equal(there, there),
        lambda there: there.masked_select(there > 0),
        lambda there: torch.cuda.synchronize(),
        lambda there: torch.cuda.current_stream().synchronize(),
        lambda there: there[torch.tensor([1])],
    ],
)
def test_waits(gpu: PretendedGpu, waits: Callable[[Tensor], object]) -> None:
    there = made(4)
    with gpu.watching() as seen:
        there.add_(1).mul(2).sum()
        torch.zeros_like(there)[1:].fill_(3)
    assert not seen.waits
    with gpu.watching() as seen:
        waits(there)
    assert len(seen.waits) == 1


# ---- order -----------------------------------------------------------------------------------------------------------
def test_a_stream_that_does_not_wait_for_another_one_is_found(gpu: PretendedGpu) -> None:
    side = torch.cuda.Stream()
    there = made(4)
    with torch.cuda.stream(side):
        there + 1
    assert "uses memory that another stream still writes" in gpu.races[0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda side, event: side.wait_event(event),
        lambda side, event: event.wait(side),
        lambda side, event: event.synchronize(),
        lambda side, event: side.wait_stream(torch.cuda.current_stream()),
        lambda side, event: torch.cuda.synchronize(),
    ],
)
def test_one_that_waits_is_in_order(gpu: PretendedGpu, wait: Callable[..., object]) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    there, untouched = made(4), made(4)
    event.record()
    untouched.add_(1)  # behind the event, elsewhere
    wait(side, event)
    with torch.cuda.stream(side):
        more = there + 1
        done = torch.cuda.current_stream().record_event()
    more.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(done)
    more.add_(1)
    there.add_(1)
    del there, more
    assert not gpu.races


def test_the_host_knows_of_all_streams_after_synchronize(gpu: PretendedGpu) -> None:
    side, held = torch.cuda.Stream(), pinned(4)
    with torch.cuda.stream(side):
        held.copy_(made(4), non_blocking=True)
    torch.cuda.synchronize()
    assert held.tolist() == [1] * 4
    assert not gpu.races


def test_what_is_read_on_one_stream_is_not_changed_on_another(gpu: PretendedGpu) -> None:
    side, there = torch.cuda.Stream(), made(4)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there[:2].clone()
    there[2:].add_(1)
    assert not gpu.races, "other elements"
    there[:2].add_(1)
    assert "still reads" in gpu.races[0]


def test_host_memory_is_read_when_the_copy_is_done(gpu: PretendedGpu) -> None:
    held, there = pinned(4), made(4)
    held[:2].copy_(there[:2], non_blocking=True)
    held[2:].numpy()
    assert not gpu.races, "other elements"
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    assert held.tolist() == [1, 1, 0, 0] and not gpu.races
    held.copy_(there, non_blocking=True)
    held.numpy()
    assert "host memory of a copy that may not be done" in gpu.races[0]


def test_host_memory_is_written_when_the_copy_from_it_is_done(gpu: PretendedGpu) -> None:
    held = pinned(4)
    held.to("cuda", non_blocking=True)
    held.sum()
    assert not gpu.races
    held.zero_()
    assert len(gpu.races) == 1


def test_memory_used_on_another_stream_is_kept_for_it(gpu: PretendedGpu) -> None:
    side = torch.cuda.Stream()
    for keep in (True, False):
        there = made(4)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there.sum()
        if keep:
            there.record_stream(side)
        del there
        assert len(gpu.races) == (not keep)
    assert "record_stream" in gpu.races[0]


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_memory_is_counted() -> None:
    with pretended_gpu(total_bytes=8192) as gpu:
        there = made(1000)
        part = there[:10]
        assert torch.cuda.memory_allocated() == 4096 and torch.cuda.mem_get_info() == (4096, 8192)
        del there
        assert torch.cuda.memory_allocated() == 4096, "a part of it is left"
        del part
        assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 4096
        with pytest.raises(torch.OutOfMemoryError):
            made(3000)
        assert gpu.allocated == 0
