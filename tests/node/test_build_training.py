"""What a node and `check` build and try out before anything is trained."""

from contextlib import closing
from pathlib import Path

import pytest
from stage_swarm import staged_run

from noloco_node.data.sources import Sources
from noloco_node.host.config import NodeConfig
from noloco_node.node import build_training


@pytest.mark.parametrize("stage", [1, 2])
def test_each_stage_of_an_installed_task_is_tried_out(stage: int, tmp_path: Path) -> None:
    """Its losses are not: other stages have to do with them."""
    config = NodeConfig(home=tmp_path, device="cpu", threads=1, stage=stage)
    with closing(build_training.build(staged_run(rounds=1), config, "a", Sources())) as replica:
        assert replica.is_stage
