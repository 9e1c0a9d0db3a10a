"""What `top` looks at. Times are wall-clock seconds, as in the views."""

from dataclasses import dataclass
from typing import Literal

from noloco_node.base.states import NodeState
from noloco_node.views.history import HistoryView, Rate
from noloco_node.views.peers import PeersView
from noloco_node.views.status import StatusView

Absence = Literal["gone", "changing", "silent"]


@dataclass(frozen=True, slots=True)
class Picture:
    status: StatusView
    peers: PeersView
    history: HistoryView
    rates: tuple[Rate, ...]
    """What went over the network, up to the last answer."""
    at: float
    """When the node answered last."""
    absence: Absence | None = None
    """Why it does not answer now: nobody lives there, somebody is just starting or ending, or it keeps silent. The rest
    is what was seen last."""

    @property
    def is_rendezvous(self) -> bool:
        return self.status.state == NodeState.RENDEZVOUS
