"""Three stages of a small model in one process, a node each, over the in-memory network: what passes through the one in
the middle, by its state and its volunteer's limits."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memory_network.network import MemoryNetwork
from replicas import small_text
from stage_pairs import staged_run
from stage_swarm import Inline
from test_which_stage import holders

from noloco_node.base.states import NodeState
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.host.limits import PAUSED, QUOTA
from noloco_node.node.own_stage import OwnStage
from noloco_node.run.admission import refuses_nobody
from noloco_node.stages.part import Position
from noloco_node.stages.passes import EVALUATION_S
from noloco_node.stages.service import StageService
from noloco_node.training.build import build_replica
from noloco_node.training.inner.gradients import NotMeasured
from noloco_node.wire.stage_pb2_grpc import add_StageServicer_to_server

RUN = staged_run(3)
RULES: Any = SimpleNamespace(run=RUN, refuses=refuses_nobody)


class Node:
    def __init__(self, network: MemoryNetwork, stage: int, folder: Path) -> None:
        self.state, self.hold = NodeState.TRAINING, None
        self.transport = network.join(f"{stage}")  # the names that `holders` gives
        self.service = StageService(self.transport, random.Random(1), lambda peer, reason: None)
        self.transport.serve(lambda server: add_StageServicer_to_server(self.service, server))
        home: Any = (NodeConfig(home=folder), Home(folder), f"{stage}", None)
        self.own = OwnStage(*home, self.service, lambda _: False, None, print)
        self.own.at = Position(stage, 3)
        part = self.own.part(RUN)
        self.replica = build_replica(RUN, f"{stage}", device="cpu", threads=1, corpus=small_text(), part=part)
        self.own.begin(RULES, b"", lambda: self.state, lambda: self.hold)

    @property
    def task(self) -> Any:
        return self.service._task


class Chain:
    def __init__(self, folder: Path) -> None:
        network = MemoryNetwork(random.Random(1))
        self.nodes = [Node(network, stage, folder) for stage in range(3)]
        self.first, self.middle, self.last = self.nodes

    async def start(self) -> None:
        for node in self.nodes:
            await node.transport.start()
        self.look()

    def look(self) -> None:
        for at, node in enumerate(self.nodes):
            seen = [holders(1, 2, 3, state=each.own.shown(each.state))[k] for k, each in enumerate(self.nodes)]
            node.own.update(seen[:at] + seen[at + 1 :], 0, RUN.rounds)

    async def passes(self, within_s: float = 60.0) -> bool:
        """Whether three micro-batches come through the first stage meanwhile; and how fast the machine is, each node
        has some hundred turns."""
        goal, until, turns = self.first.task.counts.passed + 3, time.monotonic() + within_s, itertools.count()
        while (next(turns) < 200 or time.monotonic() < until) and self.first.task.counts.passed < goal:
            for node in self.nodes:
                if node.state is NodeState.FINISHED:
                    node.replica.pass_on(0.001)
                elif node.replica.has_data(0):
                    node.replica.step()
            await asyncio.sleep(0.0005)
        return bool(self.first.task.counts.passed >= goal)

    async def close(self) -> None:
        for node in self.nodes:
            await node.service.close()
            await node.transport.close()


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Chain]:
    asyncio.get_running_loop().set_default_executor(Inline())
    there = Chain(tmp_path)
    await there.start()
    yield there
    await there.close()


async def test_a_middle_stage_that_has_finished_passes_micro_batches_on(three: Chain) -> None:
    """Else the first stage, which has rounds to do, would never get an answer."""
    three.middle.state = NodeState.FINISHED
    three.look()
    assert await three.passes()


@pytest.mark.parametrize("hold", [PAUSED, QUOTA])
async def test_a_stage_that_has_finished_keeps_to_its_volunteers_limits(three: Chain, hold: str) -> None:
    three.middle.state, three.middle.hold = NodeState.FINISHED, hold
    assert not await three.passes(0.2)
    assert three.middle.service.totals.refused and not three.middle.service.totals.sent_bytes
    assert three.middle.own.shown(NodeState.FINISHED) is NodeState.PAUSED, "so others do not ask it"
    three.middle.hold = None
    assert await three.passes()


@pytest.mark.parametrize("where", [0, 1, 2])
async def test_while_micro_batches_cannot_come_back_the_first_stage_reads_nothing(three: Chain, where: int) -> None:
    """Its own limits keep it back, or all of one of the stages behind it."""
    assert await three.passes()
    node, first = three.nodes[where], three.first.task
    node.state, node.hold = NodeState.SOLO, QUOTA
    three.look()
    await three.passes(0.5)  # what was under way comes to its end
    lost, reader, size = first.counts.lost, first.reader.position, first.window.size
    assert not await three.passes(0.5)
    assert (first.counts.lost, first.reader.position, first.window.size) == (lost, reader, size)
    began = time.monotonic()
    with pytest.raises(NotMeasured):
        three.first.replica.evaluate()
    assert time.monotonic() - began < EVALUATION_S / 2, "no answer is waited for"
    node.state, node.hold = NodeState.TRAINING, None
    three.look()
    assert await three.passes()


async def test_the_last_stage_ends_with_the_run_and_not_with_the_rounds_of_those_before_it(three: Chain) -> None:
    """The first and the middle stage have volunteers who wanted fewer rounds; the first is tried again."""
    assert await three.passes()
    first, middle = holders(1, 2, state="finished", round=2)
    own = three.last.own
    assert own.update([replace(first, ended=2), replace(middle, ended=2)], 1, 2) == 2, "it wants no more either"
    assert not own.update([replace(first, ended=2), replace(middle, ended=2)], 2, RUN.rounds)
    assert not own.update([replace(first, state="training"), replace(middle, ended=2)], 2, RUN.rounds)
    serves = replace(middle, round=RUN.rounds)
    assert not own.update([replace(first, state="training"), serves], 2, RUN.rounds), "it passes on what comes"
    left = replace(middle, state="leaving", round=RUN.rounds - 2, ended=RUN.rounds)
    assert own.update([left], 2, RUN.rounds) == RUN.rounds, "it had fewer micro-batches than its rounds needed"
