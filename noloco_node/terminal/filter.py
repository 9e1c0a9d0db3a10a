"""Which peers a table shows, and in which order: `--state`, `--name` and `--sort`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from noloco_node.base.peer_names import short_id
from noloco_node.base.states import NodeState
from noloco_node.views.peers import GONE, PeerRow, PeersView

_ORDERS: dict[str, tuple[Callable[[PeerRow], Any], bool]] = {
    "peer": (lambda row: row.name, False),
    "state": (lambda row: row.state, False),
    "round": (lambda row: row.round, True),
    "lag": (lambda row: row.lag, True),
    "via": (lambda row: row.via, False),
    "tokens/s": (lambda row: row.tokens_per_s, True),
    "loss": (lambda row: row.loss, False),
    "last-seen": (lambda row: row.last_seen_s, False),
    "sent": (lambda row: row.sent, True),
    "received": (lambda row: row.received, True),
    "together": (lambda row: row.exchanges, True),
    "failed": (lambda row: row.failed, True),
    "refused": (lambda row: row.refused, True),
    "taken-back": (lambda row: row.taken_back, True),
    "quarantined": (lambda row: row.quarantined_s, True),
}
"""By column: the value to compare, and whether the largest comes first."""

COLUMNS = tuple(_ORDERS)
STATES = (*(state.value for state in NodeState if state is not NodeState.RENDEZVOUS), GONE)
"""Of a row."""


@dataclass(frozen=True, slots=True)
class PeerFilter:
    sort: str = "together"
    """One of COLUMNS. Unknown values come last; equal ones are sorted by name."""
    state: str | None = None
    name: str | None = None
    """A part of the name or of the peer id, or the id as shortened in the table."""

    def of(self, view: PeersView) -> PeersView:
        rows = sorted(filter(self._shows, view.peers), key=lambda row: row.name)
        value, largest_first = _ORDERS[self.sort]
        known = sorted((row for row in rows if value(row) is not None), key=value, reverse=largest_first)
        return replace(view, peers=(*known, *(row for row in rows if value(row) is None)))

    def _shows(self, row: PeerRow) -> bool:
        text = self.name or ""
        is_named = text.lower() in row.name or text in row.peer_id or text == short_id(row.peer_id)
        return self.state in (None, row.state) and is_named
