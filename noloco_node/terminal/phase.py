"""The inner phase's progress in a few words."""

from noloco_node.base.units import share, span
from noloco_node.views.views import Phase

_SHORTEST_SHOWN_S = 10.0


def left(phase: Phase | None) -> str:
    """`46%, 1 min 10 s left`; empty for a phase of a few seconds."""
    if phase is None or phase.left_s is None or phase.left_s < _SHORTEST_SHOWN_S * (1 - phase.part):
        return ""
    return f"{share(phase.part)}, {span(phase.left_s)} left"
