"""Which stage a node takes: the one that is named, the one it held, the thinnest."""

import random
from pathlib import Path

import pytest

from noloco_node.errors import UsageError
from noloco_node.host import remembered
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.node import which_stage
from noloco_node.peers.record import PeerRecord
from noloco_node.run.schema import Manifest, StagesSpec
from noloco_node.stages.part import Position

RUN = Manifest(name="staged", stages=StagesSpec(count=3))


def holders(*stages: int, state: str = "training") -> list[PeerRecord]:
    of_all = {"round": 3, "step": 9, "progress": 0.1, "loss": 2.0, "tokens_per_s": 9.0, "tokens": 99, "addresses": ()}
    now = {"boot": b"b" * 16, "started": 1.0, "time": 2.0, "version": "1", "peers": 0, "expires": 60.0}
    return [PeerRecord(peer_id=f"{at}", state=state, stage=stage, **of_all, **now) for at, stage in enumerate(stages)]


async def chosen(home: Path, others: list[PeerRecord], stage: int | None = None) -> Position:
    async def look() -> list[PeerRecord]:
        return others

    return await which_stage.choose(look, RUN, 3, NodeConfig(home=home, stage=stage), Home(home).create())


def test_the_thinnest_is_the_one_that_fewest_hold() -> None:
    rng = random.Random(1)
    assert which_stage.thinnest(holders(1, 1, 2, 3, 3), 3, rng) == 2
    assert which_stage.thinnest(holders(1, 3), 3, rng) == 2
    assert which_stage.thinnest(holders(2) + holders(1, 3, state="leaving"), 3, rng) == 1, "the first empty one"
    assert {which_stage.thinnest(holders(1, 2, 2, 3), 3, rng) for _ in range(40)} == {1, 3}


async def test_the_named_one_comes_first_then_the_one_it_held(tmp_path: Path) -> None:
    assert await chosen(tmp_path, holders(1, 2), stage=1) == Position(0, 3)
    assert await chosen(tmp_path, holders(1, 2)) == Position(2, 3)
    remembered.keep(Home(tmp_path), {"stage": 2}, RUN.run_id, "author")
    assert await chosen(tmp_path, holders(1, 2, 2)) == Position(1, 3)
    with pytest.raises(UsageError, match="this home holds stage 2"):
        await chosen(tmp_path, [], stage=3)
    with pytest.raises(UsageError, match="from 1 to 3"):
        await chosen(tmp_path, [], stage=4)
