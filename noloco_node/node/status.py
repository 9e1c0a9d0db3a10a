"""What `status` and `peers` show of a node that trains, and what its presence record says: read from its parts."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from noloco_node.base.addresses import Address
from noloco_node.base.states import AT_WORK, NodeState
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.core.standing import Standing
from noloco_node.host import memory
from noloco_node.host.policy import Policy
from noloco_node.observe import standings
from noloco_node.observe.recorder import Recorder
from noloco_node.observe.stats import SHORTENED_SWAPS, NodeStats
from noloco_node.peers import rows
from noloco_node.peers.record import PeerRecord, Presence
from noloco_node.peers.run_rules import RunRules
from noloco_node.rounds.service import RoundService
from noloco_node.training.mailbox import Ready
from noloco_node.views.peers import PeersView
from noloco_node.views.status import BytesView, GpuView, Health, MemoryView, StageView, StatusView
from noloco_node.wire.messages import sendable


def status(  # noqa: PLR0913, PLR0917
    node: StatusView,
    stats: NodeStats,
    rounds: RoundService,
    seen: Collection[PeerRecord],
    policy: Policy,
    rules: RunRules | None,
    keeper: CheckpointKeeper | None,
    ready: Ready | None,
    gpu: GpuView,
    weights: tuple[Health, ...] = (),
    stage: StageView | None = None,
) -> StatusView:
    """`node`: what every node shows (node/base.py); `seen`: peers whose records have not expired, as of `peers`."""
    run, seen_of = rules.run if rules else None, rounds.standings()
    totals, parameters = rounds.tally, ready.parameters if ready else None
    saves = (keeper, parameters) if keeper and parameters else None
    view = stats.fill(node)
    return replace(
        view,
        run_id=run.run_id if run else None,
        run=run.label if run else None,
        amended=rules.words if rules else None,
        stage=stage,
        device=ready.device if ready else None,
        parameters=parameters,
        memory=_memory(stats, ready),
        gpu=gpu,
        partner=rounds.partner or view.partner,
        bytes=BytesView(
            totals.sent_bytes,
            totals.received_bytes,
            stats.per_param_round(parameters, totals.sent_bytes - totals.unsettled_bytes),
        ),
        calls=totals.calls,
        one_sided_fragments=totals.one_sided,
        peers_seen=len(seen),
        peers_by_state=Counter(record.state for record in seen),
        peers_quarantined=len(standings.quarantined(seen_of)),
        today=policy.today(),
        checkpoint=saves[0].view(saves[1]) if saves else None,
        health=(
            *node.health,
            *weights,
            *_shortage(stats),
            *_evaluation(stats),
            *_stays_behind(stats),
            *policy.health(stats.swaps_fit, staged=stage is not None),
            *(saves[0].health(saves[1]) if saves else ()),
            *standings.health(seen_of, len(seen)),
        ),
    )


def _shortage(stats: NodeStats) -> tuple[Health, ...]:
    if stats.short_of_memory is None:
        return ()
    text = f"waiting for memory of the GPU: {stats.short_of_memory}"
    return (Health("warning", text, "training goes on when other programs have ended there"),)


def _evaluation(stats: NodeStats) -> tuple[Health, ...]:
    loss, first = stats.eval_loss, stats.eval_loss_first
    if loss is None or first is None:
        return ()
    if not math.isfinite(loss):
        text = f"evaluation: the loss on held-out data is {loss}, so swaps are not judged and others see no loss"
        return (Health("warning", text, "check the held-out data, and how the run's task measures its loss"),)
    if loss <= 0 < first:
        text = "evaluation: the loss has passed zero. Swaps are judged by shares of it, so honest ones are taken back"
        return (Health("warning", text, "the run's author adds a constant to the task's loss, in another run"),)
    return ()


def _stays_behind(stats: NodeStats) -> tuple[Health, ...]:
    """A swap moves a node no further than twice what it moves itself in a phase."""
    if stats.shortened_to is None:
        return ()
    text = (
        f"weights: this node could take at most {stats.shortened_to:.0%} of most of its last {SHORTENED_SWAPS} "
        "corrections, as it trains too little in a phase for them: its model stays behind the others'"
    )
    remedy = (
        "give it a faster device or more --threads, or leave the run to faster machines: theirs are not held back, so "
        "take the model from one of them"
    )
    return (Health("warning", text, remedy),)


def _memory(stats: NodeStats, ready: Ready | None) -> MemoryView:
    limits = (ready.device_limit_bytes, ready.host_limit_bytes) if ready else (None, None)
    return MemoryView(stats.device_bytes, limits[0], memory.process_bytes(), limits[1])


def peers(
    own: Recorder, seen: Collection[PeerRecord], via: Callable[[str], str | None], seen_of: Mapping[str, Standing]
) -> PeersView:
    """`seen_of`: what this node has seen of them itself. A record may be many short rounds old, so a peer's round is
    compared with this node's of the same moment."""
    now, then = time.time(), own.curves.round_at
    living = [rows.row(record, then(record.time), now, via(record.peer_id)) for record in seen]
    return PeersView(tuple(own.stats.fill_row(row) for row in standings.fill(living, seen_of)))


def presence(  # noqa: PLR0913, PLR0917
    state: NodeState,
    stats: NodeStats,
    addresses: Collection[Address],
    amendment: int = 0,
    admission: bytes = b"",
    stage: int = 0,
    ended: int = 0,
) -> Presence:
    now = stats.last if state in AT_WORK else None  # a rate is one of now
    return Presence(
        state=state,
        round=stats.round,
        step=stats.step,
        loss=sendable(stats.last.loss if stats.last else None),
        tokens_per_s=(now.tokens_per_s if now else None) or 0.0,
        addresses=tuple(addresses),
        eval_loss=sendable(stats.eval_loss),
        partner=stats.last_round.partner if stats.last_round else "",
        committed=stats.committed,
        amendment=amendment,
        admission=admission,
        stage=stage,
        ended=ended,
    )
