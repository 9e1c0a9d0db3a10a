"""Presence records as rows of tables; and a run with its peers as seen by a node that is no member of it.

Such a node, a rendezvous or `peers --bootstrap`, has no round of its own, so lag counts from the middle one of its
peers' rounds: the highest is what any one of them says.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median_low

from noloco_node.base.peer_names import name_of
from noloco_node.base.states import AT_WORK
from noloco_node.peers.record import PeerRecord
from noloco_node.run.manifest import Signed, verify
from noloco_node.run.schema import Manifest
from noloco_node.views.peers import PeerRow, PeersView, RunView


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run and its peers."""

    run: RunView
    peers: tuple[PeerRow, ...]


def run_seen(
    signed: Signed, seen: Mapping[str, PeerRecord], now: float, via: Callable[[str], str | None] = lambda _: None
) -> RunSeen:
    run = verified(signed)
    alive = living(seen.values(), now)
    middle = median_low([record.round for record in _at_work(alive) or alive] or [0])
    rows = tuple(replace(row(record, middle, now, via(record.peer_id)), run=run.label) for record in alive)
    view = RunView(run.run_id, run.label, signed.author, run.rounds, len(alive), training(alive), middle)
    return RunSeen(view, rows)


def training(records: Iterable[PeerRecord]) -> int:
    return len(_at_work(records))


@lru_cache(maxsize=128)  # a node that knows many runs makes its views every second
def verified(signed: Signed) -> Manifest:
    return verify(signed)


def peers_view(runs: Iterable[RunSeen]) -> PeersView:
    seen = list(runs)
    return PeersView(tuple(row for one in seen for row in one.peers), tuple(one.run for one in seen))


def _at_work(records: Iterable[PeerRecord]) -> list[PeerRecord]:
    return [record for record in records if record.state in AT_WORK]


def living(records: Iterable[PeerRecord], now: float) -> list[PeerRecord]:
    return [record for record in records if record.expires > now]


def row(record: PeerRecord, round: int, now: float, via: str | None) -> PeerRow:
    """`round`: the round that `lag` is counted from."""
    return PeerRow(
        peer_id=record.peer_id,
        name=name_of(record.peer_id),
        state=record.state,
        round=record.round,
        lag=round - record.round,
        via=via,
        tokens_per_s=record.tokens_per_s or None,
        loss=record.loss or None,
        eval_loss=record.eval_loss or None,
        last_seen_s=max(0.0, now - record.time),
        stage=record.stage,
    )
