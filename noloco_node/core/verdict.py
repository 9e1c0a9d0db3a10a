"""Whether a swap did harm: by what this replica itself measures on held-out data, before and after.

A training loss that stays finite proves nothing: after u' = -u it sits at that of a uniform guess. An honest swap
makes a model better or about the same *(tried, four replicas from scratch, 2 of 20 steps late: of 80 honest corrections
each changed the held-out loss by -3.5 to +1%; random directions just inside the bounds raised it by 1.2 to 13%, -u by
20% and more)*. But two halves of a swarm that trained apart for 12 phases first become 4 to 6% worse together: there
the partner is as good as we are, and only the way between is worse. A liar's vector is worse than the middle.

Measured at once, before the training has adapted to the correction *(tried: after one phase of training on top of -u,
to take it back made the loss worse, 2.97 to 3.72)*.
"""

import math
from collections.abc import Callable

TOLERANCE = 0.01
"""A relative rise of the loss that is usual in an honest swap."""


def rises(before: float, after: float) -> bool:
    """Whether the loss rose beyond TOLERANCE."""
    if not math.isfinite(after):
        return math.isfinite(before)
    return after > before + TOLERANCE * abs(before)


def is_harmful(without: float, with_it: float, partner: Callable[[], float]) -> bool:
    """`without`, `with_it`: the losses without and with the correction; `partner`: that of what the partner sent, which
    is asked for only where it decides."""
    if not rises(without, with_it):
        return False
    return not (math.isfinite(with_it) and partner() <= with_it)
