"""Warnings about this node's network: can others call it, is its clock right, how often has p2pd died lately?

Time is an argument, and nothing is started here. Reachability and clock are measured by transport/reachability.py and
transport/self_view.py. No swap depends on a clock; but a presence record counts for a minute by its reader's clock, so
a node whose clock is further off than that finds no peer, and no peer finds it.
"""

from collections.abc import Collection

from noloco_node.base.addresses import Address
from noloco_node.base.units import span
from noloco_node.errors import ClockTooFarOff
from noloco_node.transport.reachability import OUTGOING, RELAYED
from noloco_node.transport.self_view import ClockSkew
from noloco_node.views.status import Health

WARN_S = 1.0
TOO_FAR_S = 30.0
"""Half of a record's lifetime."""
ENOUGH = 2
"""Places of bootstrap nodes that must agree before this node refuses to start: else one host with a wrong clock would
keep every node out."""

LATELY_S = 600.0
"""How long a death of p2pd counts."""
MAX_WAIT_S = 30.0
MANY = 3
"""From this many deaths on, `status` warns even while p2pd runs."""

_SET_CLOCK = "synchronise this machine's clock: `timedatectl set-ntp true`"
_OPEN_PORT = "choose a port with --listen, forward it in the router, and name it with --announce"


def check(skew: ClockSkew | None) -> None:
    """Raises ClockTooFarOff."""
    if skew is not None and _is_too_far(skew) and skew.witnesses >= ENOUGH:
        raise ClockTooFarOff(f"this machine's clock is {_off(skew)}: {_SET_CLOCK}")


def doubt(skew: ClockSkew | None) -> str | None:
    """A sentence for the start, where a clock is too far off, but perhaps not this machine's."""
    if skew is None or not _is_too_far(skew):
        return None
    return f"this machine's clock is {_off(skew)}. If it is this one, {_SET_CLOCK}"


def advice(reachable: str | None) -> str | None:
    """A sentence for the start, where others cannot call this node directly."""
    if reachable == RELAYED:
        return f"others call this node over a relay, or directly where both routers let them: to be sure, {_OPEN_PORT}"
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


def only_here(addresses: Collection[Address]) -> tuple[Health, ...]:
    """For a node that listens for other machines, too; `addresses`: those at which it can be called."""
    if not addresses or not all(address.is_loopback for address in addresses):
        return ()
    text = "network: this machine has no address at which another one could call this node"
    remedy = "connect it to a network, or name an address with --announce; with IPv6 alone: --listen /ip6/::/tcp/0"
    return (Health("warning", text, remedy),)


def _is_too_far(skew: ClockSkew) -> bool:
    return abs(skew.ahead_s) > TOO_FAR_S


def _off(skew: ClockSkew) -> str:
    whose = "the others'"
    if skew.witnesses < ENOUGH:
        whose = "that of a single host: one of the two is wrong"
    return f"{span(abs(skew.ahead_s))} {'ahead of' if skew.ahead_s > 0 else 'behind'} {whose}"


class NetworkOutages:
    """Deaths of p2pd, and how long to wait before the next start."""

    def __init__(self) -> None:
        self._deaths: list[float] = []
        self._how: str | None = None

    def died(self, how: str, now: float) -> float:
        """Returns the seconds to wait before another start: none at first, then 1, 2, 4 ... MAX_WAIT_S."""
        self._how = how
        self._deaths = [*self._lately(now), now]
        return 0.0 if len(self._deaths) == 1 else min(2.0 ** (len(self._deaths) - 2), MAX_WAIT_S)

    def over(self) -> None:
        self._how = None

    def health(self, now: float) -> tuple[Health, ...]:
        deaths = len(self._lately(now))
        often = f", {deaths} times in 10 minutes" if deaths >= MANY else ""
        if self._how:
            text = f"network: degraded, {self._how}{often}"
            return (Health("error", text, "it is being restarted; training goes on without rounds meanwhile"),)
        if deaths >= MANY:
            text = f"network: p2pd died {deaths} times in 10 minutes"
            return (Health("warning", text, "see node.log; is this machine short of memory?"),)
        return ()

    def _lately(self, now: float) -> list[float]:
        return [death for death in self._deaths if now - death < LATELY_S]
