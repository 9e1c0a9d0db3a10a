"""A home whose disk takes long for a sync: a checkpoint is being written to a hard disk, or NFS hangs."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.base import atomic_files
from noloco_node.base.identity import Identity
from noloco_node.host.config import NodeConfig
from noloco_node.host.limits import PAUSED
from noloco_node.node.trainer import TrainingNode
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest


class Disk:
    def __init__(self) -> None:
        self.asked, self.ready = threading.Event(), threading.Event()
        self._sync = os.fsync

    def fsync(self, descriptor: int) -> None:
        self.asked.set()
        self.ready.wait(60)
        self._sync(descriptor)


@pytest.fixture
def node(tmp_path: Path) -> TrainingNode:
    author = Identity.load_or_create(tmp_path / "author.key")
    made = TrainingNode(NodeConfig(home=tmp_path), lambda _: None, sign(Manifest(name="tiny", rounds=50), author))
    made._membership.published = made._own_stage.shown(made._life.state)
    return made


@pytest.fixture
def disk(node: TrainingNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow = Disk()
    monkeypatch.setattr(atomic_files.os, "fsync", slow.fsync)
    yield slow
    slow.ready.set()


async def test_looking_at_the_limits_waits_for_no_disk(node: TrainingNode, disk: Disk) -> None:
    await node._policy.traffic.sending(5)
    async with asyncio.timeout(20):
        await node._check_limits()
    assert not disk.asked.is_set(), "that is another duty's"


async def test_a_pause_begins_at_once_and_is_answered_when_a_restart_would_find_it(
    node: TrainingNode, disk: Disk, tmp_path: Path
) -> None:
    pausing = asyncio.create_task(node.pause())
    await asyncio.to_thread(disk.asked.wait, 60)
    assert node._policy.held_back() == PAUSED and not pausing.done()
    disk.ready.set()
    await pausing
    assert (tmp_path / "paused").exists()


async def test_a_resume_while_the_pause_is_being_written_counts(node: TrainingNode, disk: Disk, tmp_path: Path) -> None:
    pausing = asyncio.create_task(node.pause())
    await asyncio.to_thread(disk.asked.wait, 60)
    resuming = asyncio.create_task(node.resume())
    await asyncio.sleep(0)
    assert node._policy.held_back() is None
    disk.ready.set()
    await asyncio.gather(pausing, resuming)
    assert not (tmp_path / "paused").exists()
