"""What a user should know of how this node looks from outside: can others call it, and is its clock right?

The findings are transport/reachability.py's. No exchange depends on a clock; but a record of presence counts for a
minute by its reader's clock, so a node whose clock is further off than that would see nobody, and nobody would see it.
"""

from noloco_node.base.units import span
from noloco_node.errors import ClockTooFarOff
from noloco_node.transport.reachability import OUTGOING, RELAYED
from noloco_node.transport.self_view import ClockSkew
from noloco_node.views.views import Health

WARN_S = 1.0
TOO_FAR_S = 30.0
"""Half of a record's life."""
ENOUGH = 2
"""Peers that must say so before a node is turned away: else one bootstrap node with a wrong clock turns all away."""

_SET_CLOCK = "let this machine keep its time: `timedatectl set-ntp true`"
_OPEN_PORT = "give it a port with --listen, forward that in the router, and name it with --announce"


def check(skew: ClockSkew | None) -> None:
    """Whether a node with this clock can take part at all."""
    if skew is not None and _is_too_far(skew) and skew.witnesses >= ENOUGH:
        raise ClockTooFarOff(f"this machine's clock is {_off(skew)}: {_SET_CLOCK}")


def doubt(skew: ClockSkew | None) -> str | None:
    """At the start, where a clock is too far off that may not be ours: a sentence."""
    if skew is None or not _is_too_far(skew):
        return None
    return f"this machine's clock is {_off(skew)}. If it is this one, {_SET_CLOCK}"


def advice(reachable: str | None) -> str | None:
    """At the start, in a sentence; nothing where all is well."""
    if reachable == RELAYED:
        return f"others can call this node through a relay only, which is slower: for a direct way, {_OPEN_PORT}"
    if reachable == OUTGOING:
        return f"nobody can call this node, it only calls others: {_OPEN_PORT}"
    return None


def health(reachable: str | None, skew: ClockSkew | None) -> tuple[Health, ...]:
    found = []
    if reachable == OUTGOING:
        found.append(Health("warning", "network: nobody can call this node, it only calls others", _OPEN_PORT))
    if skew is not None and abs(skew.ahead_s) >= WARN_S:
        found.append(Health("warning", f"clock: {_off(skew)}", _SET_CLOCK))
    return tuple(found)


def _is_too_far(skew: ClockSkew) -> bool:
    return abs(skew.ahead_s) > TOO_FAR_S


def _off(skew: ClockSkew) -> str:
    whose = "the others'"
    if skew.witnesses < ENOUGH:
        whose = "that of a single peer: one of the two is wrong"
    return f"{span(abs(skew.ahead_s))} {'ahead of' if skew.ahead_s > 0 else 'behind'} {whose}"
