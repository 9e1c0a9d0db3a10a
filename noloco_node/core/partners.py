"""Whom a node may swap with, and how much of its time each took: the part of core/round.py that knows nobody's offer.

Pure: the time is an argument. What it keeps of each peer is in core/standing.py and core/backoff.py.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from noloco_node.base.latest import remember
from noloco_node.base.places import draw
from noloco_node.core.backoff import Backoffs
from noloco_node.core.standing import Ledger, Shares, Standing

MOST_RECENT = 16
"""Partners remembered in their order: enough for 65,536 nodes."""
NO_PEERS, BACKING_OFF, ALL_QUARANTINED = "no_peers", "backing_off", "all_quarantined"
"""Why nobody was called: there is no candidate; all are waited for, after refusals or broken swaps; all are in
quarantine."""


def no_repeat(nodes: int) -> int:
    """For how many rounds a node does not meet a partner again, of so many nodes that train: ⌈log2 N⌉. So long it takes
    what one of them knows to reach all. It lowers the loss of 8 replicas by 0.3% (simulate/README.md)."""
    return (nodes - 1).bit_length()


class Random(Protocol):
    """The part of `random.Random` that is used here."""

    def choice(self, options: Sequence[str], /) -> str: ...
    def randbytes(self, n: int, /) -> bytes: ...


class Partners:
    def __init__(self, random: Random) -> None:
        self._random = random
        self.candidates: Mapping[str, str] = {}
        """Place by peer."""
        self._own = ""
        """This node's place."""
        self.backoffs, self.ledger, self.shares = Backoffs(), Ledger(), Shares()
        """Of callers too, who need not be candidates."""
        self._met: dict[str, None] = {}
        """Those met last, the latest at the end."""
        self._swapped_from: dict[str, str] = {}
        """The places of those that swapped last, whole or not: a caller need be no candidate."""
        self._there: frozenset[str] = frozenset()
        """Candidates that answer and may be called sooner or later, as of the last look."""

    # ---- what happened ----
    def may_be(self, places: Mapping[str, str], own: str = "") -> None:
        """These are the candidates from now on."""
        self.candidates, self._own = places, own
        self.backoffs.keep(places)
        if not places:  # all gone at once
            self.ledger.links_failed()

    def look(self, now: float) -> None:
        self._there = frozenset(p for p in self.candidates if self._is_there(p, now))

    def share(self, now: float) -> None:
        """A phase has passed: among whom its round is shared."""
        self.shares.present(self._sharing(now), self._own)
        self.shares.pay_off()

    def begins(self, peer: str, place: str) -> None:
        """A swap."""
        remember(self._swapped_from, peer, place, MOST_RECENT)

    def swapped(self, peer: str, now: float) -> None:
        """It was whole."""
        remember(self._met, peer, None, MOST_RECENT)
        self.backoffs.swapped(peer)
        self.ledger.whole(peer, now)

    def charge(self, peer: str, place: str, phases: float) -> None:
        if phases > 0:
            self.shares.charge(peer, place, phases)

    # ---- what follows ----
    @property
    def last(self) -> str:
        """The one met last; empty before the first."""
        return next(reversed(self._met), "")

    def place(self, peer: str) -> str:
        """Where it swapped from, or is."""
        return self._swapped_from.get(peer, "") or self.candidates.get(peer, peer)

    def crowd(self, peer: str) -> str:
        """The place, as all who are there may be one liar; at this node's own, where its friends may be, the peer."""
        place = self.place(peer)
        return peer if place == self._own else place

    def source(self, peer: str) -> frozenset[str]:
        """By which swaps of the same liar are known."""
        return frozenset({peer, self.crowd(peer)})

    def standing(self, peer: str, now: float) -> Standing:
        return self.ledger.standing(peer, now, alone=self.alone(peer))

    def knows(self, peer: str, now: float) -> bool:
        """Whether it is a candidate, or was a partner."""
        return peer in self.candidates or self.standing(peer, now).committed > 0

    def refusals(self, peer: str) -> tuple[bool, int]:
        """The less, the sooner it is called again for an offer that found nobody: strangers come last."""
        return peer not in self._met, self.backoffs.since_swap(peer)

    def draw(self, peers: Sequence[str]) -> str:
        """One that was not met lately, or the one that was met longest ago."""
        recent = self.recent()
        if fresh := [p for p in peers if p not in recent]:
            return draw(self._random, self._placed(fresh))
        return min(peers, key=recent.index)

    def recent(self) -> list[str]:
        """Whom this node does not meet again as long as there are others; the latest at the end."""
        nodes = 1 + sum(map(self.backoffs.answers, self.candidates))
        return list(self._met)[-no_repeat(nodes) :]

    def met_last(self, peer: str, place: str) -> bool:
        """Whether it was the last partner, or another one of its place, and there are others: candidates, whether they
        answer or not, or, as in core/standing.py, two more places."""
        if peer == self.last:
            return self.candidates.keys() != {peer}
        return bool(self.last) and place == self.place(self.last) and len({place, *self.candidates.values()}) > 2

    def alone(self, peer: str) -> bool:
        """Whether no other candidate than this peer is there."""
        return len(self._there) == (peer in self._there)

    def yields(self, peer: str, place: str, now: float, boundary: float, met: Collection[str]) -> bool:
        """Whether this peer has had its share, and there is somebody else to call in this phase, which ends at
        `boundary`; `met`: this round's partners so far."""
        if not self.shares.over_for(peer, place):
            return False
        others = (p for p in self.candidates if p != peer and p not in met and self._is_soon_free(p, now, boundary))
        return any(not self.shares.over_for(p, self.candidates[p]) for p in others)

    def why_none(self, now: float) -> str:
        if not self.candidates:
            return NO_PEERS
        ends = (self.ledger.quarantined_until(p, alone=self.alone(p)) for p in self.candidates)
        return ALL_QUARANTINED if min(ends) > now else BACKING_OFF

    def free_at(self, peer: str) -> float:
        """When this peer may be called again."""
        return max(self.backoffs.until(peer), self.ledger.free_at(peer, alone=self.alone(peer)))

    # ---- parts ----
    def _placed(self, peers: Iterable[str]) -> dict[str, str]:
        return {peer: self.candidates[peer] for peer in peers}

    def _is_there(self, peer: str, now: float) -> bool:
        """Whether waiting for this candidate makes sense."""
        return self.backoffs.answers(peer) and self.ledger.free_at(peer, alone=False) <= now

    def _sharing(self, now: float) -> dict[str, str]:
        """Among whom our rounds are shared: who is there. Where these are one place or two, which have no limit, also
        who was a partner at another place and is silent: when calls between honest nodes had failed for some seconds,
        a crowd took each offer before they called again. Anywhere else the dead would only lower the share of all."""
        sharing = self._placed(self._there & self.candidates.keys())
        places = set(sharing.values())
        if len(places) > 2:
            return sharing
        elsewhere = (p for p, place in self.candidates.items() if place not in places)
        partners = (p for p in elsewhere if self.standing(p, now).committed > 0)
        return sharing | self._placed(p for p in partners if self.ledger.free_at(p, alone=False) <= now)

    def _is_soon_free(self, peer: str, now: float, boundary: float) -> bool:
        """Whether it may be called now, or before the boundary: two that refuse as an offer opens are busy for moments,
        and who calls all the time would come first. But nobody waits for one that refuses always."""
        free_at = self.free_at(peer)
        return free_at <= now or (free_at <= boundary and not self.backoffs.refuses_always(peer))
