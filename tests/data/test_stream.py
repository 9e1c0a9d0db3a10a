"""Windows of tokens in a replica's own order; the system is told which of a file come next."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from noloco_node.data import token_file
from noloco_node.data.stream import TokenStream, rows
from noloco_node.data.token_file import FileTokens
from noloco_node.data.tokens import BYTES

LENGTH, TOKENS, OTHERS = 300, 12_000, 1_000


class Noted(FileTokens):
    """Keeps what the system is told."""

    told: tuple[slice, ...] = ()

    def announce(self, part: slice) -> None:
        super().announce(part)
        self.told += (part,)


def test_a_batch_of_short_windows_takes_little_more_than_its_numbers() -> None:
    numbers, starts = np.arange(1000, dtype=np.uint16), np.arange(20_000) % 900
    tracemalloc.start()
    try:
        batch = rows(numbers, starts, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch[901].tolist() == [1, 2, 3] and batch.dtype == torch.int64
    assert peak < 2 * batch.nbytes


def test_what_comes_next_is_told_and_nothing_else_changes(tmp_path: Path) -> None:
    path, numbers = tmp_path / "tokens", np.random.default_rng(1).integers(0, 256, TOKENS, np.uint8)
    with token_file.Writer(path, BYTES) as writer:
        writer.add(numbers, held_out=True)
        writer.add(numbers[:OTHERS], held_out=False)
    stored = Noted(path, os.open(path, os.O_RDONLY), BYTES, OTHERS, TOKENS)
    assert np.array_equal(stored[:], numbers)
    ours, theirs, announced = TokenStream(stored, LENGTH, 1, "a"), TokenStream(numbers, LENGTH, 1, "a"), 0
    for number in range(30):  # some epochs of 39 windows
        told, stored.told = stored.told, ()
        batch = ours.next(4)[0]
        assert torch.equal(batch, theirs.next(4)[0])
        assert ours.position == theirs.position
        if number:
            assert batch[: len(told)].tolist() == [numbers[part].tolist() for part in told]
        announced += len(told)
    assert announced >= 4 * 30 - 4 * 5, "all but those of the next epoch"
