"""How large what a neighbouring stage sends usually is: what is much larger is made shorter, or refused.

A gradient of a million times the usual length would be this stage's whole step, whatever the clip; one of the usual
length is one of many. The middle of the last ones of each sender decides, and the middle of all senders that were heard
lately: neither one that sends very small ones nor one that sends very large ones moves it while others send, however
much it sends. What is refused counts, too, else nobody could speak against a sender that came first; of a longer one
only what is usual for its sender. One whose square overflows counts for nothing, and so does one of zeros, beside which
everything would be long. Pure.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_high

from noloco_node.base.latest import remember

MOST = 16.0
"""Times the middle of the last ones. *(Tried with 4: honest gradients of the first 50 steps were made shorter.)*"""
REMEMBERED, LEAST = 64, 8
"""From so many of a sender its usual size is known; before, everything counts as usual."""
SENDERS = 64
HEARD_S = 120.0
"""What a sender sent does not count for longer after its last one."""


@dataclass(slots=True)
class _Sender:
    sizes: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    heard_at: float = 0.0

    @property
    def usual(self) -> float:
        return median(self.sizes) if len(self.sizes) >= LEAST else math.inf


class UsualSize:
    def __init__(self, most: float = MOST) -> None:
        self._most = most
        self._senders: dict[str, _Sender] = {}

    def factor(self, size: float, now: float = 0.0) -> float:
        """What to multiply by, at most 1. 0: not finite, so lose it."""
        if not math.isfinite(size):
            return 0.0
        usual = [each.usual for each in self._senders.values() if each.heard_at >= now - HEARD_S]
        known = [size for size in usual if size < math.inf]
        return min(1.0, self._most * median_high(known) / size) if known and size > 0 else 1.0

    def counts(self, size: float, sender: str = "", now: float = 0.0) -> None:
        """From now on, for what is usual."""
        if not math.isfinite(size) or size <= 0:
            return
        found = self._senders.get(sender)
        if found is None or found.heard_at < now - HEARD_S:
            found = _Sender()
        found.sizes.append(min(size, self._most * found.usual))
        found.heard_at = now
        remember(self._senders, sender, found, SENDERS)
