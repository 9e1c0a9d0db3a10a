"""A node that moves to another stage runs again in the same process: it takes that stage, or goes back to its own."""

import asyncio
import gc
import itertools
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.errors import SwarmUnreachable
from noloco_node.host.config import NodeConfig
from noloco_node.node import main, trainer
from noloco_node.node.own_stage import Move
from noloco_node.run import manifest
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest

SIGNED = Signed(b"run", "author", b"signature")
MOVE = Move(1, 2, SIGNED)
DOOR, SAME_PEER, OTHER_DOOR = (
    Address("ip4", "127.0.0.1", port, peer) for port, peer in enumerate(("peer", "peer", "other"), 1)
)
CONFIG = NodeConfig(home=Path("/nowhere"), bootstrap=(DOOR,))


class Sessions:
    """Stands for TrainingNode, whose real one tests/stages/test_real_stages.py moves."""

    def __init__(self, *runs: Callable[["Sessions"], None]) -> None:
        self.runs = list(runs)
        self.ways: list[tuple[tuple[Address, ...], tuple[Address, ...]]] = []
        """Of each session, its bootstrap nodes, and the peers seen earlier by which it joins."""
        self.named: list[tuple[str | None, str | None]] = []
        """Of each session the run that is named, and its author."""
        self.begun: list[tuple[int | None, int | None]] = []
        """Of each session the stage that is set, and the one that it moves to."""
        self.move: Move | None = None
        self.has_trained = self.found_others = False
        self.joins: Signed | None = None
        self.left = asyncio.Event()

    def leave(self) -> None:
        self.left.set()

    def __call__(self, config: NodeConfig, _report: object, _signed: object, takes: int | None = None) -> "Sessions":
        self.ways.append((config.bootstrap, config.seen))
        self.named.append((config.run, config.trust))
        self.begun.append((config.stage, takes))
        self.move = None
        return self

    def moves(self) -> Move | None:
        return self.move

    async def run(self) -> None:
        self.runs.pop(0)(self)

    def leaves_to_move(self) -> None:
        self.move = MOVE

    def trains(self) -> None:
        self.has_trained = True

    def finds_nobody(self) -> None:
        raise SwarmUnreachable("nobody is there")


async def trained(
    monkeypatch: pytest.MonkeyPatch,
    sessions: Sessions,
    *,
    told_at: int = 0,
    nobody_at: int = 0,
    seen: tuple[Address, ...] = (),
) -> list[str]:
    """`told_at`: before which start it is told to leave; `nobody_at`: before which one nobody answers at first."""
    said: list[str] = []
    numbers = itertools.count(1)

    async def again(config: NodeConfig) -> NodeConfig:
        number = next(numbers)
        if number == told_at:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                await sessions.left.wait()
        if number == nobody_at:
            sessions.finds_nobody()
        return config

    async def earlier() -> tuple[Address, ...]:
        return seen

    monkeypatch.setattr(trainer, "TrainingNode", sessions)
    assert await main.train(CONFIG, None, said.append, again, earlier) == 0
    assert not sessions.runs
    return said


async def test_it_takes_the_other_stage_and_may_move_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(Sessions.leaves_to_move, Sessions.leaves_to_move, Sessions.trains)
    await trained(monkeypatch, sessions)
    assert sessions.begun == [(None, None), (None, 2), (None, 2)]


async def test_it_goes_back_where_the_stage_cannot_be_taken_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(Sessions.leaves_to_move, Sessions.finds_nobody, Sessions.trains)
    said = await trained(monkeypatch, sessions)
    assert sessions.begun == [(None, None), (None, 2), (1, 1)]
    assert said == ["stage 2 cannot be taken (nobody is there): back to stage 1"]


async def test_what_fails_once_it_trains_is_no_reason_to_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_later(sessions: Sessions) -> None:
        sessions.has_trained = True
        sessions.finds_nobody()

    with pytest.raises(SwarmUnreachable):
        await trained(monkeypatch, Sessions(Sessions.leaves_to_move, fails_later))


async def test_told_to_leave_between_the_two_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(Sessions.leaves_to_move)
    await trained(monkeypatch, sessions, told_at=1)
    assert sessions.begun == [(None, None)]


async def test_told_to_leave_before_it_goes_back_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(Sessions.leaves_to_move, Sessions.finds_nobody)
    await trained(monkeypatch, sessions, told_at=2)
    assert sessions.begun == [(None, None), (None, 2)]


async def test_where_nobody_answers_between_the_two_it_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "ASK_EVERY_S", 0.0)
    sessions = Sessions(Sessions.leaves_to_move, Sessions.trains)
    said = await trained(monkeypatch, sessions, nobody_at=1)
    assert sessions.begun == [(None, None), (None, 2)]
    assert said == ["nobody is there. It is tried again in 0 s"]


async def test_where_the_rendezvous_lets_nobody_in_earlier_peers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers at its address, and may have lost its key."""
    sessions = Sessions(Sessions.finds_nobody, Sessions.trains)
    assert await trained(monkeypatch, sessions, seen=(DOOR, OTHER_DOOR)) == [
        "nobody is there. Joining through peers seen earlier"
    ]
    assert sessions.ways == [((DOOR,), ()), ((DOOR,), (OTHER_DOOR,))]
    with pytest.raises(SwarmUnreachable):
        await trained(monkeypatch, Sessions(Sessions.finds_nobody), seen=(DOOR, SAME_PEER))


async def test_earlier_peers_are_asked_for_the_run_that_the_rendezvous_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody chose them: they could name another one."""
    signed = manifest.sign(Manifest(name="tiny"), Identity.load_or_create(tmp_path / "author.key"))

    def finds_nobody_in_it(sessions: Sessions) -> None:
        sessions.joins = signed
        sessions.finds_nobody()

    sessions = Sessions(finds_nobody_in_it, Sessions.trains)
    await trained(monkeypatch, sessions, seen=(OTHER_DOOR,))
    assert sessions.named == [(None, None), (manifest.verify(signed).run_id, signed.author)]


async def test_another_way_in_does_not_help_who_has_found_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would build the model again, to hear the same."""

    def gets_no_state(sessions: Sessions) -> None:
        sessions.found_others = True
        sessions.finds_nobody()

    with pytest.raises(SwarmUnreachable):
        await trained(monkeypatch, Sessions(gets_no_state), seen=(OTHER_DOOR,))


async def test_what_the_first_way_in_built_is_gone_when_the_second_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be as large as the machine."""
    models: list[weakref.ref[object]] = []

    def builds_and_finds_nobody(sessions: Sessions) -> None:
        model = Sessions()  # kept by the frame that raises, as a thread's would be
        model.itself = model  # type: ignore[attr-defined]
        models.append(weakref.ref(model))
        gc.freeze()  # as after the import of a model's library
        sessions.finds_nobody()

    def is_alone(sessions: Sessions) -> None:
        assert models[0]() is None
        sessions.trains()

    await trained(monkeypatch, Sessions(builds_and_finds_nobody, is_alone), seen=(OTHER_DOOR,))
