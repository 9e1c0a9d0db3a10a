"""Snapshots of φ and δ: of one moment whatever changes meanwhile, and never much at a time."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from noloco_node.core.outer import PIECE
from noloco_node.errors import NolocoError
from noloco_node.training.state_snapshot import MIN_GAPS, Copy, Snapshots

PIECES = 10
LENGTH = PIECES * PIECE - 5


@dataclass
class Still:
    """A replica that does nothing by itself."""

    round: int = 3
    phase_step: int = 0
    phi: Tensor = field(default_factory=lambda: torch.arange(float(LENGTH)))
    delta: Tensor = field(default_factory=lambda: torch.full((LENGTH,), 0.5))

    def bytes(self) -> bytes:
        return self.phi.numpy().tobytes() + self.delta.numpy().tobytes()


def wanted(snapshots: Snapshots) -> "Future[Copy]":
    answer: Future[Copy] = Future()
    snapshots.want(answer)
    return answer


def test_it_is_of_the_moment_it_began_whatever_changes_meanwhile() -> None:
    replica, snapshots = Still(), Snapshots()
    before, answer = replica.bytes(), wanted(snapshots)
    snapshots.in_gap(replica, 10, 0.0)
    for start in (7 * PIECE - 3, 0, LENGTH - 100):
        end = min(start + PIECE, LENGTH)
        snapshots.secure(start, end)
        replica.phi[start:end] += 1
    assert not answer.done()
    snapshots.complete()  # a boundary
    replica.delta.zero_()
    replica.round += 1
    assert answer.result() == (3, before)


def test_it_is_whole_by_the_boundary_with_an_even_share_in_each_gap() -> None:
    replica, snapshots = Still(), Snapshots()
    answer = wanted(snapshots)
    for gaps in range(10, 0, -1):
        assert not answer.done()
        snapshots.in_gap(replica, gaps, 0.0)
        current = snapshots._current
        assert gaps == 1 or (current is not None and current.missing == PIECES - (11 - gaps))
    assert answer.done()


def test_little_is_copied_at_a_time_but_more_when_steps_are_long() -> None:
    replica, snapshots = Still(), Snapshots()
    answer = wanted(snapshots)
    snapshots.in_gap(replica, 10_000, 0.0)
    assert snapshots._current is not None and snapshots._current.missing == PIECES - 1
    snapshots.in_gap(replica, 10_000, 1e4)
    assert answer.done()


def test_with_few_steps_left_it_waits_for_the_next_phase() -> None:
    replica, snapshots = Still(phase_step=40), Snapshots()
    answer = wanted(snapshots)
    snapshots.in_gap(replica, MIN_GAPS - 1, 1e4)
    assert snapshots._current is None
    replica.phase_step = 0
    snapshots.in_gap(replica, MIN_GAPS - 1, 1e4)
    assert answer.done()


def test_one_copy_serves_all_who_ask_while_it_is_taken() -> None:
    replica, snapshots = Still(), Snapshots()
    answers = [wanted(snapshots)]
    snapshots.in_gap(replica, 10, 0.0)
    answers.append(wanted(snapshots))
    snapshots.at_once(replica)
    one, other = (answer.result() for answer in answers)
    assert one is other
    late = wanted(snapshots)
    snapshots.at_once(replica)
    assert late.result() is not one


def test_a_request_that_waits_when_training_ends_fails() -> None:
    snapshots = Snapshots()
    answer = wanted(snapshots)
    snapshots.give_up(NolocoError("over"))
    with pytest.raises(NolocoError, match="over"):
        answer.result(0)
