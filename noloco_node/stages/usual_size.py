"""How large what a neighbouring stage sends usually is: what is much larger is made shorter, or refused.

A gradient of a million times the usual length would be this stage's whole step, whatever the clip; one of the usual
length is one of many. The middle of the last ones of each sender decides, and the middle of all senders: neither a
sender of very small ones nor one of very large ones moves it while others send, however much it sends. Of a longer one
only what counted is remembered: one that is long now and then does not move its own either. One whose square overflows
counts for nothing, and so does one of zeros, beside which everything would be long. Pure.
"""

import math
from collections import deque
from statistics import median, median_high

from noloco_node.base.latest import remember

MOST = 16.0
"""Times the middle of the last ones. *(Tried with 4: honest gradients of the first 50 steps were made shorter.)*"""
REMEMBERED, LEAST = 64, 8
"""From so many of a sender its usual size is known; before, everything counts as usual."""
SENDERS = 64


class UsualSize:
    def __init__(self, most: float = MOST) -> None:
        self._most = most
        self._senders: dict[str, deque[float]] = {}

    def factor(self, size: float, sender: str = "") -> float:
        """What to multiply by, at most 1. It counts from then on. 0: not finite, so lose it; it is not remembered, else
        half of the first ones could leave the check without a measure."""
        if not math.isfinite(size):
            return 0.0
        if size <= 0:
            return 1.0
        sizes = self._senders.get(sender) or deque(maxlen=REMEMBERED)
        known = [median(each) for each in self._senders.values() if len(each) >= LEAST]
        most = self._most * median_high(known) if known else math.inf
        sizes.append(min(size, self._most * median(sizes) if len(sizes) >= LEAST else math.inf))
        remember(self._senders, sender, sizes, SENDERS)
        return min(1.0, most / size)
