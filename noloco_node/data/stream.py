"""A replica's stream of windows from an array of tokens, in memory or in a file.

The order is random, by the run's seed, the peer id and the epoch. The position is two numbers: a checkpoint keeps them,
and reading resumes exactly there. Knows nothing of models or peers.

No thread reads ahead: 64 windows of 1,024 tokens take 0.4 ms from a file in the system's cache. Where the system must
read them from the disk, 8 took 60 to 80 ms; so it is told which windows come next, reads them while the present ones
are trained on, and the same takes 0.3 ms.

No replica reads a window twice in an epoch. What the others read it does not know, nor how many they are, so two
replicas read the same window by chance: of R windows N replicas that read k each read R (1 - (1 - k/R)^N) distinct ones
in the mean, 26,256 of 40,000 where eight read 5,000 each. No rule by which each chooses alone reads more, as (1 - p)^N
is convex in the chance p that a window is chosen; and an order of one's own has the smallest spread (± 61).
"""

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_node.data.token_file import FileTokens
from noloco_node.data.tokens import Tokens
from noloco_node.errors import UsageError

Position: TypeAlias = tuple[int, int]
"""(epoch, windows read in it)."""


class TokenStream:
    """A replica's endless batches. The same seed and peer id read the same, from any position."""

    def __init__(self, tokens: Tokens | FileTokens, sequence_length: int, seed: int, peer_id: str) -> None:
        self._tokens = tokens
        self._length = sequence_length
        self._name = f"{seed}/{peer_id}"
        self._windows = (len(tokens) - sequence_length) // sequence_length  # whole ones, wherever an epoch begins
        if self._windows < 1:
            raise _too_short("text", len(tokens), 2 * sequence_length, sequence_length)
        self._order: NDArray[np.int64]
        self.seek((0, 0))

    @property
    def position(self) -> Position:
        return self._epoch, self._index

    def seek(self, position: Sequence[int]) -> None:
        """ValueError where no stream of this text can be at that position."""
        match position:
            case [int(epoch), int(index)] if epoch >= 0 and 0 <= index <= self._windows:
                self._epoch, self._index = epoch, index
                self._order = self._drawn(epoch)
            case _:
                raise ValueError(f"no position in this text: {position}")

    def next(self, examples: int) -> tuple[Tensor]:
        """The next batch, as (examples, sequence_length + 1): every token but the last is an input, every one but the
        first a target."""
        starts = np.fromiter((self._next_start() for _ in range(examples)), np.int64, examples)
        batch = rows(self._tokens, starts, self._length)
        self._announce(examples)
        return (batch,)

    def _announce(self, examples: int) -> None:
        """Which windows of a file come next; those of a next epoch are not drawn yet."""
        if isinstance(self._tokens, FileTokens):
            for start in self._order[self._index : self._index + examples].tolist():
                self._tokens.announce(slice(start, start + self._length + 1))

    def _next_start(self) -> int:
        if self._index == self._windows:
            self.seek((self._epoch + 1, 0))
        self._index += 1
        return int(self._order[self._index - 1])

    def _drawn(self, epoch: int) -> NDArray[np.int64]:
        """Where the epoch's windows begin, in its order. The grid moves too: each epoch cuts elsewhere."""
        rng = generator(f"{self._name}/{epoch}")
        return rng.permutation(self._windows) * self._length + rng.integers(self._length)


def generator(name: str) -> np.random.Generator:
    """The same draws for the same name, on every machine."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big"))


def spread(tokens: Tokens | FileTokens, sequence_length: int, count: int) -> Tensor:
    """Windows spread evenly over a held-out part, the same for everyone: (count, sequence_length + 1)."""
    last = len(tokens) - sequence_length - 1
    if last < 0:
        raise _too_short("held-out text", len(tokens), sequence_length + 1, sequence_length)
    starts = np.linspace(0, last, count).astype(np.int64)
    return rows(tokens, starts, sequence_length)


def _too_short(what: str, there: int, needed: int, length: int) -> UsageError:
    return UsageError(f"data.sequence_length: {length} needs a {what} of {needed} tokens, and there are {there}")


def rows(tokens: Tokens | FileTokens, starts: NDArray[np.int64], length: int) -> Tensor:
    batch = np.empty((len(starts), length + 1), np.int64)
    for row, start in zip(batch, map(int, starts), strict=True):
        row[:] = tokens[start : start + length + 1]
    return torch.from_numpy(batch)
