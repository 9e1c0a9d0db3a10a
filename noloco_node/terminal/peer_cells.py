"""What a table of peers shows of each, by the column's title."""

from collections.abc import Callable, Sequence

from noloco_node.base.peer_names import short_id
from noloco_node.base.units import NOTHING, loss, rate, size, span
from noloco_node.terminal.table import Column
from noloco_node.views.peers import PeerRow


def cells(peer: PeerRow, columns: Sequence[Column]) -> list[str]:
    return [_CELLS[column.title](peer) for column in columns]


def _last_seen(peer: PeerRow) -> str:
    return NOTHING if peer.last_seen_s is None else f"{span(peer.last_seen_s)} ago"


_CELLS: dict[str, Callable[[PeerRow], str]] = {
    "peer": lambda peer: peer.name,
    "id": lambda peer: short_id(peer.peer_id),
    "run": lambda peer: peer.run or NOTHING,
    "state": lambda peer: peer.state,
    "round": lambda peer: str(peer.round),
    "lag": lambda peer: str(peer.lag),
    "loss": lambda peer: loss(peer.loss),
    "eval": lambda peer: loss(peer.eval_loss),
    "together": lambda peer: str(peer.exchanges),
    "seen": _last_seen,
    "last seen": _last_seen,
    "tokens/s": lambda peer: rate(peer.tokens_per_s),
    "via": lambda peer: peer.via or NOTHING,
    "sent": lambda peer: size(peer.sent),
    "received": lambda peer: size(peer.received),
}
