"""What `top` shows. Times are wall-clock seconds, as in the views."""

from dataclasses import dataclass
from typing import Literal

from noloco_node.base.states import NodeState
from noloco_node.views.history import HistoryView, Rate
from noloco_node.views.peers import PeersView
from noloco_node.views.status import StatusView

Absence = Literal["gone", "changing", "silent"]
ABSENCES: dict[Absence, str] = {
    "gone": "no node runs here any more",
    "changing": "the node is just starting or ending",
    "silent": "the node does not answer",
}


@dataclass(frozen=True, slots=True)
class Picture:
    status: StatusView
    peers: PeersView
    history: HistoryView
    rates: tuple[Rate, ...]
    """Traffic, up to the last answer."""
    at: float
    """When the node answered last."""
    absence: Absence | None = None
    """Why it does not answer now: no node runs, one is just starting or ending, or it is silent. The other fields then
    keep their last values."""

    @property
    def is_over(self) -> bool:
        """The node has ended, and had done all its rounds."""
        target = self.status.rounds_target
        return self.absence == "gone" and target is not None and self.status.round >= target

    @property
    def is_rendezvous(self) -> bool:
        return self.status.state == NodeState.RENDEZVOUS
