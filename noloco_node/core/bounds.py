"""How far one swap may move a replica: no further than a small multiple of what the replica itself moved lately.

c = (u_j − u_i)/2 of two honest replicas is about as long as R = ‖βΔ‖, the replica's own movement in a phase, for every
stable α and γ: 0.7 to 1.5 times R by the moments of core/stability.py, at most 1.9 times in `simulate`. What AdamW
moves in a phase follows from the learning rate, so no partner can raise R. For each fragment:

- up to LONGEST times R, and HIGHEST times the largest own movement in any one element, c is applied as it is;
- beyond, both sides multiply it by the same factor, the smaller of what the two allow (rounds/swap.py), so corrections
  stay exact opposites. Two halves of a swarm that trained apart for long come together in several such steps;
- what is SCALED_AT_MOST times too long, and not small beside the weights themselves, is refused as diverged: −u, 2u or
  noise of the length of u is at least 0.5 ‖u‖ away, honest replicas were at most 0.31 ‖u‖ (12 phases apart, at the
  beginning of a training).

Whatever the codec: its corrections end here, also what it sent again.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.errors import PeerFault, PeerMisbehaved

LONGEST = 2.0
HIGHEST = 4.0
SCALED_AT_MOST = 8.0
FAR = 0.4
"""Of ‖u‖."""
PHASES = 8
"""The largest movement of so many counts: in the last phases of a schedule R falls faster than replicas come
together."""
LEAST = 0.25
"""A fragment counts as moved by at least this share of what it would be if all elements moved alike: rows of an
embedding that only the partner has trained do differ."""
STILL = 1e-3
"""Of u, both in length and in the largest element: allowed in any case, for a replica whose learning rate is 0."""
SMALLEST = 2.0**-40
"""A factor that changes nothing any more."""


@dataclass(frozen=True, slots=True)
class Movement:
    """βΔ of one boundary, for each fragment."""

    lengths: tuple[float, ...]
    peaks: tuple[float, ...]
    """The largest |βΔ|."""
    length: float = field(init=False)
    """Of the whole vector, as `peak`: known once, as every fragment of thousands asks for it."""
    peak: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", math.hypot(*self.lengths))
        object.__setattr__(self, "peak", max(self.peaks, default=0.0))

    @classmethod
    def of(cls, peaks: Tensor, squares: Tensor, fragment_blocks: int) -> "Movement":
        """From those of blocks, as `outer.BlockMovement` has them."""
        rows = [
            nn.functional.pad(part, (0, -len(part) % fragment_blocks)).view(-1, fragment_blocks)
            for part in (peaks, squares)
        ]
        both = torch.stack([rows[0].amax(1).double(), rows[1].sum(1, dtype=torch.float64).sqrt()]).tolist()
        return cls(tuple(both[1]), tuple(both[0]))


class CorrectionBounds:
    """Those of one replica, from its latest movements."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: elements of each fragment."""
        whole = sum(sizes)
        self._shares = [LEAST * math.sqrt(size / whole) for size in sizes]
        self._moved: deque[Movement] = deque(maxlen=PHASES)

    def moved(self, movement: Movement) -> None:
        """At each boundary."""
        self._moved.append(movement)

    def scale(self, index: int, c: Tensor, u: Tensor) -> float:
        """What this side allows a correction of fragment `index` to be multiplied by: above 0, at most 1. Raises
        PeerFault where it is not to be applied at all."""
        length, peak = _sizes(c)
        if not math.isfinite(length):
            raise PeerMisbehaved("nonfinite")
        longest, highest = self._allowed(index)
        if length <= longest and peak <= highest:
            return 1.0  # as nearly always: u, as long as c, is not read
        own, own_peak = _sizes(u)
        longest, highest = max(longest, STILL * own), max(highest, STILL * own_peak)
        if length > max(SCALED_AT_MOST * longest, FAR * own):
            raise PeerFault("diverged", f"fragment {index}: {length:.3g} where {longest:.3g} is usual")
        factor = min(longest / length if length else 1.0, highest / peak if peak else 1.0, 1.0)
        return float(np.float32(max(factor, SMALLEST)))  # as it is sent

    def _allowed(self, index: int) -> tuple[float, float]:
        """Length and largest element."""
        lengths = [max(m.lengths[index], self._shares[index] * m.length) for m in self._moved]
        peaks = [max(m.peaks[index], LEAST * m.peak) for m in self._moved]
        return LONGEST * max(lengths, default=0.0), HIGHEST * max(peaks, default=0.0)


def _sizes(x: Tensor) -> list[float]:
    """Length and largest element, read at once. In fp32: up to 10^19 an element, and infinite beyond."""
    if not len(x):
        return [0.0, 0.0]
    length, lowest, highest = torch.stack([torch.linalg.vector_norm(x), x.amin(), x.amax()]).tolist()
    return [length, max(-lowest, highest)]
