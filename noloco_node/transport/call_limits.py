"""How many calls a caller may have, at once and a minute, counted by peer and by place (base/places.py).

Identities cost nothing, so the place's limits are those that hold against a flood. A partner, with whom this node has
finished a swap, is served beyond what strangers may use together. Asked before a byte of a request is read. Pure: time
is an argument.
"""

from collections import Counter

from noloco_node.base.latest import remember

MAX_CALLS = 256
"""Being answered at the same time, over all peers: each may have one request of `MAX_REQUEST_BYTES` in memory."""
FOR_STRANGERS = 192
"""Of these: the others are kept for partners."""
OF_PEER = 16
"""An honest peer has two swaps, a download with its look-ups, and up to eight questions to a relay."""
OF_PLACE = 4
"""A place has less than one in so many of the calls that are left: 39 where it is the only one, and a household has a
few peers. With a fixed number, five places held all. Now who comes from a new place is still answered where a hundred
others hold as many as they get, and the first call of a place is refused after 20 places took theirs one by one. One
place alone can hold 220 MB of requests, as gRPC reads 5.7 MB ahead of a call that waits."""
PEER_A_MINUTE, PLACE_A_MINUTE = 600, 2400
"""A node whose rounds take a second makes about a hundred. A call costs about 1 ms, so one place has at most 4% of a
core. A call that this node learned from is given back: a stage may have a hundred such a second of one peer."""
FLOOD = 100
"""A peer that goes on for so many calls after it was refused has no streams for SHUT_S: a refused call costs as much as
one that is answered."""
REFUSED_A_MINUTE = 700
"""Of a place: beyond that, a peer that is refused is shut out at once, unless a call of its is being answered. One host
with a new identity for each 700 calls took half a core."""
SHUT_S = 60.0
MAX_REMEMBERED = 4096
"""Callers whose calls of the last minute are counted; the latest, so the place of a flood is one of them."""


class CallLimits:
    def __init__(self, peer_a_minute: int = PEER_A_MINUTE, place_a_minute: int = PLACE_A_MINUTE) -> None:
        self._a_minute = peer_a_minute, place_a_minute
        self._at_once: Counter[str] = Counter()
        """By `_names`."""
        self._left: dict[str, tuple[float, float]] = {}
        """How many calls a caller had left, and when; the one that called longest ago first."""

    def begin(self, peer: str, place: str, partner: bool, now: float) -> bool:
        """Whether this call may be answered; then `end` must follow."""
        _, at, *rooms = names = _names(peer, place, partner)
        left = min(most - self._at_once[room] for room, most in zip(rooms, (MAX_CALLS, FOR_STRANGERS), strict=False))
        of_peer, of_place = self._a_minute
        may = self._take(peer, of_peer, now, owes=FLOOD) and self._at_once[peer] < OF_PEER
        if not may or OF_PLACE * self._at_once[at] >= left or not self._take(at, of_place, now):
            return False
        self._at_once.update(names)
        return True

    def end(self, peer: str, place: str, partner: bool) -> None:
        """With the same arguments."""
        self._at_once -= Counter(_names(peer, place, partner))

    def give_back(self, peer: str, place: str, partner: bool) -> None:
        """A call of this minute was worth what it cost: it does not count."""
        for name in _names(peer, place, partner)[:2]:
            if name in self._left:
                left, at = self._left[name]
                self._left[name] = left + 1, at

    def is_flood(self, peer: str, place: str, partner: bool, now: float) -> bool:
        """Of a call that was refused: whether this peer goes on calling though it is refused, or its place does."""
        _, at, *_ = _names(peer, place, partner)
        quiet = self._take(f"refused {at}", REFUSED_A_MINUTE, now) or self._at_once[peer]
        return not quiet or (peer in self._left and self._left[peer][0] < 1 - FLOOD)

    def _take(self, name: str, a_minute: int, now: float, owes: int = 0) -> bool:
        """`owes`: how many calls too many are counted."""
        left, at = self._left.get(name, (float(a_minute), now))
        left = min(a_minute, left + (now - at) * a_minute / 60)
        remember(self._left, name, (left - 1 if left >= 1 - owes else left, now), MAX_REMEMBERED)
        return left >= 1


def _names(peer: str, place: str, partner: bool) -> list[str]:
    """Under which a call is counted: its peer, its place (partners apart, as strangers may come from there too, and all
    who come over a relay are at one place), all, and all strangers."""
    return [peer, f"partners at {place}", "all"] if partner else [peer, f"at {place}", "all", "strangers"]
