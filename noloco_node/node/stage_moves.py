"""Whether a node leaves its stage for a thinner one. When is decided by stages/balance.py; here is who may move, and to
which stages. node/main.py then runs the node again, at the other stage.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from noloco_node.data import sources
from noloco_node.data.sources import Sources
from noloco_node.errors import UsageError
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.node import which_stage
from noloco_node.peers.record import PeerRecord
from noloco_node.peers.run_rules import RunRules
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.stages.balance import Balance
from noloco_node.stages.part import Position


@dataclass(frozen=True, slots=True)
class Move:
    """From a stage to a thinner one."""

    stage: int
    """From 1, as is the other."""
    to: int
    signed: Signed


class StageMoves:
    def __init__(
        self, config: NodeConfig, home: Home, peer_id: str, data: Sources, known: Callable[[str], bool]
    ) -> None:
        """`known`: whether this node has committed a round with a peer."""
        self._home, self._data, self._known, self._balance = home, data, known, Balance(peer_id)
        self._free = config.stage is None and config.rounds is None and bool(config.bootstrap)
        """Not who was told where to stay or for how long, nor the first node, by which others come."""

    def due(self, now: float, at: Position, rules: RunRules, others: Collection[PeerRecord]) -> Move | None:
        """The move to make now. To be called at each look at the other nodes, while this one trains and can save."""
        if not self._free:
            return None
        run, holding = rules.run, which_stage.holding(others)
        to = self._balance.moves_to(now, at, holding, self._known, lambda *stage: self._may_take(run, *stage))
        return None if to is None else Move(at.number, to, rules.signed)

    def _may_take(self, run: Manifest, stage: int, nodes: int) -> bool:
        """Where somebody has its state, or this home has, and the data for it."""
        if not (nodes or which_stage.is_kept(self._home.run(run.run_id), stage)):
            return False
        with suppress(UsageError):
            if stage == 1:
                sources.check(run.data, self._data)
            return True
        return False
