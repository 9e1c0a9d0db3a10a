"""A node that stood still, as in a machine's sleep, was left behind by the others: it takes a peer's state."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from donors import answer, record
from real_nodes import RealNodes, until

from noloco_node.base.events import RolledBack
from noloco_node.base.identity import Identity
from noloco_node.host.config import NodeConfig
from noloco_node.host.limits import PAUSED
from noloco_node.host.standstill import LONG_S
from noloco_node.node.lifecycle import UNSEEN, ModelReady, Order, PauseRounds, Signal, StartCatchUp
from noloco_node.node.trainer import TrainingNode
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest
from noloco_node.state_transfer.catch_up import CATCH_UP_ROUNDS
from noloco_node.state_transfer.client import LiveState


class CatchesUp:
    def __init__(self, behind: bool) -> None:
        self.behind = behind

    def is_behind(self) -> bool:
        return self.behind


def trainer_at_work(home: Path, behind: bool) -> tuple[TrainingNode, list[object]]:
    author = Identity.load_or_create(home / "author.key")
    trainer = TrainingNode(NodeConfig(home=home), lambda _: None, sign(Manifest(name="tiny", rounds=50), author))
    trainer._catch_up, ordered = CatchesUp(behind), []
    for event in (ModelReady(resumed=False), Signal.CAUGHT_UP):
        trainer._life.handle(event)
    trainer._perform = ordered.append
    return trainer, ordered


@pytest.mark.parametrize(("behind", "swaps"), [(True, False), (True, True), (False, False)])
async def test_it_catches_up_once_others_are_seen(tmp_path: Path, behind: bool, swaps: bool) -> None:
    trainer, ordered = trainer_at_work(tmp_path, behind)
    trainer._update_candidates()
    assert not ordered
    trainer._handle(Signal.STOOD_STILL)
    trainer._update_candidates()
    assert ordered == [PauseRounds(UNSEEN)], "nobody is seen yet"
    trainer._membership.seen = {"b": record("b", CATCH_UP_ROUNDS + 1)}
    if swaps:
        trainer._rounds._under_way = SimpleNamespace(peer="b")
        trainer._update_candidates()
        trainer._rounds._under_way = None
    assert len(ordered) == 1, "the swap from before breaks in a moment"
    trainer._update_candidates()
    catches_up = [PauseRounds(PAUSED), Order.PAUSE_TRAINING, StartCatchUp(diverged=False)]
    assert ordered[1:] == (catches_up if behind else [Order.RESUME_ROUNDS])
    ordered.clear()
    trainer._life.handle(Signal.CAUGHT_UP)
    trainer._update_candidates()
    assert not ordered, "once"


async def test_weights_that_are_replaced_are_given_to_nobody_and_a_state_that_came_is_written(tmp_path: Path) -> None:
    trainer, ordered = trainer_at_work(tmp_path, behind=True)
    told: list[str] = []
    trainer._schedule = cast("Any", SimpleNamespace(weights_replaced=lambda: told.append("schedule")))
    trainer._state_service = cast("Any", SimpleNamespace(weights_replaced=lambda: told.append("copies")))
    trainer._follow(RolledBack(9, None, "loss"))
    assert not told, "the slow weights, which others get, are unchanged"
    trainer._follow(RolledBack(9, 7, "loss"))
    assert told == ["copies"]
    trainer._handle(Signal.BOUNDARY)
    trainer._handle(Signal.STOOD_STILL)
    ordered.clear()
    trainer._stats.steps_a_round = 50
    thread, rules = SimpleNamespace(adopt=lambda _round, _numbers: answer(None)), SimpleNamespace()
    await trainer._adopt(cast("Any", thread), cast("Any", rules), LiveState(40, memoryview(b"")))
    assert sorted(told) == ["copies", "copies", "schedule"]
    assert ordered == [Order.RESUME_ROUNDS], "it has the others' weights"
    assert (trainer._stats.round, trainer._stats.step) == (40, 2000)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_nodes_of_which_one_stood_still_swap_again(real_nodes: RealNodes) -> None:
    """Their first swap diverged, and of two nodes neither takes the other's state then."""
    run = real_nodes.paced(step_s=0.1, steps=20, learning_rate=0.0001, warmup=0.005)
    author = real_nodes.node("author", "start", str(run))
    one = real_nodes.node("one", *author.invitation())
    until(one.committed, "a round with somebody")
    sleeps = one.processes()
    for process in sleeps:
        os.kill(process, signal.SIGSTOP)
    time.sleep(1.5 * LONG_S)
    before = one.log.read_text(errors="replace")
    for process in sleeps:
        os.kill(process, signal.SIGCONT)
    until(lambda: "received the state of" in one.log.read_text(errors="replace")[len(before) :], "a peer's state", 120)
    committed = one.committed()
    until(lambda: one.committed() > committed + 2, "rounds with somebody", 60)
    assert "diverged" not in one.ask("status")["rounds"]["by_reason"]
