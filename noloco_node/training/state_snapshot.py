"""A copy of φ and δ as they were at one moment, taken piece by piece between inner steps.

Both change only at boundaries and where a correction is added. So a copy that begins right after a boundary has a whole
phase for its pieces, and what is about to change is copied first: the snapshot is consistent, and training never waits
for a whole copy. It costs 8 bytes a parameter in host memory. It belongs to the training thread until it is whole;
after that nobody changes it.
"""

import time
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor, empty

from noloco_node.core.outer import PIECE

MIN_GAPS = 8
"""Gaps between inner steps. With fewer left of a phase, a copy waits for the next phase: no gap copies more than an
eighth of it, where phases are that long."""
SHARE = 0.05
"""Share of an inner step's time that a gap may always take, even where an even share would be less: a phase may last an
hour, and a joining node waits."""


class SlowState(Protocol):
    """The part of training/replica.py that is used."""

    round: int
    phase_step: int
    phi: Tensor
    delta: Tensor


class Snapshot:
    def __init__(self, round: int, phi: Tensor, delta: Tensor) -> None:
        self.round = round
        self._phi, self._delta = phi, delta
        self._copy = empty(2, len(phi))
        self._missing = set(range(-(-len(phi) // PIECE)))

    @property
    def missing(self) -> int:
        """Pieces that are still to be copied."""
        return len(self._missing)

    def take(self) -> None:
        """One more piece."""
        self._take(min(self._missing))

    def secure(self, start: int, end: int) -> None:
        """Called before the elements from `start` to `end` change."""
        for piece in range(start // PIECE, -(-end // PIECE)):
            if piece in self._missing:
                self._take(piece)

    def complete(self) -> None:
        """Before everything changes."""
        while self._missing:
            self.take()

    def data(self) -> memoryview:
        """All of φ, then all of δ: fp32, little-endian."""
        data: memoryview = self._copy.numpy().data
        return data.cast("B")

    def _take(self, piece: int) -> None:
        part = slice(piece * PIECE, (piece + 1) * PIECE)
        self._copy[0, part].copy_(self._phi[part])
        self._copy[1, part].copy_(self._delta[part])
        self._missing.remove(piece)


Copy = tuple[int, memoryview]
"""The round, and what `Snapshot.data` gives."""


class Snapshots:
    """The snapshot that is being taken, and the requests that wait for it. Belongs to the training thread."""

    def __init__(self) -> None:
        self._wanted: list[Future[Copy]] = []
        self._current: Snapshot | None = None

    @property
    def idle(self) -> bool:
        return not self._wanted

    def want(self, answer: "Future[Copy]") -> None:
        """Answers with the next one that is whole: the one that is being taken, if there is one."""
        self._wanted.append(answer)

    def in_gap(self, replica: SlowState, gaps: int, step_s: float) -> None:
        """Copy between two inner steps of about `step_s`, with so many `gaps` until the boundary."""
        if self._current is None and self._wanted and (gaps >= MIN_GAPS or replica.phase_step == 0):
            self._current = Snapshot(replica.round, replica.phi, replica.delta)
        if self._current is None:
            return
        due, until = -(-self._current.missing // max(1, gaps)), time.perf_counter() + SHARE * step_s
        while self._current.missing and (due > 0 or time.perf_counter() < until):
            self._current.take()
            due -= 1
        if not self._current.missing:
            self._hand_over(self._current)

    def at_once(self, replica: SlowState) -> None:
        """Copy all, where no inner step has to wait."""
        if self._wanted and self._current is None:
            self._current = Snapshot(replica.round, replica.phi, replica.delta)
        self.complete()

    def secure(self, start: int, end: int) -> None:
        """Called before a correction of these elements."""
        if self._current:
            self._current.secure(start, end)

    def complete(self) -> None:
        """Before everything changes."""
        if self._current:
            self._current.complete()
            self._hand_over(self._current)

    def give_up(self, why: Exception) -> None:
        wanted, self._wanted, self._current = self._wanted, [], None
        for answer in wanted:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(why)

    def _hand_over(self, snapshot: Snapshot) -> None:
        wanted, self._wanted, self._current = self._wanted, [], None
        copy = (snapshot.round, snapshot.data())
        for answer in wanted:
            if answer.set_running_or_notify_cancel():
                answer.set_result(copy)
