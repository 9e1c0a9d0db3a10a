"""Which peer of the next stage gets a micro-batch: drawn at random among those that answer, weighted by what each has
free; in an evaluation the same one each time. Pure: time and chance are arguments.
"""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

MOST_FREE = 4
"""What counts of a peer's free places: while they have as many, all are drawn alike; who claims more gains nothing."""
BACK_OFF_S, MOST_BACK_OFF_S = 1.0, 30.0
"""How long a peer that did not answer is left out; twice as long each time."""


@dataclass(slots=True)
class _Peer:
    free: int = MOST_FREE
    under_way: int = 0
    failures: int = 0
    """In a row."""
    again_at: float = 0.0


class Routes:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._peers: dict[str, _Peer] = {}

    def candidates(self, peers: Collection[str]) -> None:
        """Those of the next stage that train now."""
        self._peers = {peer: self._peers.get(peer, _Peer()) for peer in peers}

    @property
    def count(self) -> int:
        return len(self._peers)

    def draw(self, now: float, but: Collection[str] = ()) -> str | None:
        """`but`: those that have refused this micro-batch."""
        weights = {peer: self._weight(each, now) for peer, each in self._peers.items() if peer not in but}
        some = [peer for peer, weight in weights.items() if weight]
        return self._random.choices(some, [weights[peer] for peer in some])[0] if some else None

    def fixed(self, rank: int, now: float, count: int = 1) -> list[str]:
        """The same each time, as long as these peers answer, be it that they have no place now: with fewer than three a
        liar would be believed. `rank`: of this node among those of its stage, so that their routes lead to as many
        peers as there are: each of these needs held-out data to measure with."""
        some = sorted(peer for peer, each in self._peers.items() if each.again_at <= now or not each.failures)
        start = rank % max(1, len(some))
        return (some[start:] + some[:start])[:count]

    def others(self, peer: str, now: float) -> bool:
        """Whether another one may answer."""
        return any(other != peer and each.again_at <= now for other, each in self._peers.items())

    def sent(self, peer: str) -> None:
        if each := self._peers.get(peer):
            each.under_way += 1

    def ended(self, peer: str, free: int | None, now: float) -> None:
        """`free`: what it said with its answer; None: it gave none."""
        each = self._peers.get(peer)
        if each is None:
            return
        each.under_way = max(0, each.under_way - 1)
        if free is not None:
            each.free, each.failures = free, 0
        elif each.again_at <= now:  # else it was sent before it was left out: all that was fails at once
            each.again_at = now + min(BACK_OFF_S * 2**each.failures, MOST_BACK_OFF_S)
            each.failures = min(each.failures + 1, 10)

    def given_up(self, peer: str) -> None:
        """Its answer is not waited for; that says nothing of it."""
        if each := self._peers.get(peer):
            each.under_way = max(0, each.under_way - 1)

    def full(self, peer: str, now: float) -> None:
        """It has no place now."""
        if each := self._peers.get(peer):
            each.under_way, each.free = max(0, each.under_way - 1), 0
            each.again_at = now + BACK_OFF_S / 4

    def _weight(self, each: _Peer, now: float) -> float:
        if each.again_at > now:
            return 0.0
        return float(min(each.free, MOST_FREE)) or (0.0 if each.under_way else 1.0)
