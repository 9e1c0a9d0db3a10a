"""Token streams: what a replica reads, in which order, and what is held out from all of them.

`stdlib` is the Python standard library's own sources as bytes: on every machine, nothing to download. Files are taken
in the order of their names, so machines with the same Python hold the same corpus; between Python versions most files
differ a little, which training does not mind. Held-out files are picked by a hash of the name, so no replica trains
on what another is measured with.

A replica reads the training part in windows, in an order that the run's seed and its peer id draw anew each epoch. The
position is two numbers: a checkpoint keeps them, and reading goes on exactly there. Knows nothing of models or peers.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_node.errors import UsageError

Bytes: TypeAlias = NDArray[np.uint8]

VOCABULARY = 256
"""Byte tokens. Zero, which no source holds, stands between two documents."""
MAX_BYTES = 32 << 20
"""Of a corpus in memory; the standard library has a third of it."""
MAX_FILE_BYTES = 512 << 10
"""Larger files are generated tables, not prose."""
HELD_OUT = 16
"""One file in so many is never trained on."""

_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"})
_MISSING = "this Python came without the sources of its standard library ({path}): install them, or use another Python"


@dataclass(frozen=True)
class Corpus:
    train: Bytes
    held_out: Bytes

    def windows(self, sequence_length: int, count: int) -> Tensor:
        """The fixed evaluation: windows spread evenly over the held-out part, as (count, sequence_length + 1)."""
        last = len(self.held_out) - sequence_length - 1
        if last < 0:
            raise UsageError(f"data.sequence_length: {sequence_length} is more than the held-out text is long")
        starts = np.linspace(0, last, count).astype(np.int64)
        return _rows(self.held_out, starts, sequence_length)


def load(source: str) -> Corpus:
    if source == "stdlib":
        return from_files(Path(sysconfig.get_path("stdlib")))
    raise UsageError(f"data.source: there is no {source!r} here. Update noloco-node")


def from_files(root: Path) -> Corpus:
    """The Python sources below `root`."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for path in _sources(root):
        text = _read(path)
        total += len(text) + 1
        if total > MAX_BYTES:
            break
        (held_out if is_held_out(path.relative_to(root).as_posix()) else train).append(text)
    if not train or not held_out:
        raise UsageError(_MISSING.format(path=root))
    return Corpus(_joined(train), _joined(held_out))


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT == 0


class Stream:
    """A replica's endless batches. The same seed and peer id read the same, from any position."""

    def __init__(self, tokens: Bytes, sequence_length: int, seed: int, peer_id: str) -> None:
        self._tokens = tokens
        self._length = sequence_length
        self._name = f"{seed}/{peer_id}"
        self._windows = (len(tokens) - sequence_length) // sequence_length  # whole ones, wherever an epoch begins
        if self._windows < 1:
            raise UsageError(f"data.sequence_length: {sequence_length} is more than the text is long")
        self._order: NDArray[np.int64]
        self.seek((0, 0))

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, windows read in it)."""
        return self._epoch, self._index

    def seek(self, position: tuple[int, int]) -> None:
        """ValueError where no stream of this text can stand."""
        epoch, index = position
        if epoch < 0 or not 0 <= index <= self._windows:
            raise ValueError(f"no position in this text: {position}")
        self._epoch, self._index = epoch, index
        self._order = self._drawn(epoch)

    def next(self, sequences: int) -> Tensor:
        """The next batch, as (sequences, sequence_length + 1): every token but the last is an input, every one but the
        first a target."""
        starts = np.fromiter((self._next_start() for _ in range(sequences)), np.int64, sequences)
        return _rows(self._tokens, starts, self._length)

    def _next_start(self) -> int:
        if self._index == self._windows:
            self.seek((self._epoch + 1, 0))
        self._index += 1
        return int(self._order[self._index - 1])

    def _drawn(self, epoch: int) -> NDArray[np.int64]:
        """Where the epoch's windows begin, in its order. The grid moves too: no cut is always at the same place."""
        seed = hashlib.sha256(f"{self._name}/{epoch}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(seed, "big"))
        return rng.permutation(self._windows) * self._length + rng.integers(self._length)


def _sources(root: Path) -> Iterator[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}, which is part of the training data: {error.strerror}") from error


def _joined(texts: list[bytes]) -> Bytes:
    return np.frombuffer(b"\0".join(texts), np.uint8)


def _rows(tokens: Bytes, starts: NDArray[np.int64], length: int) -> Tensor:
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
