"""When a node leaves its stage for a thinner one. Pure: time is an argument.

A node moves where its stage has APART nodes more than the thinnest one: a move then makes the two more alike, so moves
end, and the last node of a stage stays. Each node decides by itself, from presence records, so that nobody else may
move at the same time: the nodes of all stages that are so full have their turns one after the other, in the order of
their ids, and whose turn it is moves only where everything has looked the same for HOLD_S. In a swarm whose nodes come
and go all the time nobody moves: there, those who come take the thinnest stage.

Of its own stage a node counts only those that it has committed a round with: made-up ones move nobody.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from noloco_node.stages.part import Position

APART = 2
"""With one node more, a move would only change which of the two stages has it."""
HOLD_S = 60.0
"""As long as a presence record lasts: who is still seen is there, and who restarts is back."""
TURN_S = 35.0
"""By then the others see that one has gone: it says so within 10 s of leaving, and they look every 5. They saw the move
before that one sooner or later by as much, so their turns begin up to 15 s apart."""


class Balance:
    def __init__(self, peer_id: str) -> None:
        self._peer_id = peer_id
        self._look: object = None
        self._since = 0.0

    def moves_to(
        self,
        now: float,
        at: Position,
        others: Mapping[str, int],
        known: Callable[[str], bool],
        may_take: Callable[[int, int], bool],
    ) -> int | None:
        """The stage to take now, from 1. To be called at each look. `others`: the stage of each other node of the run;
        `known`: whether this node has committed a round with it; `may_take`: called with a stage and how many hold
        it."""
        holders = Counter([*others.values(), at.number])
        to = _thinner(at, holders, 1 + sum(known(peer) for peer, held in others.items() if held == at.number), may_take)
        look = to and (to, dict(holders))
        if look != self._look:
            self._look, self._since = look, now
        if to is None:
            return None
        full = {stage for stage, nodes in holders.items() if nodes >= holders[to] + APART}
        turn = sum(peer < self._peer_id and held in full for peer, held in others.items())
        return to if now - self._since >= HOLD_S + TURN_S * turn else None


def _thinner(at: Position, holders: Mapping[int, int], own: int, may_take: Callable[[int, int], bool]) -> int | None:
    some = (stage for stage in range(1, at.stages + 1) if holders.get(stage, 0) + APART <= own)
    thin = [stage for stage in some if stage != at.number and may_take(stage, holders.get(stage, 0))]
    return min(thin, key=lambda stage: holders.get(stage, 0), default=None)
