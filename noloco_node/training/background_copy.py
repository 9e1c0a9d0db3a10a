"""Copies of tensors as they were at one moment, in host memory or in a file, made while training goes on.

`begin` is called at the moment. From then on threads of the copy's own read it piece by piece, and who is about to
change tensors calls `secure` first: that reads beside those threads what is missing of them, and waits until it has
been read. θ and AdamW's moments change where an inner step ends, φ and δ at boundaries and where corrections are added,
so a copy is made behind forward and backward passes. No thread waits for anything but a piece that is being read, so a
copy becomes whole in a pause too, and whatever the training thread does.

On a GPU:
- What training has queued there by the moment must be over before a piece is read, also one of φ and δ in host memory,
  which the GPU writes: an event is recorded at the moment, and whoever reads waits for it.
- A piece crosses into a page-locked buffer on the buffer's own stream, beside training's kernels (torch's side streams
  do not wait for the default one), and goes on to ordinary memory. Whoever reads waits on the host until it has
  crossed. A piece that was read is therefore safe from everything that is queued later, on any stream, and no stream
  waits for another.
- A piece holds its tensor until it is read. So one that training has dropped meanwhile goes back to torch's allocator
  when nothing reads it any more, and `record_stream` is not needed.

The memory of a copy is new each time and goes back to the system with it: kept, it would be 20 bytes a parameter for
ever. Where there is none for it, a copy goes to a file without a name, which the system keeps in memory as far as there
is room. Knows nothing of what the tensors are.
"""

import mmap
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from noloco_node.base import atomic_files, units
from noloco_node.core import gpu
from noloco_node.errors import OutOfMemory

PIECE_BYTES = 16 << 20
"""Read at once: a millisecond across PCIe, some between host memories. Longer ones would hold up a correction."""
BUFFERS = 4
"""On a GPU: page-locked buffers of a piece, and threads. The device is quicker than one thread that fills new memory.
On a CPU one thread reads: training needs the cores."""
HUGE_BYTES = 4 << 20
"""From here on, memory is asked for in pages of 2 MiB: to fill new pages of 4 kB takes more than twice as long."""

_ALIGNED = 64
"""Bytes at whose multiples a tensor in a file begins, for its type and for the processor."""

T = TypeVar("T")


def host_memory(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """New memory, which nobody has written yet."""
    size = prod(shape) * dtype.itemsize
    if size < HUGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(f"a copy of the state needs {units.size(size)} that are not free") from error
    with suppress(AttributeError, OSError):  # a system without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class FileMemory:
    """A file without a name, in which tensors are written by system calls and read as memory. So a full disk is an
    error, while what is written takes none of the process's memory. Raises DiskFull, UsageError."""

    def __init__(self, folder: Path, size: int) -> None:
        """`size`: bytes of all its tensors."""
        self._folder = folder
        with self._writing(), tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size := max(1, size))
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._end = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The next part of it, whose whole is to be written."""
        start, self._end = self._end, self._end + prod(shape) * dtype.itemsize
        part = self._bytes[start : self._end].view(dtype).view(tuple(shape))
        self._end += -self._end % _ALIGNED
        return part

    @staticmethod
    def size(nbytes: Iterable[int]) -> int:
        """Of a file for tensors of so many bytes each."""
        return sum(each + -each % _ALIGNED for each in nbytes)

    def put(self, into: Tensor, source: Tensor) -> None:
        """`into`: a part of what was taken."""
        at, data = into.data_ptr() - self._bytes.data_ptr(), _bytes(source).data
        with self._writing():
            while data:
                written = os.pwrite(self._file, data, at)
                at, data = at + written, data[written:]

    def _writing(self) -> AbstractContextManager[None]:
        return atomic_files.writing(f"a copy of the state into {self._folder}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor, and the host memory that it is copied into: contiguous, and of the same type and size."""

    source: Tensor
    into: Tensor
    file: FileMemory | None = None
    """Where `into` is a part of it."""

    def put(self, into: Tensor, source: Tensor) -> None:
        """A part of both, on the CPU. numpy copies on one core, however many torch may use."""
        if self.file:
            self.file.put(into, source)
        else:
            np.copyto(_bytes(into), _bytes(source))


@dataclass(frozen=True, slots=True)
class _Piece:
    pair: Pair
    start: int
    """In elements of the tensor."""
    end: int
    begun: threading.Lock = field(default_factory=threading.Lock)
    """Acquired for ever by who reads it."""
    read: "Future[None]" = field(default_factory=Future)


class _Copy:
    def __init__(
        self, parts: Mapping[str, Sequence[Pair]], answer: "Future[Any]", moment: "torch.cuda.Event | None"
    ) -> None:
        self.answer = weakref.ref(answer)  # who asked holds what is in it, for as long as he wants
        self.threads: list[threading.Thread] = []
        self._moment = moment
        self.pieces = {name: tuple(piece for pair in pairs for piece in _cut(pair)) for name, pairs in parts.items()}
        """By part. Replaced as a whole, by none, when all are read: then the asker alone holds the memory."""

    def missing(self, part: str, start: int, end: int | None) -> list[_Piece]:
        """That are not read yet."""
        return [
            piece
            for piece in self.pieces.get(part, ())
            if start < piece.end and (end is None or piece.start < end) and not piece.read.done()
        ]

    def read(self, pieces: Iterable[_Piece], read: Callable[[_Piece], None]) -> None:
        """Those that no other thread has begun."""
        for piece in pieces:
            if piece.begun.acquire(blocking=False):
                try:
                    if self._moment:
                        self._moment.synchronize()
                    read(piece)
                except Exception as error:  # noqa: BLE001 - it belongs to the asker
                    piece.read.set_exception(error)
                else:
                    piece.read.set_result(None)

    def read_all(self, read: Callable[[_Piece], None]) -> None:
        self.read(chain.from_iterable(self.pieces.values()), read)

    def fault(self) -> BaseException | None:
        """Waits until all are read."""
        faults = [piece.read.exception() for piece in chain.from_iterable(self.pieces.values())]
        return next(filter(None, faults), None)


class _Buffer:
    """The way off a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._memory = gpu.pinned(PIECE_BYTES, torch.uint8)
        self._stream = gpu.side_stream(device)
        self._crossed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def read(self, source: Tensor) -> Tensor:
        """The same in host memory, until the next call."""
        near = self._memory[: source.nbytes].view(source.dtype)
        with gpu.on(self._stream):
            near.copy_(source, non_blocking=True)
            self._crossed.record()
        self._crossed.synchronize()
        return near


class Copies:
    """The copies under way of one owner's tensors. Its thread calls all methods."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where the owner computes."""
        self._device = device
        self._under_way: list[_Copy] = []
        self._buffers: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._has_buffers = False
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around the time for which `secure` holds its caller up."""

    def begin(self, parts: Mapping[str, Sequence[Pair]], result: T) -> "Future[T]":
        """Copy the tensors as they are now; those that change first come first. The future has `result` when all of it
        is in host memory, or what was raised."""
        answer: Future[T] = Future()
        copy = _Copy(parts, answer, self._moment())
        self._under_way = [*(other for other in self._under_way if other.pieces), copy]
        others = [partial(copy.read_all, self._read)] * (BUFFERS - 1 if self._has_buffers else 0)
        copy.threads = [self._start(work) for work in (partial(self._finish, copy, answer, result), *others)]
        return answer

    def under_way(self, *parts: str) -> "Future[Any] | None":
        """What `begin` returned for a copy of just these parts that is not whole yet."""
        return next((copy.answer() for copy in self._under_way if copy.pieces.keys() == {*parts}), None)

    def secure(self, part: str, start: int = 0, end: int | None = None) -> None:
        """Called before these elements of the part's tensors change."""
        missing = [(copy, pieces) for copy in self._under_way if (pieces := copy.missing(part, start, end))]
        if missing:
            with self.waiting():
                for copy, pieces in missing:
                    copy.read(pieces, self._read)
                for piece in (piece for _, pieces in missing for piece in pieces):
                    piece.read.exception()  # waits for a thread that had begun it

    def complete(self) -> None:
        """Wait until all are whole."""
        for copy in self._under_way:
            copy.read_all(self._read)
            for thread in copy.threads:
                thread.join()
        self._under_way = []

    def _moment(self) -> "torch.cuda.Event | None":
        if self._device.type != "cuda":
            return None
        if not self._has_buffers:
            for _ in range(BUFFERS):
                self._buffers.put(_Buffer(self._device))
            self._has_buffers = True
        moment = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        moment.record(torch.cuda.current_stream(self._device))
        return moment

    @staticmethod
    def _start(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="copy", daemon=True)
        thread.start()
        return thread

    def _finish(self, copy: _Copy, answer: "Future[T]", result: T) -> None:
        """The first of the copy's threads."""
        copy.read_all(self._read)
        fault = copy.fault()
        copy.pieces = {}
        if fault:
            answer.set_exception(fault)
        else:
            answer.set_result(result)

    def _read(self, piece: _Piece) -> None:
        """On any thread; others run meanwhile."""
        source, into = (
            tensor.detach().view(-1)[piece.start : piece.end] for tensor in (piece.pair.source, piece.pair.into)
        )
        if not source.is_cuda:
            piece.pair.put(into, source)
            return
        buffer = self._buffers.get()  # another thread puts one back within a piece
        try:
            piece.pair.put(into, buffer.read(source))
        finally:
            self._buffers.put(buffer)


def _cut(pair: Pair) -> Iterator[_Piece]:
    each = PIECE_BYTES // pair.source.itemsize
    for start in range(0, pair.source.numel(), each):
        yield _Piece(pair, start, min(start + each, pair.source.numel()))


def _bytes(flat: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Of any type: numpy knows fewer types than torch."""
    return flat.view(torch.uint8).numpy()
