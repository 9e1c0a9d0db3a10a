"""One process of a node's training: it saves as a node does, and may be killed at any instant.

It resumes from what the process before it saved, whose swaps under way are lost. It ends with
SIGKILL, which it sends itself so that the point is exact, or with `end.pt`: all that the replica was in the end.
"""

import os
import queue
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from replicas import small_replica, small_run
from torch import Tensor

from noloco_node.checkpoints import checkpoint
from noloco_node.core.codecs.by_name import codec
from noloco_node.training.mailbox import Failed, Finished, PhaseEnded
from noloco_node.training.replica import Replica
from noloco_node.training.thread import TrainingThread

RUN = small_run(steps=5, rounds=6)
STEPS = 30
SAVE_EVERY = 3
"""Steps, so that it is saved in the middle of phases too."""
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Received:
    """A partner's correction of some elements, as it arrived: before this step, for the offer of that round."""

    before_step: int
    offered_round: int
    start: int
    correction: Tensor


@dataclass(frozen=True)
class Kill:
    step: int | None = None
    """In the middle of this step of the run."""
    disk: int | None = None
    """Before this one of the process's disk operations: writes, syncs, renames, removals."""


@dataclass(frozen=True)
class Resume:
    """A process resumed from here."""

    step: int
    round: int

    def misses(self, received: Received) -> bool:
        """Whether the swap that brings it was under way then."""
        return received.offered_round <= self.round and received.before_step >= self.step


class _Due:
    """Time to save."""


def live(home: Path, received: Sequence[Received], kill: Kill | None) -> None:
    posts: queue.SimpleQueue[object] = queue.SimpleQueue()
    kill = kill or Kill()
    _count_what_is_done_to_the_disk(kill.disk)

    def build() -> Replica:
        inner = small_replica("a", RUN)
        found = checkpoint.newest(home, RUN.run_id, inner.layout)
        if found.checkpoint:
            inner.load(found.checkpoint)
            with (home / "resumes").open("a") as file:
                file.write(f"{inner.steps} {inner.round}\n")
        met = [each for each in received if not Resume(inner.steps, inner.round).misses(each)]
        _replay(inner, met, lambda: due(inner), kill.step)
        return inner

    def due(inner: Replica) -> None:
        if inner.steps % SAVE_EVERY == 0:
            thread.pause()  # so that it is just this step that is saved
            posts.put(_Due())

    thread = TrainingThread(build, codec("fp32"), posts.put, rounds=RUN.rounds)
    thread.start()
    thread.begin()
    while not isinstance(post := posts.get(timeout=DEADLINE_S), Finished):
        assert not isinstance(post, Failed), post
        if isinstance(post, _Due | PhaseEnded):
            state = thread.state().result(DEADLINE_S)
            checkpoint.save(home, state, RUN.run_id, small_replica("a", RUN).layout, keep=2)
            thread.resume()
    torch.save(asdict(thread.state().result(DEADLINE_S)), home / "end.pt")
    thread.stop()


def resumes(home: Path) -> list[Resume]:
    log = home / "resumes"
    return [Resume(*map(int, line.split())) for line in log.read_text().splitlines()] if log.exists() else []


def _replay(inner: Replica, received: Sequence[Received], stepped: Callable[[], None], kill_at: int | None) -> None:
    """Apply the partner's corrections before the steps before which they arrived."""
    step, loss, by_step = inner.step, inner._gradients._loss, defaultdict(list)
    for each in received:
        by_step[each.before_step].append(each)

    def replayed() -> float:
        for each in by_step[inner.steps]:
            inner.slow.apply(each.start, each.correction, each.offered_round)
        value = step()
        stepped()
        return value

    def deadly(batch: Any) -> Tensor:
        if inner.steps == kill_at:
            _die()
        return loss(batch)

    inner.step = replayed  # type: ignore[method-assign]
    inner._gradients._loss = deadly  # type: ignore[method-assign]


def _count_what_is_done_to_the_disk(kill_at: int | None) -> None:
    done = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == kill_at:
                _die()
            return act(*args, **options)

        return counting

    checkpoint._Hashing.write = counted(checkpoint._Hashing.write)  # type: ignore[method-assign]
    checkpoint.os.fsync = counted(os.fsync)  # type: ignore[attr-defined]
    Path.rename = counted(Path.rename)  # type: ignore[method-assign]
    shutil.rmtree = counted(shutil.rmtree)  # type: ignore[assignment]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
