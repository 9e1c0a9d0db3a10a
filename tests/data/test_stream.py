"""Windows of tokens in a replica's own order; the system is told which of a file come next."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from noloco_node.data.stream import TokenStream

LENGTH, HEADER = 300, 64


class Noted(mmap.mmap):
    """A memory-mapped file that keeps what it is told."""

    told: list[tuple[int, int]]

    def madvise(self, advice: int, start: int = 0, length: int = 0) -> None:
        assert advice == mmap.MADV_WILLNEED
        super().madvise(advice, start, length)
        self.told.append((start, length))


class Mapped(np.ndarray[Any, np.dtype[np.uint16]]):
    _mmap: Noted


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    path = tmp_path / "tokens"
    path.write_bytes(bytes(HEADER) + np.arange(40 * LENGTH, dtype=np.uint16).tobytes())
    with path.open("rb") as file:
        noted = Noted(file.fileno(), 0, access=mmap.ACCESS_READ)
    noted.told = []
    tokens = np.frombuffer(noted, np.uint16, offset=HEADER).view(Mapped)
    tokens._mmap = noted
    return tokens


def bytes_told(tokens: Mapped) -> set[int]:
    told = {at for start, length in tokens._mmap.told for at in range(start, start + length)}
    tokens._mmap.told.clear()
    return told


def test_what_comes_next_is_told_and_nothing_else_changes(mapped: Mapped) -> None:
    plain: NDArray[np.uint16] = np.array(mapped)
    ours, theirs = TokenStream(mapped, LENGTH, 1, "a"), TokenStream(plain, LENGTH, 1, "a")
    told: set[int] = set()
    for number in range(30):  # some epochs of 39 windows
        batch = ours.next(4)[0]
        assert torch.equal(batch, theirs.next(4)[0])
        assert ours.position == theirs.position
        if number and ours.position[0] == 0:
            wanted = {HEADER + 2 * int(token) + byte for token in batch.flatten() for byte in (0, 1)}
            assert wanted <= told, "the batch before told of this one"
        told = bytes_told(mapped)
        assert len(told) <= 4 * (2 * (LENGTH + 1) + 2 * mmap.PAGESIZE)


def test_a_file_of_the_system(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    np.arange(40 * LENGTH, dtype=np.uint16).tofile(path)
    every = np.memmap(path, np.uint16, "r")
    ours = TokenStream(every[100:], LENGTH, 1, "a")
    theirs = TokenStream(np.array(every[100:]), LENGTH, 1, "a")
    assert all(torch.equal(ours.next(3)[0], theirs.next(3)[0]) for _ in range(30))
