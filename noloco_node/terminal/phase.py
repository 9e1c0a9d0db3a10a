"""How far the inner phase is, in a few words."""

from noloco_node.base.units import share, span
from noloco_node.views.status import Phase

_WORTH_TELLING_S = 10.0


def left(phase: Phase | None) -> str:
    """`46%, 1 min 10 s left`; nothing of a phase that is over in a few seconds."""
    if phase is None or phase.left_s is None or phase.left_s < _WORTH_TELLING_S * (1 - phase.part):
        return ""
    return f"{share(phase.part)}, {span(phase.left_s)} left"
