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
- Where the GPU has memory to spare, `secure` reads nothing and waits for nothing: it queues a copy of the piece on the
  GPU, behind what training has queued there, and that is read later. An inner step changes 12 bytes a parameter, which
  cross in seconds, of 1.35 G parameters 2.9 (bench/README.md), and are copied on the GPU in a thousandth of that.
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
            self._memory = mmap.mmap(file.fileno(), size)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._begins_at = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._end = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The next part of it, whose whole is to be written. It is no view of a tensor of all parts: `torch.save` would
        write all of that, and refuse parts of several types."""
        count, start = prod(shape), self._end
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        self._end += count * dtype.itemsize
        self._end += -self._end % _ALIGNED
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(tuple(shape))

    @staticmethod
    def size(nbytes: Iterable[int]) -> int:
        """Of a file for tensors of so many bytes each."""
        return sum(each + -each % _ALIGNED for each in nbytes)

    def put(self, into: Tensor, source: Tensor) -> None:
        """`into`: a part of what was taken."""
        at, data = into.data_ptr() - self._begins_at, _bytes(source).data
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


@dataclass(slots=True, eq=False)
class _Piece:
    pair: Pair
    start: int
    """In elements of the tensor."""
    end: int
    source: Tensor
    """These elements as they were at the moment: the tensor's own, or a copy on the GPU."""
    there: "torch.cuda.Event | None"
    """When they are."""
    kept: bool = False
    """Whether it is a copy, which nothing changes."""
    begun: bool = False
    read: "Future[None]" = field(default_factory=Future)

    @property
    def into(self) -> Tensor:
        return self.pair.into.view(-1)[self.start : self.end]


class _Copy:
    def __init__(
        self, parts: Mapping[str, Sequence[Pair]], answer: "Future[Any]", moment: "torch.cuda.Event | None"
    ) -> None:
        self.answer = weakref.ref(answer)  # who asked holds what is in it, for as long as he wants
        self.threads: list[threading.Thread] = []
        self._begins = threading.Lock()
        """Of `begun`, `kept` and `source` of a piece that nobody reads yet."""
        self.pieces = {
            name: tuple(piece for pair in pairs for piece in _cut(pair, moment)) for name, pairs in parts.items()
        }
        """By part. Replaced as a whole, by none, when all are read: then the asker alone holds the memory."""

    def missing(self, part: str, start: int, end: int | None) -> list[_Piece]:
        """That are not safe yet."""
        return [
            piece
            for piece in self.pieces.get(part, ())
            if start < piece.end and (end is None or piece.start < end) and not (piece.kept or piece.read.done())
        ]

    def keep(self, pieces: Iterable[_Piece], room: int) -> None:
        """Copies of those that nobody reads yet, on the GPU that they are on, of at most so many bytes."""
        with self._begins:
            kept = []
            with suppress(torch.OutOfMemoryError):
                for piece in pieces:
                    if piece.begun or not piece.source.is_cuda:
                        continue
                    if (room := room - piece.source.nbytes) < 0:
                        break
                    kept.append((piece, piece.source.clone()))
            if kept:
                there = gpu.record(kept[0][1].device, sleeps=True)
                for piece, copy in kept:
                    piece.source, piece.kept, piece.there = copy, True, there

    def read(self, pieces: Iterable[_Piece], read: Callable[[_Piece], None]) -> None:
        """Those that no other thread has begun."""
        for piece in pieces:
            with self._begins:
                if piece.begun:
                    continue
                piece.begun = True
            try:
                if piece.there:
                    piece.there.synchronize()
                read(piece)
            except BaseException as error:
                piece.read.set_exception(error)  # it belongs to the asker
                if not isinstance(error, Exception):
                    raise
            else:
                piece.read.set_result(None)
            finally:
                piece.source = piece.into  # a copy on the GPU is given back

    def read_all(self, read: Callable[[_Piece], None]) -> None:
        """Those last that are safe meanwhile."""
        pieces = [*chain.from_iterable(self.pieces.values())]
        self.read((piece for piece in pieces if not piece.kept), read)
        self.read(pieces, read)

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
        self.spare: Callable[[], int] = lambda: 0
        """Bytes of the GPU that training does not need, also in its next step."""

    def begin(self, parts: Mapping[str, Sequence[Pair]], result: T) -> "Future[T]":
        """Copy the tensors as they are now; those that change first come first. The future has `result` when all of it
        is in host memory, or what was raised."""
        answer: Future[T] = Future()
        if self._device.type == "cuda" and not self._has_buffers:
            for _ in range(BUFFERS):
                self._buffers.put(_Buffer(self._device))
            self._has_buffers = True
        copy = _Copy(parts, answer, gpu.record(self._device, sleeps=True))
        others = [partial(copy.read_all, self._read)] * (BUFFERS - 1 if self._has_buffers else 0)
        copy.threads = [self._start(work) for work in (partial(self._finish, copy, answer, result), *others)]
        self._under_way = [*(other for other in self._under_way if other.pieces), copy]
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
                    if any(piece.source.is_cuda for piece in pieces):
                        copy.keep(reversed(pieces), self.spare())  # those that would be read last
                    open_ = [piece for piece in pieces if not piece.kept]
                    copy.read(open_, self._read)
                    for piece in open_:
                        piece.read.exception()  # waits for a thread that had begun it

    def complete(self) -> None:
        """Wait until all are whole."""
        for copy in self._under_way:
            copy.read_all(self._read)
            for thread in copy.threads:
                thread.join()
        self._under_way = []

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
        if not piece.source.is_cuda:
            piece.pair.put(piece.into, piece.source)
            return
        buffer = self._buffers.get()  # another thread puts one back within a piece
        try:
            piece.pair.put(piece.into, buffer.read(piece.source))
        finally:
            self._buffers.put(buffer)


def _cut(pair: Pair, moment: "torch.cuda.Event | None") -> Iterator[_Piece]:
    each, flat = PIECE_BYTES // pair.source.itemsize, pair.source.detach().view(-1)
    for start in range(0, len(flat), each):
        end = min(start + each, len(flat))
        yield _Piece(pair, start, end, flat[start:end], moment)


def _bytes(flat: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Of any type: numpy knows fewer types than torch."""
    return flat.view(torch.uint8).numpy()
