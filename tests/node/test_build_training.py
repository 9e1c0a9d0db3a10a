"""What a node and `check` build and try out before anything is trained."""

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
from noloco_node.training.mailbox import Failed


@pytest.mark.parametrize("stage", [1, 2])
def test_each_stage_of_an_installed_task_is_tried_out(stage: int, tmp_path: Path) -> None:
    """Its losses are not: other stages have to do with them."""
    config = NodeConfig(home=tmp_path, device="cpu", threads=1, stage=stage)
    with closing(build_training.build(staged_run(rounds=1), config, "a", Sources())) as replica:
        assert replica.is_stage


def test_of_a_node_that_cannot_resume_torch_holds_nothing(tmp_path: Path) -> None:
    """Its weights would stay in memory as long as the notebook in which somebody tries again."""

    def resume(*_: object) -> bool:
        raise Incompatible("a newer version wrote it")

    keeper, made, posted = SimpleNamespace(folder=lambda: tmp_path, resume=resume), torch.nn.Linear(2, 2), Queue[Any]()
    loop = Loop(made, torch.optim.AdamW(made.parameters()), None, Turns())
    run = Manifest(name="loop", model=ModelSpec(task="mine"), inner=InnerSpec(steps=4, batch_tokens=16))
    before, config = {*_global_optimizer_pre_hooks}, NodeConfig(home=tmp_path, device="cpu")
    build_training.start(run, config, "a", Sources(), cast("Any", keeper), posted.put, brought=loop)
    failed = posted.get(timeout=60)
    assert isinstance(failed, Failed) and isinstance(failed.error, Incompatible)
    assert {*_global_optimizer_pre_hooks} == before
