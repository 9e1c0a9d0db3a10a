"""What a table of peers shows of each, by the column's title."""

from collections.abc import Callable, Sequence

from noloco_node.base.peer_names import short_id
from noloco_node.base.reasons import in_words
from noloco_node.base.units import NOTHING, loss, rate, size, span
from noloco_node.terminal.table import Column
from noloco_node.views.peers import GONE, PeerRow

_WIDEST = 7


def cells(peer: PeerRow, columns: Sequence[Column]) -> list[str]:
    return [_CELLS[column.title](peer) for column in columns]


def worth_showing(columns: Sequence[Column], peers: Sequence[PeerRow]) -> list[Column]:
    """Without those that would be empty: of bad experience, among honest peers, and of stages, in a run without."""
    return [each for each in columns if each.title not in _SOME or any(_SOME[each.title](peer) for peer in peers)]


def quarantine(peer: PeerRow) -> str:
    """`12 min 30 s, taken back`: how long it lasts, and why."""
    why = f", {in_words(peer.quarantined_why)}" if peer.quarantined_why else ""
    return span(peer.quarantined_s) + why if peer.quarantined_s else NOTHING


def _cut(figure: str) -> str:
    """A figure that a peer says itself: one that is too long would take columns from all other peers."""
    return figure if len(figure) <= _WIDEST else f"{figure[: _WIDEST - 1]}…"


def _loss(value: float | None) -> str:
    return text if len(text := loss(value)) <= _WIDEST else _cut(f"{value:.0f}")


def _last_seen(peer: PeerRow) -> str:
    return NOTHING if peer.last_seen_s is None else f"{span(peer.last_seen_s)} ago"


_SOME: dict[str, Callable[[PeerRow], float]] = {
    "stage": lambda peer: peer.stage,
    "failed": lambda peer: peer.failed,
    "refused": lambda peer: peer.refused,
    "taken back": lambda peer: peer.taken_back,
    "quarantined": lambda peer: peer.quarantined_s,
}
"""Columns that are there only where a figure is not 0."""
_CELLS: dict[str, Callable[[PeerRow], str]] = {
    "peer": lambda peer: peer.name,
    "id": lambda peer: short_id(peer.peer_id),
    "run": lambda peer: peer.run or NOTHING,
    "stage": lambda peer: str(peer.stage or NOTHING),
    "state": lambda peer: peer.state,
    "round": lambda peer: NOTHING if peer.state == GONE else _cut(str(peer.round)),
    "lag": lambda peer: NOTHING if peer.state == GONE else _cut(str(peer.lag)),
    "loss": lambda peer: _loss(peer.loss),
    "eval": lambda peer: _loss(peer.eval_loss),
    "together": lambda peer: str(peer.exchanges),
    "seen": _last_seen,
    "last seen": _last_seen,
    "tokens/s": lambda peer: _cut(rate(peer.tokens_per_s)),
    "via": lambda peer: peer.via or NOTHING,
    "sent": lambda peer: size(peer.sent),
    "received": lambda peer: size(peer.received),
    "failed": lambda peer: str(peer.failed),
    "refused": lambda peer: str(peer.refused),
    "taken back": lambda peer: str(peer.taken_back),
    "quarantined": quarantine,
}
