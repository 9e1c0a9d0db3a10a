"""Leaving: during an inner step that takes longer than everything else may, and with a network daemon that hangs."""

import asyncio
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from patience import PATIENCE
from real_nodes import QUICK, RealNodes, until

from noloco_node.base.identity import Identity
from noloco_node.base.states import NodeState
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.core.state import State
from noloco_node.errors import DiskFull
from noloco_node.host.config import NodeConfig
from noloco_node.node.lifecycle import ModelReady, Signal
from noloco_node.node.main import _told_to_leave
from noloco_node.node.trainer import LEAVE_S, TrainingNode
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest
from noloco_node.training.mailbox import Done

pytestmark = pytest.mark.timeout(400)


def test_who_leaves_in_a_long_step_saves_at_its_end(real_nodes: RealNodes) -> None:
    node = real_nodes.node("slow", "start", str(real_nodes.paced(step_s=14.0, steps=100, outer=QUICK)))
    until(lambda: node.ask("status").get("eval_loss"), "the evaluation before the first step")
    node.leave()
    (saved,) = node.home.glob("runs/*/checkpoints/*")
    assert int(saved.name) >= 1
    assert not node.printed(r"(no checkpoint)")


def test_where_the_data_fail_nothing_that_was_trained_is_lost(real_nodes: RealNodes) -> None:
    """Seven steps in the second round, whose end no checkpoint waits for."""
    path = real_nodes.paced(step_s=0.02, steps=10, outer=QUICK)
    node = real_nodes.node("broken disk", "start", str(path), within=("env", "PACED_FAILS=17"))
    assert node.ended(60) == 1
    assert node.printed(r"noloco-node failed unexpectedly .*\n(left .* at round 1 )"), "the reason comes first"
    assert node.printed(r"(its checkpoint of round 1 )")
    (saved,) = node.home.glob("runs/*/checkpoints/*")
    assert saved.name == "17"


class NoRoom:
    """A training thread that finds room for a copy of its state neither in memory nor on the disk."""

    patience_s = 0.0

    def state(self) -> "Future[State]":
        answer: Future[State] = Future()
        answer.set_running_or_notify_cancel()
        answer.set_exception(DiskFull("the disk is full: cannot write a copy of the state"))
        return answer


async def test_a_state_that_could_not_even_be_copied_is_not_saved(tmp_path: Path) -> None:
    author = Identity.load_or_create(tmp_path / "author.key")
    node = TrainingNode(NodeConfig(home=tmp_path), lambda _: None, sign(Manifest(name="tiny"), author))
    keeper = CheckpointKeeper(tmp_path / "checkpoints", "ab" * 32)
    node._stats.round = 7
    ready = cast("Any", SimpleNamespace(layout=bytes(32), parameters=1))
    await node._new_schedule(cast("Any", NoRoom()), keeper, ready).save_now(leaving=True)
    assert keeper.unsaved is not None and keeper.unsaved.exit_code == 20
    assert str(keeper.unsaved).startswith("round 7 is not saved, and no earlier one is: the disk is full: ")
    assert [found.level for found in keeper.health(1000)] == ["error"]


@pytest.mark.parametrize("full", [True, False])
async def test_a_last_checkpoint_that_was_not_written_is_tried_again(tmp_path: Path, full: bool) -> None:
    """While the node stays, as with --linger, and when it leaves."""
    author = Identity.load_or_create(tmp_path / "author.key")
    run = Manifest(name="tiny", rounds=5)
    node = TrainingNode(NodeConfig(home=tmp_path, linger=0.0), lambda _: None, sign(run, author))
    keeper = node._keeper = CheckpointKeeper(tmp_path / "checkpoints", "ab" * 32)
    tried: list[str] = []

    async def save_now(*, leaving: bool = False) -> None:
        tried.append("leaving" if leaving else "its work is done")
        keeper.unsaved = DiskFull("the disk is full") if full else None

    due = lambda *_: tried.append("it stays")  # noqa: E731
    node._schedule = cast("Any", SimpleNamespace(save_now=save_now, save_if_due=due))
    for event in (ModelReady(resumed=False), Signal.CAUGHT_UP):
        node._life.handle(event)
    node._messages.put_nowait(Done())
    told = asyncio.sleep(0)
    await node._finish(
        cast("Any", SimpleNamespace(rules=SimpleNamespace(run=run, ended=True), tell_others=lambda: told))
    )
    assert node._life.state is NodeState.FINISHED
    await node._save_when_due()
    node._handle(Signal.LEAVE)
    await node._save_last()
    assert tried == ["its work is done", *(["it stays", "leaving"] if full else [])]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_who_still_starts_leaves_at_once(real_nodes: RealNodes, number: signal.Signals) -> None:
    """Its network may be starting, or its model being built: there is nothing to save."""
    node = real_nodes.node(f"early-{number.name}", "start", str(real_nodes.manifest()))
    until(lambda: node.ask("status").get("state") == "starting", "the first status")
    node.process.send_signal(number)
    until(lambda: node.printed("(leaving: Ctrl-C again ends it at once, without saving)"), "an answer", 3)
    assert node.ended(LEAVE_S) == 0
    said = node.log.read_text()
    assert "Traceback" not in said
    assert "others join with" not in said
    assert not (node.home / "runs").exists()


def test_a_terminal_that_is_closed_costs_no_work(real_nodes: RealNodes) -> None:
    """It hangs up twice: the shell for its jobs, and the system."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would hand it on as ignored
    try:
        node = real_nodes.node("closed", "start", str(real_nodes.paced(seconds=1.0, outer=QUICK)))
    finally:
        signal.signal(signal.SIGHUP, before)
    until(lambda: node.round() >= 2, "rounds of its own")
    for _ in range(2):
        node.process.send_signal(signal.SIGHUP)
        time.sleep(0.05)  # else they may come as one
    assert node.ended(3 * LEAVE_S) == 0
    assert list(node.home.glob("runs/*/checkpoints/*"))


async def test_a_hang_up_as_the_process_ends_does_not_kill_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    node = cast("Any", SimpleNamespace(leave=lambda: None))
    try:
        with _told_to_leave(lambda: node, lambda _: None) as told:
            os.kill(os.getpid(), signal.SIGHUP)
            await told.wait()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_network_that_hangs_holds_nobody(real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]) -> None:
    node = real_nodes.node("quick", "start", str(real_nodes.paced(seconds=1.0, outer=QUICK)))
    until(lambda: node.round() >= 2, "rounds of its own")
    (daemon,) = [p for p in psutil.Process(node.process.pid).children(recursive=True) if p.name() == "p2pd"]
    os.kill(daemon.pid, signal.SIGSTOP)
    node.process.terminate()
    began = time.monotonic()
    assert node.ended(3 * LEAVE_S) == 0
    took = time.monotonic() - began
    with capsys.disabled():
        print(f"\n  left in {took:.1f} s")  # noqa: T201
    assert took < (LEAVE_S + 2) * PATIENCE, "and two seconds for a busy machine to end the process"
    assert list(node.home.glob("runs/*/checkpoints/*"))
