"""A node that stood still, as in a machine's sleep, was left behind by the others: it takes a peer's state."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from donors import record

from noloco_node.base.identity import Identity
from noloco_node.host.config import NodeConfig
from noloco_node.host.limits import PAUSED
from noloco_node.node.lifecycle import ModelReady, Order, PauseRounds, Signal, StartCatchUp
from noloco_node.node.trainer import TrainingNode
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest
from noloco_node.state_transfer.catch_up import CATCH_UP_ROUNDS


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
    assert ordered == [PauseRounds(PAUSED)], "nobody is seen yet"
    trainer._membership.seen = {"b": record("b", CATCH_UP_ROUNDS + 1)}
    if swaps:
        trainer._rounds._under_way = SimpleNamespace(peer="b")
        trainer._update_candidates()
        trainer._rounds._under_way = None
    assert len(ordered) == 1, "the swap from before breaks in a moment"
    trainer._update_candidates()
    assert ordered[1:] == ([Order.PAUSE_TRAINING, StartCatchUp(diverged=False)] if behind else [Order.RESUME_ROUNDS])
    ordered.clear()
    trainer._life.handle(Signal.CAUGHT_UP)
    trainer._update_candidates()
    assert not ordered, "once"
