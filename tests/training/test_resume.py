"""Killed with SIGKILL again and again, a replica ends as if nothing had happened: every bit of its state is the same.

Real processes, real checkpoints and the real training thread. They are forked from a server that has imported torch
once, so that a life takes half a second.
"""

import multiprocessing
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import RUN, SAVE_EVERY, STEPS, Kill, Received, Resume, live, resumes
from replicas import FRAGMENT, assert_same, small_replica
from torch import Tensor

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import carry
from noloco_node.training.replica import Replica

HEAVY = [
    "noloco_node.training.thread",
    "noloco_node.checkpoints.checkpoint",
    "transformers.models.llama.modeling_llama",
]
DISK_ACTS = 60
"""Of one checkpoint, about; a life that is killed at a later one has written some."""


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "safetensors.torch", *HEAVY])
    return context


@pytest.fixture(scope="module")
def partner() -> list[Received]:
    """What a partner made of a run: swaps that come late, some after the next boundary."""
    return list(record(random.Random(1)))


@pytest.fixture(scope="module", params=["alone", "with a partner"])
def received(request: pytest.FixtureRequest, partner: list[Received]) -> list[Received]:
    return partner if request.param == "with a partner" else []


def record(rng: random.Random) -> Iterator[Received]:
    one, other = small_replica("a", RUN), small_replica("b", RUN)
    waiting: list[Received] = []
    for step in range(STEPS):
        for each in [each for each in waiting if each.before_step == step]:
            waiting.remove(each)
            one.slow.apply(each.start, each.correction, each.offered_round)
            other.slow.apply(each.start, -each.correction, each.offered_round)
            yield each
        one.step(), other.step()
        if one.position.phase_over:
            us = boundary(one), boundary(other)
            for start, correction in corrections(us) if not waiting else ():
                waiting.append(Received(step + 1 + rng.randrange(8), one.round, start, correction))


def boundary(inner: Replica) -> Tensor:
    """As the training thread does it."""
    u, _ = inner.snapshot()
    inner.boundary()
    return u


def corrections(us: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    for index, start in enumerate(range(0, len(us[0]), FRAGMENT)):
        one, other = (codec("bf16").converse(u[start : start + FRAGMENT], index, bytes(16)) for u in us)
        correction, _ = carry(one, other)
        yield start, correction


def uninterrupted(received: Sequence[Received], broken: Sequence[Resume] = ()) -> dict[str, Any]:
    """In this process, without a thread or a file; the swaps that were under way at these points break there."""
    inner: Replica = small_replica("a", RUN)
    for step in range(STEPS):
        for each in received:
            if each.before_step == step and not any(point.misses(each) for point in broken):
                inner.slow.apply(each.start, each.correction, each.offered_round)
        inner.step()
        if inner.position.phase_over:
            boundary(inner)
    return what_goes_on(asdict(inner.state()))


def what_goes_on(state: dict[str, Any]) -> dict[str, Any]:
    """Without the losses that it was taken at: they serve the choice among checkpoints, and begin anew."""
    return {name: value for name, value in state.items() if name not in {"eval_loss", "loss"}}


def lives(
    processes: ForkServerContext, home: Path, received: Sequence[Received], kills: Sequence[Kill | None]
) -> dict[str, Any]:
    """One after the other in the same home; how the last one ended."""
    for kill in kills:
        life = processes.Process(target=live, args=(home, received, kill))
        life.start()
        life.join(60)
        assert life.exitcode == (-signal.SIGKILL if kill else 0), kill
        life.close()
    end: dict[str, Any] = torch.load(home / "end.pt", weights_only=True)
    return what_goes_on(end)


def test_a_partner_was_recorded_that_came_late(partner: list[Received]) -> None:
    lateness = {each.before_step // 5 - each.offered_round for each in partner}
    assert lateness == {0, 1}, "within its phase, and after the next boundary"
    assert all(each.correction.any() for each in partner)
    assert_different(uninterrupted(partner), uninterrupted([]))


def assert_different(one: dict[str, Any], other: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        assert_same(one, other)


def test_two_runs_are_the_same(processes: ForkServerContext, tmp_path: Path, received: list[Received]) -> None:
    """One of them in a process and a thread of its own, saving all the while."""
    end = lives(processes, tmp_path, received, [None])
    assert end["step"] == STEPS and end["inner"]["position"] != (0, 0)
    assert_same(end, uninterrupted(received))


def test_killed_at_random_steps(processes: ForkServerContext, tmp_path: Path, received: list[Received]) -> None:
    steps = sorted(random.Random(2).sample(range(SAVE_EVERY, STEPS), 5))
    end = lives(processes, tmp_path, received, [*(Kill(step=step) for step in steps), None])
    assert len(resumes(tmp_path)) == 5
    assert_same(end, uninterrupted(received, resumes(tmp_path)))


def test_killed_while_it_saves(processes: ForkServerContext, tmp_path: Path, received: list[Received]) -> None:
    rng = random.Random(3)
    acts = [rng.randrange(1, 2 * DISK_ACTS) for _ in range(5)]
    end = lives(processes, tmp_path, received, [*(Kill(disk=act) for act in acts), None])
    assert_same(end, uninterrupted(received, resumes(tmp_path)))
    assert not list(tmp_path.glob(".writing-*")), "nor is anything left of what was half written"
