"""What a node and `check` build and try out before anything is trained."""

import gc
import threading
from contextlib import closing
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from stage_swarm import staged_run
from torch.optim.optimizer import _global_optimizer_pre_hooks

from noloco_node.data.sources import Sources
from noloco_node.errors import Incompatible
from noloco_node.host.config import NodeConfig
from noloco_node.loop.task import Loop
from noloco_node.loop.turns import Turns
from noloco_node.node import build_training
from noloco_node.run.schema import InnerSpec, Manifest, ModelSpec
from noloco_node.training.mailbox import Failed, Ready
from noloco_node.training.replica import Replica
from noloco_node.training.task import Task


@pytest.mark.parametrize("stage", [1, 2])
def test_each_stage_of_an_installed_task_is_tried_out(stage: int, tmp_path: Path) -> None:
    """Its losses are not: other stages have to do with them."""
    config = NodeConfig(home=tmp_path, device="cpu", threads=1, stage=stage)
    with closing(build_training.build(staged_run(rounds=1), config, "a", Sources())) as replica:
        assert replica.is_stage


RUN = Manifest(name="loop", model=ModelSpec(task="mine"), inner=InnerSpec(steps=4, batch_tokens=16))


def own_loop() -> Loop:
    made = torch.nn.Linear(2, 2)
    return Loop(made, torch.optim.AdamW(made.parameters()), None, Turns())


def test_of_a_node_that_cannot_resume_torch_holds_nothing(tmp_path: Path) -> None:
    """Its weights would stay in memory as long as the notebook in which somebody tries again."""

    def resume(*_: object) -> bool:
        raise Incompatible("a newer version wrote it")

    keeper, posted = SimpleNamespace(folder=lambda: tmp_path, resume=resume), Queue[Any]()
    before, config = {*_global_optimizer_pre_hooks}, NodeConfig(home=tmp_path, device="cpu")
    build_training.start(RUN, config, "a", Sources(), cast("Any", keeper), posted.put, brought=own_loop())
    failed = posted.get(timeout=60)
    assert isinstance(failed, Failed) and isinstance(failed.error, Incompatible)
    assert {*_global_optimizer_pre_hooks} == before


def test_a_node_that_has_ended_holds_no_slow_weights(tmp_path: Path) -> None:
    """They are as much as the model twice, on its GPU, and the swarm that a notebook keeps holds the node."""
    keeper, posted, loop = SimpleNamespace(folder=lambda: tmp_path, resume=lambda *_: False), Queue[Any](), own_loop()
    config = NodeConfig(home=tmp_path, device="cpu")
    thread = build_training.start(RUN, config, "a", Sources(), cast("Any", keeper), posted.put, brought=loop)
    assert isinstance(posted.get(timeout=60), Ready)

    def replicas() -> list[Replica]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Replica and each.theta is loop.theta]

    assert len(replicas()) == 1
    thread.stop(60)
    assert not replicas()


def test_what_nobody_wants_any_more_is_not_built_to_its_end(tmp_path: Path) -> None:
    before, inside, go_on, posted = {*_global_optimizer_pre_hooks}, threading.Event(), threading.Event(), Queue[Any]()
    keeper, config = SimpleNamespace(folder=lambda: tmp_path), NodeConfig(home=tmp_path, device="cpu")

    def part(whole: Task) -> Task:
        inside.set()
        go_on.wait(60)
        return whole

    keeper.resume = lambda *_: posted.put("loads a checkpoint")
    thread = build_training.start(
        RUN, config, "a", Sources(), cast("Any", keeper), posted.put, part, brought=own_loop()
    )
    assert inside.wait(60)
    thread.stop(0.0)
    go_on.set()
    thread.stop(60)
    assert posted.empty() and {*_global_optimizer_pre_hooks} == before
