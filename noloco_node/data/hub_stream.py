"""A replica's batches of a streamed data set, from blocks of tokens that a thread reads ahead.

Which blocks come, and what happens when the network fails, is up to the reader (hub.py). Here they become one sequence
of tokens, whose place a checkpoint keeps.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from noloco_node.data.tokens import Tokens

BLOCKS_READY = 2
WAIT_S = 60.0
"""How long one look for the next block takes at most; another one follows."""
STOP_S = 2.0
"""For the thread to end; one that waits for the network ends with the process."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The start of a block."""

    epoch: int = 0
    part: int = 0
    """Index in the epoch. A part is a shard; the last part is the beginning of the first shard's first piece, before
    the offset."""
    piece: int = 0
    """Index in the part."""
    block: int = 0
    """Index in the piece."""
    state: dict[str, Any] | None = None
    """The `datasets` library's state in the piece; None at its beginning."""
    offset: int | None = None
    """Records of the epoch's first piece that are read at its end; None before their number is known."""


@dataclass(frozen=True, slots=True)
class Block:
    mark: Mark
    tokens: Tokens


class Reads(Protocol):
    def check(self, mark: Mark) -> None:
        """ValueError where there is no such place."""

    def blocks(self, mark: Mark, stop: threading.Event) -> Iterator[Block]:
        """Blocks from `mark` on, for ever, or until `stop`."""


class HubStream:
    """A replica's endless batches. The same seed and peer id read the same, from any position."""

    def __init__(self, reader: Reads, sequence_length: int) -> None:
        self._reader, self._length = reader, sequence_length
        self._start, self._taken = Mark(), 0
        self._ready: deque[Block] = deque()
        self._ahead: Ahead | None = None

    @property
    def position(self) -> dict[str, Any]:
        return {**asdict(self._mark), "taken": self._taken}

    @property
    def _mark(self) -> Mark:
        return self._ready[0].mark if self._ready else self._start

    def seek(self, position: Any) -> None:
        """ValueError where no stream of this data set can be at that position."""
        try:
            rest = dict(position)
            taken = rest.pop("taken")
            if rest.keys() != asdict(Mark()).keys():
                raise KeyError("a position has all of these")
            mark = Mark(**rest)
            numbers = (taken, mark.epoch, mark.part, mark.piece, mark.block, mark.offset or 0)
            if not all(isinstance(n, int) for n in numbers) or taken < 0:
                raise TypeError("whole numbers are wanted")
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"no position in a data set: {error}") from None
        self._reader.check(mark)
        if mark != self._mark:  # else what is read ahead stays: a fresh node's first block is far inside of a file
            self.close()
            self._start = mark
        self._taken = taken

    def ready(self, examples: int, within_s: float) -> bool:
        """Whether `next` can return so many at once; waits for them up to `within_s`."""
        until = time.monotonic() + within_s
        while sum(len(block.tokens) for block in self._ready) <= self._taken + examples * self._length:
            block = self._next_block(max(0.0, until - time.monotonic()))
            if block is None:
                return False
            if not self._ready and block.mark != self._start:  # that place is not there any more
                self._taken = 0
            self._ready.append(block)
        return True

    def next(self, examples: int) -> tuple[Tensor]:
        """(examples, sequence_length + 1). Waits where the network is slower than training."""
        while not self.ready(examples, WAIT_S):
            pass
        return (torch.from_numpy(np.stack([self._row() for _ in range(examples)])),)

    def close(self) -> None:
        """Stop reading ahead. The position stays, and `next` continues from it."""
        if self._ahead is not None:
            self._start = self._mark
            self._stop()
            self._ahead = None
            self._ready.clear()

    def _row(self) -> Any:
        """The next length + 1 tokens, which are ready; the next row begins with the last one."""
        parts: list[Tokens] = []
        wanted, at = self._length + 1, self._taken
        for block in self._ready:
            parts.append(block.tokens[at : at + wanted])
            wanted -= len(parts[-1])
            at = max(0, at - len(block.tokens))
            if not wanted:
                break
        self._taken += self._length
        while self._taken >= len(self._ready[0].tokens):
            self._taken -= len(self._ready.popleft().tokens)
        return np.concatenate(parts).astype(np.int64)

    def _next_block(self, within_s: float) -> Block | None:
        if self._ahead is None:
            start, reader = self._start, self._reader
            self._ahead = Ahead(lambda stop: reader.blocks(start, stop))
            self._stop = weakref.finalize(self, self._ahead.close)  # keeps what is read ahead until it is called
        return self._ahead.get(within_s)


class Ahead:
    """A thread that keeps the next few blocks ready."""

    def __init__(self, blocks: Callable[[threading.Event], Iterator[Block]]) -> None:
        self._stop = threading.Event()
        self._queue: queue.Queue[Block | BaseException] = queue.Queue(BLOCKS_READY)
        self._thread = threading.Thread(target=self._work, args=(blocks(self._stop),), name="data", daemon=True)
        self._thread.start()

    def get(self, within_s: float) -> Block | None:
        """The next block, None if it is not ready in time. Raises the error that the thread ended with."""
        try:
            found = self._queue.get(timeout=within_s)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            self._queue.put(found)  # for the next call
            raise found
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join(STOP_S)

    def _work(self, blocks: Iterator[Block]) -> None:
        try:
            for block in blocks:
                if not self._put(block):
                    break
        except BaseException as error:  # noqa: BLE001 (it is raised by `get`, which else would wait for ever)
            self._put(error)
        finally:
            blocks.close()  # type: ignore[attr-defined]

    def _put(self, item: Block | BaseException) -> bool:
        """False after `close`."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
