"""How many peers a run has, as one of them estimates it, and so which buckets to write to and which to read.

The records of a large run are spread over 2^depth buckets by a hash of the peer ids, so that about BUCKET are in each.
A reader that finds n records in a bucket of depth d counts n · 2^d peers. Estimates differ, so each peer writes at two
neighbouring depths, and readers whose estimates differ by half an octave still find all. At depth 0 each peer writes
only at times: few enough at a time to be read at once, enough for a joining node, or for a part of a split swarm, to
learn how large the run is. Once it knows, it reads there as seldom as it writes. So neither a node's work in a minute
nor what the nodes answer that hold one bucket grows with the number of peers: the busiest node sends 0.1 MB/s of
records among 64, 0.2 MB/s among 1000, 4000 or 10,000 peers (simulated). What peers say of its size is believed once a
bucket at the depth of so large a run holds what it should: a few that say a million would else send everybody to
buckets where nobody is. No network and no clock here; the random generator is handed in.
"""

import math
from collections import deque
from collections.abc import Sequence
from random import Random
from statistics import fmean, median_low
from typing import NamedTuple

BUCKET = 24
"""Records in a bucket: candidates enough for many rounds, 12 kB to read."""
MAX_DEPTH = 16
"""A million and a half peers."""
REMEMBERED = 6
"""Counts whose mean is an estimate: that of one bucket with 24 peers is off by a fifth."""
DEPTH_0_EVERY = 8
"""One read in this number is of depth 0, and one in twice as many with each doubling of the buckets: of a part of a
split swarm, up to 33 peers notice the large one at their next look-up, most of 60 within two minutes."""
WITNESSES = 4
"""Peers that must report that the run is far larger than our estimate."""
CONFIRMED = 1 / 3
"""The part of what they report that a bucket must show: of 24 it holds fewer than 8 once in ten thousand times."""


class SizeEstimate:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._counts: deque[float] = deque(maxlen=REMEMBERED)
        self._claimed: _Claim | None = None
        """What peers said at the last read, which the next one checks."""

    @property
    def known(self) -> bool:
        return bool(self._counts)

    @property
    def peers(self) -> int:
        """This node included."""
        return max(1, round(fmean(self._counts))) if self._counts else 1

    def write_depths(self) -> set[int]:
        """The depths for the next record."""
        depth = min(int(self._octaves), MAX_DEPTH - 1)
        at_depth_0 = self._rng.random() < 0.5**depth
        return {depth, depth + 1} | ({0} if at_depth_0 else set())

    def read_depth(self) -> int:
        """The depth of the next bucket to read; the caller draws one of that depth uniformly."""
        if self._claimed:
            return min(round(_octaves(self._claimed.peers)), MAX_DEPTH)
        if not self._counts or self._rng.random() < 0.5 ** int(self._octaves) / DEPTH_0_EVERY:
            return 0
        return min(round(self._octaves), MAX_DEPTH)

    def found(self, depth: int, count: int, estimates: Sequence[int], *, whole: bool = True) -> None:
        """Add what was read: the records in a bucket, our own included, and the estimates that they report. `whole`:
        unless nobody answered, or most gave no records, as this node's place had fetched too many."""
        claimed, self._claimed = self._claimed, None
        reported = median_low(estimates) if estimates else 0
        if claimed and count * 2**depth >= CONFIRMED * claimed.peers:
            self._counts.clear()
            self._counts.append(claimed.peers)
        elif claimed and claimed.counts:
            self._counts.append(claimed.found)
        elif claimed:
            pass
        elif depth == 0 and len(estimates) >= WITNESSES and reported > 1.5 * max(self.peers, count):
            self._claimed = _Claim(min(reported, BUCKET << MAX_DEPTH), count, counts=not self.is_partial(depth))
        elif whole and not self.is_partial(depth):
            self._counts.append(count * 2**depth)

    def is_partial(self, depth: int) -> bool:
        """Whether a bucket of this depth holds only the few that write there now and then: no uniform sample."""
        return depth == 0 and round(self._octaves) > 0

    @property
    def _octaves(self) -> float:
        """How often the buckets have to be halved."""
        return _octaves(self.peers)


class _Claim(NamedTuple):
    peers: int
    found: int
    """How many the bucket of depth 0 held."""
    counts: bool
    """Whether that bucket was a uniform sample as far as this node knew."""


def _octaves(peers: int) -> float:
    return max(0.0, math.log2(peers / BUCKET))
