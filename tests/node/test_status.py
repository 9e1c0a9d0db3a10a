"""What `status` and `peers` take from the rounds: a partner's standing."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from records import RUN, record

from noloco_node.base.events import Evaluated, PhaseDone
from noloco_node.base.identity import Identity
from noloco_node.base.states import NodeState
from noloco_node.core.standing import Standing
from noloco_node.host.config import NodeConfig
from noloco_node.node import status
from noloco_node.node.trainer import TrainingNode
from noloco_node.observe.curves import Curves
from noloco_node.observe.recorder import Recorder
from noloco_node.observe.stats import SHORTENED_SWAPS, NodeStats
from noloco_node.peers.record import PeerRecord, accept, signed_record
from noloco_node.rounds.service import RoundTotals
from noloco_node.run.manifest import sign
from noloco_node.run.schema import Manifest
from noloco_node.training.mailbox import Ready
from noloco_node.views.peers import GONE
from noloco_node.views.status import GpuView, Health, StatusView

NODE = StatusView(peer_id="me", name="brisk-heron", version="0", state="training")
POLICY = cast("Any", SimpleNamespace(today=lambda: None, health=lambda *_, **__: ()))
ABSENT = "12D3KooWABSENT"


class FakeRounds:
    """A RoundService that has met two peers."""

    partner = None
    tally = RoundTotals()

    def __init__(self, here: str) -> None:
        self._here = here

    def standings(self) -> dict[str, Standing]:
        absent = Standing(taken_back=1, quarantined_s=90.0, why="taken_back")
        return {self._here: Standing(committed=5, failed=2), ABSENT: absent}


def health(stats: NodeStats) -> tuple[Health, ...]:
    """Of a node that sees nobody."""
    rounds = cast("Any", SimpleNamespace(partner=None, tally=RoundTotals(), standings=dict))
    return status.status(NODE, stats, rounds, [], POLICY, None, None, None, GpuView()).health


@pytest.fixture
def here(tmp_path: Path) -> PeerRecord:
    """The one whose presence record is seen."""
    identity, now = Identity.load_or_create(tmp_path / "identity.key"), time.time()
    found = accept(identity.peer_id, record(identity, now=now), RUN, now, ttl_s=60.0)
    assert found
    return found


def test_status_counts_the_quarantined_and_warns(here: PeerRecord) -> None:
    rounds = cast("Any", FakeRounds(here.peer_id))
    view = status.status(NODE, NodeStats(), rounds, [here], POLICY, None, None, None, GpuView(412.0, 0.97))
    assert (view.peers_seen, view.peers_quarantined, view.gpu.watts) == (1, 1, 412.0)
    assert [finding.text.partition(",")[0] for finding in view.health] == ["1 peer in quarantine"]


def test_a_peers_lag_is_counted_when_its_record_was_written(here: PeerRecord) -> None:
    own = Recorder("me")

    def lag() -> int:
        (row,) = status.peers(own, [here], lambda _: None, {}).peers
        return row.lag

    assert lag() == -here.round, "before the first round"
    for after_s, round in ((-2, here.round - 1), (-0.5, here.round + 1), (0.5, here.round + 2), (10, here.round + 12)):
        own.curves.sample(0, 0, round, here.time + after_s)
    assert lag() == 1
    own.curves = Curves("me")
    own.curves.sample(0, 0, here.round + 3, here.time + 5)
    assert lag() == 3, "this node came later"


def test_a_node_that_is_too_slow_for_the_others_corrections_says_so() -> None:
    stats = NodeStats()
    stats.allowed.extend(SHORTENED_SWAPS * [0.06])
    (finding,) = health(stats)
    assert "at most 6% of most of its last 8 corrections" in finding.text
    assert "--threads" in finding.remedy


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_node_whose_loss_is_not_finite_is_seen_and_says_so(loss: float, tmp_path: Path) -> None:
    stats = NodeStats()
    stats.observe(Evaluated(3, loss))
    identity, now = Identity.load_or_create(tmp_path / "identity.key"), time.time()
    shown = status.presence(NodeState.TRAINING, stats, [])
    sent = signed_record(identity, shown, run_id=RUN, boot=b"b" * 16, now=now)
    seen = accept(identity.peer_id, sent, RUN, now, ttl_s=60.0)
    assert seen and seen.eval_loss == 0.0, "not known"
    (finding,) = health(stats)
    assert f"the loss on held-out data is {loss}" in finding.text


@pytest.mark.parametrize(
    ("state", "rate"), [(NodeState.SOLO, 500.0), (NodeState.PAUSED, 0.0), (NodeState.FINISHED, 0.0)]
)
def test_others_are_told_a_rate_only_while_there_is_one(state: NodeState, rate: float) -> None:
    stats = NodeStats()
    stats.observe(PhaseDone(1, 50, 2.5, tokens=1000, seconds=2.0))
    assert status.presence(state, stats, []).tokens_per_s == rate


async def test_a_node_that_resumed_says_its_step_before_its_first_boundary(tmp_path: Path) -> None:
    author = Identity.load_or_create(tmp_path / "author.key")
    node = TrainingNode(NodeConfig(home=tmp_path), lambda _: None, sign(Manifest(name="tiny"), author))
    node._messages.put_nowait(Ready(1, b"", 1, round=8, step=400, device="cpu"))
    await node._model_ready()
    assert status.presence(NodeState.JOINING, node._stats, []).step == 400


@pytest.mark.parametrize(("losses", "warns"), [((0.5, 0.1), 0), ((0.5, -0.1), 1), ((-2.0, -3.0), 0)])
def test_a_loss_that_passes_zero_is_said(losses: tuple[float, ...], warns: int) -> None:
    stats = NodeStats()
    for round, loss in enumerate(losses):
        stats.observe(Evaluated(round, loss))
    assert ["has passed zero" in finding.text for finding in health(stats)] == [True] * warns


def test_peers_show_their_standing_and_who_left_in_quarantine(here: PeerRecord) -> None:
    view = status.peers(Recorder("me"), [here], lambda _: None, FakeRounds(here.peer_id).standings())
    seen, gone = view.peers
    assert (seen.peer_id, seen.failed, seen.quarantined_s) == (here.peer_id, 2, 0.0)
    assert (gone.peer_id, gone.state, gone.quarantined_why) == (ABSENT, GONE, "taken_back")
