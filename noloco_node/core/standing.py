"""What a node has seen of its partners itself: how they behaved, and how much of its time they took.

Pure: the time is an argument. Nothing here is hearsay. All is bounded:

- `Ledger`: what was good and bad of each peer, and until when it is therefore neither called nor accepted. A *strike*
  (what it sent was bad; a correction was taken back) leads to a quarantine, which doubles with each strike; strikes
  fade with time and with whole swaps. A swap that *broke* proves less, for links break: it costs a wait, which grows
  with the time that the swap held, and is forgotten with the first whole swap. Both are short where no other peer is
  there.
- `Shares`: how many phases each peer and each place took lately. What is taken adds to a debt; each phase pays off a
  bit more than the uniform share, so in the long run nobody takes more than that. Uniform is a share of peers,
  or first of places where that is more: an identity of a crowd on one host gets no more than any other peer, and its
  host no more than another place. The node's own place may take what its peers are of all peers, up to a half: so
  twenty nodes in one prefix beside twenty elsewhere commit 71% of their rounds instead of 45%. Twenty identities in
  the prefix of a node that has eight honest peers elsewhere then take 57% of its rounds instead of 54%, five 44%
  instead of 27%; with no limit there, twenty took 91% (virtual time; they always call).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_node.base.latest import remember
from noloco_node.core.verdict import Verdict

MAX_PEERS = 1024
"""Remembered. The least recently seen are forgotten first: of those that never swapped and are not in quarantine, then
of those that never swapped. A crowd may be struck as often as it likes; it replaces no partner."""
BREAK_SHARE = 1 / 8
"""The least wait after a swap that broke, as a share of a phase; it doubles with each one in a row."""
MAX_BREAK_FACTOR = 64
"""The wait is at most so many times what the swap held: in the long run such a peer gets 1.5% of our time. After as
long again without a swap, its broken swaps are forgotten."""
HELD = 3
"""A swap that broke after a phase or more counts as so many: waits of 7 and 63 times what it held."""
ALONE_BREAK_PHASES = 2.0
"""The longest wait for the only peer that is there: when its link is back, the two should find each other."""
MILD, HEAVY = 1.0, 3.0
"""Strikes. Bad input may be the fault of a version or of our own weights; a correction taken back was harm done."""
MAX_QUARANTINE_PHASES = 512.0
ALONE_QUARANTINE_PHASES = 2.0
"""The longest quarantine of the only peer that is there, unless it did harm."""
ALLOWANCE = 0.12
"""Of the loss: so much harm is a strike. Two halves of a swarm that trained apart cost each other 0.1 until they are
together."""
TAKEN_BACK_PHASES, ALLOWANCE_PHASES = 2.0, 4.0
"""What the partner and its place pay of their shares, beside the swap's own time, for a correction that was taken back;
and where the place did as much harm as one peer may, and none of its peers did: a crowd sends another one each time."""
FADE_PHASES, FADE_SWAPS = 32.0, 16.0
"""So many phases, and so many whole swaps, take off one strike."""

FACTOR = 1.1
"""Times its uniform share that a peer, and a place, may take in the long run. Of two places neither is limited: all but
one of the nodes may be in one. With BURST a peer stays below twice over 60 rounds of 12 nodes; honest peers, who meet
by chance, are seldom above it."""
LEAST_PLACE = 1 / 5
"""Of our rounds that one place may take, however many there are: a university is one place too. With BURST it stays
within a quarter over 60 rounds."""
MOST_OWN_PLACE = 1 / 2
"""... and at most, by how many peers are there, the place in which the node itself is."""
BURST = 3.0
"""Phases that may be taken at once: chance brings the same peer twice in a row."""
MAX_DEBT = 64.0
"""Phases: what is older is forgiven."""


@dataclass(frozen=True, slots=True)
class Standing:
    committed: int = 0
    """Swaps that were whole."""
    taken_back: int = 0
    """Corrections of it that were taken back because they made the model worse."""
    refused: int = 0
    """Its calls and swaps that were refused for what it sent."""
    failed: int = 0
    """Swaps that broke."""
    quarantined_s: float = 0.0
    """For so long it is neither called nor accepted."""
    why: str = ""
    """Of the quarantine: a short code."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """Neither called nor accepted until then."""

    until: float = float("-inf")
    alone_until: float = float("-inf")
    """Where no other peer is there."""

    def end(self, *, alone: bool) -> float:
        return self.alone_until if alone else self.until


_OVER = _Wait()


@dataclass(slots=True)
class _Harm:
    """By how much swaps raised the loss, beyond what is usual. Each kind apart: a sum of the larger of the two would
    grow by chance."""

    held_out: float = 0.0
    own: float = 0.0

    def add(self, verdict: Verdict) -> bool:
        """Whether it is more than is allowed; then it begins anew."""
        self.held_out = max(0.0, self.held_out + verdict.excess)
        self.own = max(0.0, self.own + verdict.own_excess)
        if is_much := max(self.held_out, self.own) > ALLOWANCE:
            self.held_out = self.own = 0.0
        return is_much


@dataclass(slots=True)
class _Record:
    committed: int = 0
    taken_back: int = 0
    refused: int = 0
    failed: int = 0
    strikes: float = 0.0
    struck_at: float = 0.0
    harm: _Harm = field(default_factory=_Harm)
    quarantine: _Wait = _OVER
    why: str = ""
    breaks: int = 0
    """In a row."""
    broken: _Wait = _OVER
    breaks_forgotten_at: float = float("inf")

    def worth(self, now: float) -> tuple[bool, bool]:
        """What is remembered the longer, the larger it is."""
        return self.committed > 0 or self.taken_back > 0, self.quarantine.until > now


class Ledger:
    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._harm_at: dict[str, _Harm] = {}
        """By place."""

    # ---- what happened ----
    def whole(self, peer: str, now: float) -> None:
        record = self._record(peer, now)
        record.committed += 1
        record.breaks, record.broken = 0, _OVER
        record.strikes = max(0.0, record.strikes - 1 / FADE_SWAPS)

    def failed(self, peer: str, held_s: float, now: float, phase_s: float) -> None:
        """A swap broke."""
        self._record(peer, now).failed += 1
        self.wasted(peer, held_s, now, phase_s)

    def wasted(self, peer: str, held_s: float, now: float, phase_s: float) -> None:
        """So much of our time, by a swap that broke or an appointment that it did not keep."""
        record = self._record(peer, now)
        if now >= record.breaks_forgotten_at:
            record.breaks = 0
        record.breaks += HELD if held_s >= phase_s else 1
        times = 2 ** min(record.breaks, 16)
        least_s = BREAK_SHARE * phase_s * min(times / 2, MAX_BREAK_FACTOR)
        wait_s = max(least_s, min(times - 1, MAX_BREAK_FACTOR) * held_s)
        record.broken = _Wait(now + wait_s, now + min(least_s, ALONE_BREAK_PHASES * phase_s))
        record.breaks_forgotten_at = now + wait_s + MAX_BREAK_FACTOR * max(held_s, BREAK_SHARE * phase_s)

    def misbehaved(self, peer: str, why: str, now: float, phase_s: float) -> None:
        """What it sent was bad."""
        self._record(peer, now).refused += 1
        self._strike(peer, MILD, why, now, phase_s)

    def judged(self, peer: str, place: str, verdict: Verdict, now: float, phase_s: float) -> float:
        """What a swap did to the model. Returns how many phases of its share, and its place's, that costs."""
        record = self._record(peer, now)
        record.taken_back += verdict.harmful
        remember(self._harm_at, place, at_place := self._harm_at.get(place) or _Harm(), MAX_PEERS)
        of_place = at_place.add(verdict)
        if record.harm.add(verdict) or verdict.a_lie:
            record.harm, of_place = _Harm(), False
            self._strike(peer, HEAVY, "taken_back" if verdict.harmful else "harmful", now, phase_s)
        return max(ALLOWANCE_PHASES * of_place, TAKEN_BACK_PHASES * verdict.harmful)

    def links_failed(self) -> None:
        """Our own network did, so no peer broke a swap."""
        for record in self._records.values():
            record.breaks, record.broken = 0, _OVER

    # ---- what follows ----
    def free_at(self, peer: str, *, alone: bool) -> float:
        """When it may be called and accepted again. `alone`: no other peer is there."""
        record = self._records.get(peer)
        return max(record.quarantine.end(alone=alone), record.broken.end(alone=alone)) if record else float("-inf")

    def quarantined_until(self, peer: str, *, alone: bool) -> float:
        record = self._records.get(peer)
        return record.quarantine.end(alone=alone) if record else float("-inf")

    def broke_lately(self, peer: str, now: float) -> bool:
        """Whether its latest swap broke."""
        record = self._records.get(peer)
        return record is not None and record.breaks > 0 and now < record.breaks_forgotten_at

    def standing(self, peer: str, now: float, *, alone: bool) -> Standing:
        record = self._records.get(peer, _Record())
        left_s = max(0.0, record.quarantine.end(alone=alone) - now)
        counts = (record.committed, record.taken_back, record.refused, record.failed)
        return Standing(*counts, left_s, record.why if left_s else "")

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self._records)

    # ---- parts ----
    def _record(self, peer: str, now: float) -> _Record:
        if peer not in self._records and len(self._records) >= MAX_PEERS:
            del self._records[min(self._records, key=lambda p: self._records[p].worth(now))]
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        return record

    def _strike(self, peer: str, weight: float, why: str, now: float, phase_s: float) -> None:
        record = self._record(peer, now)
        faded = (now - record.struck_at) / (FADE_PHASES * phase_s)
        record.strikes, record.struck_at = max(0.0, record.strikes - faded) + weight, now
        phases = min(MAX_QUARANTINE_PHASES, 2 ** min(record.strikes, 16.0))
        alone = phases if record.taken_back else min(phases / 2, ALONE_QUARANTINE_PHASES)
        before = record.quarantine
        record.quarantine = _Wait(
            max(before.until, now + phases * phase_s), max(before.alone_until, now + alone * phase_s)
        )
        record.why = why


@dataclass(slots=True)
class _Taken:
    place: str
    debt: float = 0.0


class Shares:
    """In phases of our own time."""

    def __init__(self) -> None:
        self._of_peers: dict[str, _Taken] = {}
        self._of_places: dict[str, float] = {}
        self._sizes: Counter[str] = Counter()
        """How many peers are there, by place."""
        self._peers = 0
        """Together."""
        self._own = ""

    def present(self, places: Mapping[str, str], own: str = "") -> None:
        """Who is there now: the place of each peer, and this node's own; empty: it is not known."""
        self._sizes, self._peers, self._own = Counter(places.values()), len(places), own

    def charge(self, peer: str, place: str, phases: float) -> None:
        taken = self._of_peers.setdefault(peer, _Taken(place))
        taken.place, taken.debt = place, min(MAX_DEBT, taken.debt + phases)
        self._of_places[place] = min(MAX_DEBT, self._of_places.get(place, 0.0) + phases)
        if len(self._of_peers) > MAX_PEERS:
            del self._of_peers[min(self._of_peers, key=lambda p: self._of_peers[p].debt)]
        if len(self._of_places) > MAX_PEERS:
            del self._of_places[min(self._of_places, key=lambda p: self._of_places[p])]

    def pay_off(self) -> None:
        """A phase has passed, or one more swap of a phase was whole."""
        for peer, taken in list(self._of_peers.items()):
            taken.debt -= self._rate(taken.place)
            if taken.debt <= 0:
                del self._of_peers[peer]
        paid = {place: debt - self._place_rate(place) for place, debt in self._of_places.items()}
        self._of_places = {place: debt for place, debt in paid.items() if debt > 0}

    def over_for(self, peer: str, place: str) -> float:
        """For how many phases it has had its share; 0: it may have another one now."""
        own = self._of_peers[peer].debt if peer in self._of_peers else 0.0
        of_place = self._of_places.get(place, 0.0) if self._places(place) > 1 else 0.0
        spare = BURST - 1
        return max(0.0, (own - spare) / self._rate(place), (of_place - spare) / self._place_rate(place))

    def _places(self, place: str) -> int:
        return len(self._sizes) + (place not in self._sizes)

    def _rate(self, place: str) -> float:
        in_its_place = self._places(place) * max(1, self._sizes[place])
        return FACTOR / min(max(1, self._peers), in_its_place)

    def _place_rate(self, place: str) -> float:
        places = self._places(place)
        if places <= 2:
            return 1.0
        own = FACTOR * self._sizes[place] / max(1, self._peers) if place == self._own else 0.0
        return max(LEAST_PLACE, FACTOR / places, min(MOST_OWN_PLACE, own))
