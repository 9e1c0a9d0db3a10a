"""`export --average` of a node whose network daemon is down: it asks the peers that it saw last, and does not fail."""

from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from types import SimpleNamespace

from noloco_node.base.identity import Identity
from noloco_node.base.states import NodeState
from noloco_node.host.config import NodeConfig
from noloco_node.node.trainer import TrainingNode
from noloco_node.peers.directory import Directory
from noloco_node.peers.record import PeerRecord
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest, ModelSpec
from noloco_node.views.gather import GatherView


class GivenPeers:
    """Records which peers it was given."""

    def __init__(self) -> None:
        self.given: Collection[PeerRecord] | None = None

    async def gather(self, own: object, thread: object, seen: Collection[PeerRecord], *_: object) -> AsyncGenerator:
        self.given = list(seen)
        yield GatherView(failure="enough")


async def test_an_outage_costs_an_export_only_its_fresh_look(tmp_path: Path) -> None:
    author = Identity.load_or_create(tmp_path / "author.key")
    run = Manifest(name="tiny", rounds=5)
    trainer = TrainingNode(NodeConfig(home=tmp_path / "home"), lambda _: None, sign(run, author))
    collector, record = GivenPeers(), SimpleNamespace(stage=0)
    directory = Directory(SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: "us")), (), author, run.run_id)
    trainer._collector = collector
    trainer._rules, trainer._ready, trainer._thread = (
        SimpleNamespace(run=run),
        SimpleNamespace(layout=bytes(32), parameters=1),
        object(),
    )
    trainer._life = SimpleNamespace(state=NodeState.TRAINING)
    trainer._membership._directory = directory  # as between two network daemons: not entered
    trainer._membership.seen = {"peer": record}
    assert [view.failure async for view in trainer.gather(1)] == ["enough"]
    assert collector.given == [record]


async def test_nothing_is_fetched_of_a_run_whose_model_cannot_be_exported(tmp_path: Path) -> None:
    author = Identity.load_or_create(tmp_path / "author.key")
    run = Manifest(name="pictures", model=ModelSpec(task="blobs"))
    trainer = TrainingNode(NodeConfig(home=tmp_path / "home"), lambda _: None, sign(run, author))
    trainer._rules, trainer._thread = SimpleNamespace(run=run), object()
    trainer._ready = SimpleNamespace(layout=bytes(32), parameters=1)
    trainer._life = SimpleNamespace(state=NodeState.TRAINING)
    (view,) = [view async for view in trainer.gather(1)]
    assert "trains the task blobs, which is no language model" in view.failure and view.exit_code == 2
