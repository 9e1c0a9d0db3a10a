"""Which peers of the next stage send gradients that the others do not: found by asking two for the same micro-batch.

A wrong gradient of the usual length looks like any other, and this stage knows no loss of its own. But honest replicas
of a stage are close to each other, so the gradients that they send for the same activations point the same way. A peer
that points elsewhere than others who agree among themselves is the one that is wrong; with two peers that differ it
cannot be told which. Pure.
"""

from collections import deque
from itertools import combinations
from statistics import fmean

APART = 0.2
"""Mean cosine of two peers' gradients below which they do not agree. Random ones have 0, a turned sign -1."""
LEAST, REMEMBERED = 3, 8
"""Comparisons of two peers before they count, and the last ones that do."""


class Agreement:
    def __init__(self) -> None:
        self._cosines: dict[frozenset[str], deque[float]] = {}

    def compared(self, one: str, other: str, cosine: float) -> None:
        self._cosines.setdefault(frozenset((one, other)), deque(maxlen=REMEMBERED)).append(cosine)

    def forget(self, peer: str) -> None:
        self._cosines = {pair: found for pair, found in self._cosines.items() if peer not in pair}

    def wrong(self) -> set[str]:
        """Those that others who agree among themselves do not agree with, where these are more than its own side."""
        peers = {peer for pair in self._cosines for peer in pair}
        return {peer for peer in peers if self._against(peer, peers) > 1 + len(self._related(peer, peers, agree=True))}

    def _against(self, peer: str, peers: set[str]) -> int:
        """How many others do not agree with it, and do with another one of these."""
        against = self._related(peer, peers, agree=False)
        return len({one for pair in combinations(against, 2) if self._agrees(*pair) for one in pair})

    def _related(self, peer: str, peers: set[str], *, agree: bool) -> list[str]:
        return [other for other in sorted(peers - {peer}) if self._agrees(peer, other) is agree]

    def _agrees(self, one: str, other: str) -> bool | None:
        """None: not known yet."""
        found = self._cosines.get(frozenset((one, other)), ())
        return fmean(found) >= APART if len(found) >= LEAST else None
