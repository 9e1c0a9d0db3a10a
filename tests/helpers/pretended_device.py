"""A pretended GPU: CPU tensors that say they are on `cuda:0`, so that code for a GPU runs, and is watched, without one.

    with pretended_gpu() as gpu, gpu.watching() as seen:
        replica.step()
    seen.waits, seen.copies, gpu.races

What it checks and counts:
- An operation on tensors of both devices fails, except where torch allows it (a number of no dimension beside a GPU's
  tensors; a copy).
- `copies`: each copy between the devices, with its direction, bytes, and whether the host's memory was page-locked and
  the thread waited. `waits`: each time that a thread waited for the GPU: such a copy, `item`, `tolist`, `nonzero`, a
  mask as an index, `synchronize`. Both say by which line of noloco_node or transformers.
- `races`: a stream, or the host, that uses memory of which another stream has queued a use, and has not waited for it;
  and memory that goes back to its stream while another one may still use it (`record_stream` is missing). Each stream
  counts what was queued on it; an event holds these numbers, and so does what a stream has waited for.
- How much memory the GPU's tensors take, and that they get no more than there is.

It holds in the thread that enters it and in all threads that are started while it is open, and nothing stays patched.

What it does not cover: what an operation takes inside itself (memory, temporary tensors, a hidden wait of a library);
which operations a GPU runs in bf16 (autocast for `cuda` becomes that for `cpu`, whose list is a little different) and
its rounding; host memory that is read or written through numpy, after `.numpy()` has checked it; CUDA graphs, Triton
(without a driver the kernels are those of core/kernels/reference.py), torch.compile, several GPUs; time.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import noloco_node
from noloco_node.core.kernels import for_device
from noloco_node.core.kernels.reference import constants

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PLACES = {"noloco_node": noloco_node, "transformers": transformers}
FOLDERS = [(name, str(Path(str(module.__file__)).parent)) for name, module in PLACES.items()]
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
"""Operations that wait for the GPU, as the CPU has to know their result or its size."""

_real_device: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__


# ---- what was seen ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Copy:
    to_gpu: bool
    bytes: int
    pinned: bool
    """Whether the host's memory was page-locked."""
    waited: bool
    where: str
    thread: str
    within: frozenset[str]
    """The functions of noloco_node that were under way."""


@dataclass(frozen=True)
class Wait:
    what: str
    where: str
    thread: str
    within: frozenset[str]


@dataclass
class Seen:
    copies: list[Copy] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def on(self, thread: str, within: str = "") -> "Seen":
        """By the threads whose name begins so, in this function of noloco_node."""

        def ours(each: Copy | Wait) -> bool:
            return each.thread.startswith(thread) and (not within or within in each.within)

        return Seen([copy for copy in self.copies if ours(copy)], [wait for wait in self.waits if ours(wait)])

    def bytes(self, to_gpu: bool) -> int:
        return sum(copy.bytes for copy in self.copies if copy.to_gpu == to_gpu)

    @property
    def pageable(self) -> int:
        """Bytes of the largest copy from or to memory that is not page-locked."""
        return max((copy.bytes for copy in self.copies if not copy.pinned), default=0)


# ---- order: streams, events, memory ----------------------------------------------------------------------------------
Clock = dict[Any, int]
"""Of each stream, how many of the operations queued on it are known to be done before what comes now."""


def _merge(into: Clock, clock: Clock) -> None:
    for stream, count in clock.items():
        into[stream] = max(into.get(stream, 0), count)


class Stream:
    gpu: "PretendedGpu"
    device = CUDA

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.clock: Clock = {}
        self.priority = priority

    def wait_event(self, event: "Event") -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        _merge(self.clock, other.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self.gpu.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.waited("synchronize", self.clock)

    def query(self) -> bool:
        self.gpu.reached(self.clock)
        return True


class Event:
    gpu: "PretendedGpu"

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.clock: Clock = {}
        self._timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.clock, self.at = dict((stream or self.gpu.stream).clock), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.waited("synchronize", self.clock)

    def query(self) -> bool:
        """The GPU is as quick as it can be."""
        self.gpu.reached(self.clock)
        return True

    def elapsed_time(self, end: "Event") -> float:
        if not (self._timing and end._timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        return 1000 * (end.at - self.at)


@dataclass(slots=True)
class _Use:
    begin: int
    end: int
    stream: Stream
    writes: bool
    count: int
    """Of its stream's operations."""
    where: str


class _Memory:
    """Of one tensor or more on the pretended GPU; an attribute of their storage, so it is deleted with that."""

    def __init__(self, gpu: "PretendedGpu", size: int) -> None:
        self.gpu, self.size, self.stream = gpu, size, gpu.stream
        self.uses: list[_Use] = []
        self.kept_for: set[Stream] = set()
        """By `record_stream`."""

    def __del__(self) -> None:
        self.gpu.freed(self)


class PretendedGpu:
    def __init__(self, total_bytes: int, capability: tuple[int, int]) -> None:
        self.races: list[str] = []
        self.allocated = self.peak = 0
        self.chosen: dict[str, int] = {}
        """By a thread's name, which GPU it has chosen."""
        self.host: Clock = {}
        """What the host has waited for. All threads count as one: what one of them knows, the others do."""
        self.total_bytes, self.allowed_bytes, self.capability = total_bytes, total_bytes, capability
        self.open = True
        self._seen: list[Seen] = []
        self._lock = threading.RLock()  # memory may be freed at any moment, also while it is held
        self.Stream, self.event = type("Stream", (Stream,), {"gpu": self}), type("Event", (Event,), {"gpu": self})
        self._default: Stream = self.Stream()
        self._all: Clock = {}
        """What was queued on any stream."""
        self._of_thread = threading.local()
        self._queued: list[_Use] = []
        """Of host memory, by copies that the host has not waited for; by address."""
        self._locked: dict[int, int] = {}
        """Page-locked host memory: address -> bytes."""

    # ---- what a test reads ----
    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """What all threads do from here on, until the end of the block."""
        seen = Seen()
        self._seen.append(seen)
        try:
            yield seen
        finally:
            self._seen.remove(seen)

    # ---- streams ----
    @property
    def stream(self) -> Stream:
        """The calling thread's current one."""
        return getattr(self._of_thread, "stream", self._default)

    def set_stream(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.stream
        self.set_stream(stream or before)
        try:
            yield
        finally:
            self.set_stream(before)

    def reached(self, clock: Clock) -> None:
        """The host knows that so much is done."""
        with self._lock:
            _merge(self.host, clock)
            self._queued = [use for use in self._queued if self.host.get(use.stream, 0) < use.count]

    def waited(self, what: str, clock: Clock | None = None) -> None:
        """The calling thread waits for what was queued on its stream, or for `clock`."""
        self.reached(self.stream.clock if clock is None else clock)
        for seen in self._seen:
            seen.waits.append(Wait(what, _where(), threading.current_thread().name, _within()))

    # ---- memory ----
    def place(self, tensor: Tensor) -> Tensor:
        """On the GPU from now on."""
        storage = tensor.untyped_storage()
        if not hasattr(storage, "memory"):
            size = -(-storage.nbytes() // 512) * 512
            with self._lock:
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
                storage.memory = _Memory(self, size)
            if self.allocated > self.allowed_bytes:
                raise torch.OutOfMemoryError(f"{self.allocated} bytes of {self.allowed_bytes} on the pretended GPU")
        return tensor

    def freed(self, memory: _Memory) -> None:
        """Its stream may use it for something else at once."""
        with self._lock:
            self.allocated -= memory.size
            for use in memory.uses:
                known = max(memory.stream.clock.get(use.stream, 0), self.host.get(use.stream, 0))
                if use.stream is not memory.stream and use.stream not in memory.kept_for and known < use.count:
                    self._race(f"memory is freed while another stream may use it, without record_stream: {use.where}")

    def lock_pages(self, address: int, size: int, _flags: int = 0) -> int:
        self._locked[address] = size
        return 0

    def unlock_pages(self, address: int) -> int:
        size = self._locked.pop(address)
        if any(use.begin < address + size and address < use.end for use in self._queued):
            self._race("page-locked memory is given back while a copy may use it")
        return 0

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in list(self._locked.items()))

    def pin(self, tensor: Tensor) -> Tensor:
        """As torch does it: it knows which copies use this memory, and keeps it for them."""
        storage = tensor.untyped_storage()
        self.lock_pages(storage.data_ptr(), storage.nbytes())
        storage.pinned = _Pinned(self, storage.data_ptr())
        return tensor

    def unpin(self, address: int) -> None:
        with self._lock:
            end = address + self._locked.pop(address, 0)
            self._queued = [use for use in self._queued if not address <= use.begin < end]

    # ---- operations ----
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of ATen's operations, on tensors of any device."""
        tensors = _tensors(args) + _tensors(kwargs.values())
        on_gpu = [tensor for tensor in tensors if _on_gpu(tensor)]
        _, name = func._schema.name.split("::")
        if name == "copy_" and _on_gpu(args[0]) != _on_gpu(args[1]):
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            with self._crossing(args[1], args[0], non_blocking):
                return func(*args, **kwargs)
        written, is_view = _schema(func)
        changed = _tensors([args[place] if place < len(args) else kwargs.get(known_as) for place, known_as in written])
        if not on_gpu:
            if not is_view:
                self._by_host(tensors, changed)
            return func(*args, **kwargs)
        self._refuse_mixed(name, args, tensors)
        result = func(*args, **kwargs)
        made = [tensor for tensor in _tensors([result]) if not _on_gpu(tensor)]
        for tensor in made:
            self.place(tensor)
        if not is_view:
            self._queue(on_gpu, changed + made)
        if name in WAITING or (name in {"index", "index_put", "index_put_", "_index_put_impl_"} and _has_mask(args[1])):
            self.waited(name)
        return result

    def _refuse_mixed(self, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        numbers = name not in {"cat", "stack"}  # that may lie on the CPU
        strange = [tensor for tensor in tensors if not _on_gpu(tensor) and not (numbers and tensor.dim() == 0)]
        if strange and name.startswith("index") and _on_gpu(args[0]):  # torch copies indices, and waits
            for tensor in strange:
                self._copied(tensor, to_gpu=True, waited=True)
        elif strange:
            sizes = ", ".join(f"{'cuda:0' if _on_gpu(tensor) else 'cpu'} {tuple(tensor.shape)}" for tensor in tensors)
            raise RuntimeError(f"{name} at {_where()}: expected all tensors to be on the same device, found {sizes}")

    def _queue(self, read: list[Tensor], written: list[Tensor]) -> None:
        """An operation on the current stream."""
        with self._lock:
            stream, where = self.stream, _where()
            _merge(stream.clock, self.host)
            stream.clock[stream] = self._all[stream] = stream.clock.get(stream, 0) + 1
            for tensor, writes in [(t, False) for t in read] + [(t, True) for t in written]:
                if tensor.numel():
                    uses = tensor.untyped_storage().memory.uses if _on_gpu(tensor) else self._queued
                    self._use(uses, _Use(*_span(tensor), stream, writes, stream.clock[stream], where))

    def _use(self, before: list[_Use], use: _Use) -> None:
        """In order after all that it depends on, or a race."""
        left = []
        for other in before:
            known = use.stream.clock.get(other.stream, 0) >= other.count
            if not known and other.begin < use.end and use.begin < other.end and (use.writes or other.writes):
                verb = "writes" if other.writes else "reads"
                self._race(f"{use.where} uses memory that another stream still {verb}: {other.where}")
            inside = use.begin <= other.begin and other.end <= use.end
            if not (inside and known and (use.writes or (use.stream is other.stream and not other.writes))):
                left.append(other)
        before[:] = [*left, use]

    def _by_host(self, tensors: list[Tensor], changed: list[Tensor]) -> None:
        """Host memory is read or changed, at once."""
        with self._lock:
            for tensor in tensors if self._queued else ():
                (begin, end), changes = _span(tensor), any(tensor is each for each in changed)
                for use in self._queued:
                    near = begin < use.end and use.begin < end
                    if near and (use.writes or changes) and self.host.get(use.stream, 0) < use.count:
                        self._race(f"{_where()} uses host memory of a copy that may not be done: {use.where}")

    def _race(self, what: str) -> None:
        if self.open and what not in self.races:
            self.races.append(what)

    # ---- copies ----
    @contextmanager
    def _crossing(self, source: Tensor, target: Tensor, non_blocking: bool) -> Iterator[None]:
        """Around a copy between the devices."""
        to_gpu = _on_gpu(target)
        host = source if to_gpu else target
        as_it_is = host.is_contiguous() and (source.dtype == target.dtype or not to_gpu)  # else torch makes another one
        pinned = as_it_is and self.is_pinned(host)
        if not pinned:
            self._by_host([host], [] if to_gpu else [host])
        yield
        # From pageable memory the driver copies at once into its own, to such memory it waits.
        self._queue([source] if pinned or not to_gpu else [], [target] if pinned or to_gpu else [])
        self._copied(target, to_gpu, waited=not (non_blocking and (pinned or to_gpu)), pinned=pinned)

    def _copied(self, tensor: Tensor, to_gpu: bool, waited: bool, pinned: bool = False) -> None:
        size, thread = tensor.numel() * tensor.element_size(), threading.current_thread().name
        for seen in self._seen:
            seen.copies.append(Copy(to_gpu, size, pinned, waited, _where(), thread, _within()))
        if waited:
            self.waited(f"copy {'to' if to_gpu else 'from'} the GPU")

    def moved(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """`Tensor.to`"""
        if args and isinstance(args[0], Tensor):
            device, dtype = args[0].device, args[0].dtype
            non_blocking, memory_format = kwargs.get("non_blocking", False), kwargs.get("memory_format")
        else:
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        dtype = dtype or tensor.dtype
        if device is None or device.type == tensor.device.type:
            return tensor.to(dtype, copy=copy, memory_format=memory_format or torch.preserve_format)
        if device.type == "meta":
            return tensor.to(device, dtype)
        with _disable_current_modes():
            made = tensor.to(dtype, copy=True, memory_format=memory_format or torch.preserve_format)
        if device.type == "cuda":
            self.place(made)
        elif non_blocking:  # torch makes such a copy in page-locked memory
            self.pin(made)
        with self._crossing(tensor, made, non_blocking):
            return made

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of torch's functions: those that name a device, or leave torch."""
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor):
            tensor, *rest = args
            match name:
                case "to":
                    return self.moved(tensor, *rest, **kwargs)
                case "cpu" | "cuda":
                    return self.moved(tensor, torch.device(name), non_blocking=kwargs.get("non_blocking", False))
                case "pin_memory" | "__deepcopy__" if name == "pin_memory" or _on_gpu(tensor):
                    return self.pin(tensor.clone()) if name == "pin_memory" else tensor.clone()
                case "is_pinned":
                    return not _on_gpu(tensor) and self.is_pinned(tensor)
                case "numpy" | "__array__" | "tolist":
                    tensor = self._leaving(name, tensor)
        if kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        return self._made(func, name, args, kwargs) if kwargs.get("device") else func(*args, **kwargs)

    def _leaving(self, name: str, tensor: Tensor) -> Tensor:
        """Somebody reads its memory without torch."""
        if not _on_gpu(tensor):
            self._by_host([tensor], [tensor] if name == "numpy" else [])
        elif name == "tolist":
            self.moved(tensor, CPU)
        else:
            raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")
        return tensor

    def _made(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By a function that is told the device."""
        kind = torch.device(kwargs["device"]).type
        if kind == "meta":
            return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and _on_gpu(args[0]) and kind == "cpu":
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])  # torch.empty_like(there, device="cpu")
        result = func(*args, **{**kwargs, "device": CPU})
        if isinstance(result, Tensor) and kind == "cuda" and not _on_gpu(result):
            self._queue([], [self.place(result)])
            if name in {"tensor", "as_tensor", "asarray"}:
                self._copied(result, to_gpu=True, waited=True)
        return result

    # ---- torch.cuda ----
    def functions(self) -> dict[str, Any]:
        """What torch.cuda has of it."""
        major, minor = self.capability
        properties = SimpleNamespace(
            total_memory=self.total_bytes, name="NVIDIA H100", major=major, minor=minor, multi_processor_count=132
        )

        def allow(fraction: float, _device: object = None) -> None:
            self.allowed_bytes = int(fraction * self.total_bytes)

        def reset_peak(_device: object = None) -> None:
            self.peak = self.allocated

        def synchronize(_device: object = None) -> None:
            self.waited("synchronize", self._all)

        def set_device(device: int) -> None:
            self.chosen[threading.current_thread().name] = device

        runtime = SimpleNamespace(
            cudaError=SimpleNamespace(success=0), cudaHostRegister=self.lock_pages, cudaHostUnregister=self.unlock_pages
        )
        return {
            "Stream": self.Stream,
            "Event": self.event,
            "stream": self.on_stream,
            "set_stream": self.set_stream,
            "current_stream": lambda _device=None: self.stream,
            "default_stream": lambda _device=None: self._default,
            "synchronize": synchronize,
            "cudart": lambda: runtime,
            "is_available": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: including_emulation or self.capability >= (8, 0),
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": set_device,
            "device": lambda _device: nullcontext(),
            "get_device_name": lambda _device=None: properties.name,
            "get_device_capability": lambda _device=None: self.capability,
            "get_device_properties": lambda _device=None: properties,
            "mem_get_info": lambda _device=None: (self.total_bytes - self.allocated, self.total_bytes),
            "memory_allocated": lambda _device=None: self.allocated,
            "memory_reserved": lambda _device=None: self.allocated,
            "max_memory_allocated": lambda _device=None: self.peak,
            "max_memory_reserved": lambda _device=None: self.peak,
            "reset_peak_memory_stats": reset_peak,
            "set_per_process_memory_fraction": allow,
            "empty_cache": lambda: None,
            "get_rng_state": lambda _device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, _device=None: torch.set_rng_state(state),
        }


class _Pinned:
    """An attribute of a page-locked storage, deleted with it."""

    def __init__(self, gpu: PretendedGpu, address: int) -> None:
        self._gpu, self._address = gpu, address

    def __del__(self) -> None:
        self._gpu.unpin(self._address)


# ---- tensors ---------------------------------------------------------------------------------------------------------
def _on_gpu(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return _real_device(tensor).type == "cpu" and hasattr(tensor.untyped_storage(), "memory")


def _device(tensor: Tensor) -> torch.device:
    return CUDA if _on_gpu(tensor) else _real_device(tensor)


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    tensor.untyped_storage().memory.kept_for.add(stream)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    begin = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach + 1) * tensor.element_size() if tensor.numel() else begin


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """All that there are, in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


@cache
def _schema(func: Any) -> tuple[list[tuple[int, str]], bool]:
    """Place and name of the arguments that an operation writes to; whether its result is a view."""
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [
        (place, each.name) for place, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write
    ]
    return written, any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in {torch.bool, torch.uint8} for index in indices)


def _where() -> str:
    """The innermost line of transformers or noloco_node, and of noloco_node."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if name := _name(frame.f_code.co_filename):
            found.append(f"{name}:{frame.f_lineno}")
            if name.startswith("noloco_node"):
                break
        frame = frame.f_back
    return " < ".join([found[0], *found[1:][-1:]]) if found else "a test"


def _within() -> frozenset[str]:
    frame, found = sys._getframe(1), set()
    while frame is not None:
        if (_name(frame.f_code.co_filename) or "").startswith("noloco_node"):
            found.add(frame.f_code.co_name)
        frame = frame.f_back
    return frozenset(found)


@cache
def _name(file: str) -> str | None:
    """Of a file of theirs."""
    return next((name + file.removeprefix(folder) for name, folder in FOLDERS if file.startswith(folder)), None)


# ---- entering it -----------------------------------------------------------------------------------------------------
class _Operations(TorchDispatchMode):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.call(func, args, dict(kwargs or {}))


@contextmanager
def pretended_gpu(total_bytes: int = 80 << 30, capability: tuple[int, int] = (9, 0)) -> Iterator[PretendedGpu]:
    gpu = PretendedGpu(total_bytes, capability)
    real_run, real_groups = threading.Thread.run, torch._C._group_tensors_by_device_and_dtype
    enabled, kind = torch.is_autocast_enabled, torch.get_autocast_dtype

    def entered() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(_Functions(gpu))
        stack.enter_context(_Operations(gpu))  # modes are a thread's own
        return stack

    def run(thread: threading.Thread) -> None:
        with entered():
            real_run(thread)

    def groups(lists: Any, with_indices: bool = False) -> Any:
        found = real_groups(lists, with_indices)
        return {(_device(some[0][0]), dtype): (some, places) for (_, dtype), (some, places) in found.items()}

    def near(device_type: str) -> str:
        return "cpu" if device_type == "cuda" else device_type

    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(near(device_type), *args, **kwargs)

    patches = [(torch.cuda, name, function) for name, function in gpu.functions().items()]
    # as a torch without CUDA says it: one with CUDA would have AdamW ask the driver
    patches += [(torch.accelerator, "current_accelerator", lambda check_available=False: None)]
    patches += [
        (torch.Tensor, "device", property(_device)),
        (torch.Tensor, "is_cuda", property(_on_gpu)),
        (torch.Tensor, "is_cpu", property(lambda tensor: _device(tensor).type == "cpu")),
        (torch.Tensor, "record_stream", _record_stream),
        (torch, "autocast", Autocast),
        (torch, "is_autocast_enabled", lambda device_type="cuda": enabled(near(device_type))),
        (torch, "get_autocast_dtype", lambda device_type: kind(near(device_type))),
        (torch._C, "_group_tensors_by_device_and_dtype", groups),
        (threading.Thread, "run", run),
    ]
    _forget_kernels()
    with pytest.MonkeyPatch.context() as patch, entered():
        for owner, name, value in patches:
            patch.setattr(owner, name, value)
        try:
            yield gpu
        finally:
            gpu.open = False
            _forget_kernels()


def _forget_kernels() -> None:
    """Which ones a GPU has, and the tables that lie there."""
    for_device.cache_clear()
    constants.cache_clear()
