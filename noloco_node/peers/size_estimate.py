"""How many peers a run has, as far as one of them can tell, and what follows: where to stand and where to look.

The peers of a large run are spread over buckets by a hash of their ids: 2^depth of them, so that about BUCKET stand in
each. Nobody is told how many there are. Who reads a bucket of depth d and finds n in it counts n · 2^d; estimates
differ, so each peer stands at two neighbouring depths, and readers who are half an octave apart still find everybody.
At depth 0, the doorstep, everybody stands now and then: few enough at a time to be read at once, enough for whoever is
new, or on an island of its own, to learn how large the run is. So what a node does in a minute depends on no number of
peers. Knows no network, no time and no chance but what it is handed.
"""

import math
from collections import deque
from collections.abc import Sequence
from random import Random
from statistics import fmean, median_low

BUCKET = 24
"""Peers in a bucket: candidates enough for many rounds, 12 kB to read."""
MAX_DEPTH = 16
"""A million and a half peers."""
REMEMBERED = 6
"""Counts that an estimate is the mean of: each of a bucket with 24 peers is off by a fifth."""
DOORSTEP_EVERY = 8
"""Reads, of which one is of the doorstep: an island that meets a continent notices within a minute."""
WITNESSES = 4
"""So many have to say that the run is far larger than it looks from here."""


class SizeEstimate:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._counts: deque[float] = deque(maxlen=REMEMBERED)
        self._reads = 0

    @property
    def known(self) -> bool:
        return bool(self._counts)

    @property
    def peers(self) -> int:
        """This one too."""
        return max(1, round(fmean(self._counts))) if self._counts else 1

    def stands_at(self) -> set[int]:
        """The depths for the next record."""
        depth = min(int(self._octaves), MAX_DEPTH - 1)
        on_the_doorstep = self._rng.random() < 0.5**depth
        return {depth, depth + 1} | ({0} if on_the_doorstep else set())

    def looks_at(self) -> int:
        """The depth of the next bucket to read; which one of that depth is drawn uniformly."""
        self._reads += 1
        if not self._counts or self._reads % DOORSTEP_EVERY == 0:
            return 0
        return min(round(self._octaves), MAX_DEPTH)

    def found(self, depth: int, count: int, said: Sequence[int]) -> None:
        """What a bucket held, ourselves counted if it is ours, and how many peers those in it believe in."""
        believed = median_low(said) if said else 0
        if depth == 0 and len(said) >= WITNESSES and believed > 1.5 * max(self.peers, count):
            self._counts.clear()
            self._counts.append(min(believed, BUCKET << MAX_DEPTH))
        elif not self.passes_by(depth):
            self._counts.append(count * 2**depth)

    def passes_by(self, depth: int) -> bool:
        """Whether those at this depth are only a few of those who stand there now and then: no even sample."""
        return depth == 0 and round(self._octaves) > 0

    @property
    def _octaves(self) -> float:
        """How often a bucket has to be halved."""
        return max(0.0, math.log2(self.peers / BUCKET))
