"""What work on a GPU needs beside other work there: page-locked memory, copies, streams. On a CPU all of it is free.

- A copy between GPU and host is queued and waits for nobody only where the host's memory is page-locked. torch's own
  allocator of such memory rounds up to a power of two, so long vectors are ordinary memory that the driver was told of:
  exactly their size, and kept for the next one, because telling the driver takes a second for some GB.
- What a thread queues on its stream is in order on that stream alone. Where another stream is to read it, an event is
  recorded behind it, and that stream waits for the event; no thread does.
- torch gives memory back to the stream that it was made on, so another stream that uses it says so (`keep`).
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[Any]

log = logging.getLogger(__name__)

SOON = -1
"""Priority of a stream whose work is short: it does not queue up behind an inner step's."""


# ---- page-locked memory ----------------------------------------------------------------------------------------------
def pinned(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Host memory that is not set, page-locked where there is a GPU and the driver allows so much of it."""
    if not torch.cuda.is_available() or not elements:
        return torch.empty(elements, dtype=dtype)
    memory = np.empty(elements * dtype.itemsize, np.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    if runtime.cudaHostRegister(address, memory.nbytes, 0) == runtime.cudaError.success:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory).view(dtype)


class Reused:
    """Host memory for one vector at a time, again and again: while the last one is in use, a further one is made. New
    memory takes a CPU as long as the vector's arithmetic, since the system fills it with zeros."""

    def __init__(self, elements: int, make: Callable[[int], Tensor] = pinned, *, spare: bool = True) -> None:
        """`spare`: after two were in use, both are kept; else the first one goes when nothing refers to it."""
        self._elements, self._make, self._spare = elements, make, spare
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Free again when nothing refers to it or to a part of it."""
        if not self._free and not self._spare:
            self._free = []  # what is in use comes back to the list before, which nobody reads
        memory = self._free.pop() if self._free else self._make(self._elements)
        lent = memory.numpy()[:]
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent)


# ---- copies ----------------------------------------------------------------------------------------------------------
def to_host(*tensors: Tensor) -> list[Array]:
    """On the CPU, for reading; the calling thread waits once for all that it has queued so far."""
    copies = [_on_its_way(tensor) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [copy.numpy() for copy in copies]


def _on_its_way(tensor: Tensor) -> Tensor:
    """To the host; the same where it is there already."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_device(given: Array | Tensor, device: torch.device) -> Tensor:
    """From the CPU. Waits for nothing; on a CPU it is the same memory."""
    tensor = given if isinstance(given, Tensor) else torch.from_numpy(given)
    if device.type == "cpu":
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return held.to(device, non_blocking=True)


class Reading:
    """Some numbers on their way to the host: the calling thread may do something else until it reads them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = _on_its_way(numbers)
        self._there = record(numbers.device)

    def is_there(self) -> bool:
        """Whether `read` waits for nothing."""
        return self._there is None or bool(self._there.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """Waits for what was queued before it was made, and for nothing later."""
        reach(self._there)
        numbers: list[float] = self._numbers.tolist()
        return numbers


# ---- streams ---------------------------------------------------------------------------------------------------------
def side_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """A stream for short work beside the device's other work."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=SOON)  # type: ignore[no-untyped-call]


def on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[Any]:
    """What this thread queues goes to that stream."""
    return torch.cuda.stream(stream) if stream else nullcontext()


def record(device: torch.device, *, sleeps: bool = False) -> "torch.cuda.Event | None":
    """An event behind all that this thread has queued on the device. `sleeps`: as a thread does that waits for it."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait(event: "torch.cuda.Event | None", device: torch.device) -> None:
    """What this thread queues on the device from now on comes after the event. The thread itself goes on."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def reach(event: "torch.cuda.Event | None") -> None:
    """The thread waits for the event: before it reads what a GPU writes into host memory."""
    if event is not None:
        event.synchronize()


@contextmanager
def lent(device: torch.device) -> Iterator[None]:
    """Around the time in which another thread works on the device, on its default stream: that comes after what this
    thread has queued so far, and what this thread queues from then on comes after that."""
    if device.type != "cuda":
        yield
        return
    ours, theirs = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    theirs.wait_stream(ours)
    yield
    ours.wait_stream(theirs)


def keep(tensors: Iterable[Tensor]) -> None:
    """What this thread has queued so far uses them, though they were made on another stream: their memory is not given
    to anybody before."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


# ---- kernels ---------------------------------------------------------------------------------------------------------
def kernels(module: str, otherwise: str) -> Any:
    """That module of Triton's kernels, whose `try_out` has built some, which takes seconds; None where Triton does not
    work, and then the log says what plain torch does `otherwise`. Raises OutOfMemoryError: another time it works."""
    try:
        found = import_module(module)
        found.try_out()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (Triton, its compilers and its driver raise everything)
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        log.warning("%s by plain torch, which is slower: Triton does not work here (%s)", otherwise, why)
        return None
    return found
