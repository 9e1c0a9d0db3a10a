"""How large what a neighbouring stage sends usually is: what is much larger is made shorter, or refused.

A gradient of a million times the usual length would be this stage's whole step, whatever the clip; one of the usual
length is one of many. The middle of the last ones decides, and what is remembered of a longer one is only what counted:
a liar that sends less than half of them does not move it. One whose square overflows counts for nothing. Pure.
"""

import math
from collections import deque
from statistics import median

MOST = 16.0
"""Times the middle of the last ones. *(Tried with 4: honest gradients of the first 50 steps were made shorter.)*"""
REMEMBERED, LEAST = 64, 8
"""From so many it is known; before, everything counts as usual."""


class UsualSize:
    def __init__(self, most: float = MOST) -> None:
        self._most = most
        self._sizes: deque[float] = deque(maxlen=REMEMBERED)

    def factor(self, size: float) -> float:
        """What to multiply by, at most 1. It counts from then on. 0: not finite, so lose it; it is not remembered, else
        half of the first ones could leave the check without a measure."""
        if not math.isfinite(size):
            return 0.0
        most = self._most * median(self._sizes) if len(self._sizes) >= LEAST else float("inf")
        counted = min(size, most)
        self._sizes.append(counted)
        return counted / size if size > 0 else 1.0
