"""One node's outer rounds as a pure state machine: whom to meet, when to say no, and how each round ended.

It knows no sockets, no clocks, no tensors: an event and the time go in, actions come out, and `wake_at` says when it
wants to hear a `Tick`. A failure is an event like the rest. Notable choices:

- An offer opens at each boundary and is answered by *one* partner, drawn uniformly from the candidates. Drawing only
  among those whose offers are open would lock equal boxes into the same few pairs, so a peer that is between two offers
  makes an *appointment*: its next offer is kept for the caller, who stays on the line until that opens. A pair costs
  one call so, and either side notices at once when the other goes away.
- Who is busy says when it will be free, and is not called again before an appointment with it could be kept.
- An unanswered outgoing call does not make a node busy. A call that comes in meanwhile is taken if it ranks before the
  own call, which is then hung up; else it is held until the own call is answered. A call's rank is a hash of who calls
  whom: both ends know it, so calls that cross, and rings of any length, resolve the same way everywhere (around a ring
  the first in rank stands), it favours no box, and no caller can choose it, as it could an id that it draws.
- A swap may straddle boundaries. While one is under way a boundary opens no offer: that round is `solo: swapping`.
- A swap that breaks leaves the offer open for somebody else: what was applied stays, and the offered vector has moved
  with it, so the next partner swaps what is there now. Whoever it broke with is shunned, as a caller too: briefly
  at first, for accidents happen; if the next one breaks, for as long as that held us, then 3, 7, 15 times as long. So
  an honest pair soon tries again, and who holds swaps open to break them gets less and less of our time.
- With blocking overlap no boundary comes before the round is over, so an offer ends by the clock: when the next
  boundary would have come, or at once where nobody is known.
- A node that pauses, has used up its quota, or leaves is *shut* for a reason: its rounds end by it, callers hear a no,
  and a swap under way goes on. Only leaving is for good.
- Where the run allows it, an offer stays open after its round was committed, for a further swap with somebody else. It
  never delays the next round: it waits for no appointment, and begins only if it will probably end before the boundary.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from noloco_node.core.round_events import (
    Accept,
    Accepted,
    Action,
    Appoint,
    Appointed,
    Begin,
    Boundary,
    Call,
    Called,
    CallerGone,
    Candidates,
    CloseOffer,
    EndRound,
    Event,
    Further,
    HangUp,
    Pausing,
    Refuse,
    Refused,
    Resuming,
    Stay,
    Stopping,
    SwapEnded,
    Tick,
    Unanswered,
)

MAX_CALLS = 4
"""Calls made for one offer, whatever became of them; then it waits to be called. Bounds the traffic of a swarm in which
everybody is busy, and of one in which every swap breaks."""
MAX_FURTHER_CALLS = 1
"""Calls made for each further swap of a committed round: it is a gift, not worth a search."""
FURTHER_SHARE = 1 / 4
"""With `swaps=None`, a further swap begins if it will probably take no more than this share of the time left."""
SLACK = 0.25
"""One stays on the line for this share of a phase beyond the appointed time: it was guessed from the phase before."""
MIN_SLACK_S = 1.0
ANSWER_SHARE, MIN_ANSWER_S, MAX_ANSWER_S = 1 / 4, 2.0, 10.0
"""How long a call waits for its answer: a share of a phase, within what a dial over a relay and a silent peer take."""
BACKOFF_SHARE = 1 / 8
"""First back-off after a refusal, as a share of a phase; it doubles with each refusal in a row."""
MAX_BACKOFF_S = 60.0
SILENT = 5
"""Refusals in a row after which a peer no longer counts as "somebody else" to prefer. Silence counts as so many at
once: it cost a whole deadline, so the first back-off is already two phases."""
MAX_LAG = 8
"""Boundaries that a swap may straddle. Later corrections would still add up, but the snapshot is held too long."""
MIN_BLOCKED_S = 600.0
"""With blocking overlap a swap may take MAX_LAG phases by the clock, but always so long: nothing lands late there, and
a short phase is no reason to break it."""
MAX_SHUNNED = 64
"""A peer with whom swap after swap broke is shunned for up to so many times what the last one took: in the
long run it gets 1.5% of our time."""
STALL_SHARE, MIN_STALL_S = 1 / 2, 60.0
"""How long a partner may say that it is alive without a fragment or an acknowledgement: longer than an inner step or
an evaluation, behind which its corrections may wait; short enough that the offer is open for somebody else after it.
(rounds/swap.py gives a slow link longer.)"""

LEAVING = "leaving"
TOO_SLOW = "too_slow"
"""A swap that broke after MAX_LAG boundaries, whichever end gave up: the link, or what a volunteer allows of it, is too
slow for the run's phases."""


class Random(Protocol):
    """The part of `random.Random` that is used here."""

    def choice(self, options: Sequence[str], /) -> str: ...
    def randbytes(self, n: int, /) -> bytes: ...


@dataclass(slots=True)
class _Outgoing:
    exchange: bytes
    peer: str
    kept: bool = False
    """We have an appointment, and are busy for everybody else."""


@dataclass(slots=True)
class _Backoff:
    until: float
    refusals: int


@dataclass(slots=True)
class _Shunned:
    """Swap after swap with this peer broke."""

    until: float
    swaps: int
    forgotten_at: float


@dataclass(slots=True)
class _Offer:
    """One round's offer, from its boundary to its end."""

    round: int
    calls: int = 0
    lag: int = 0
    """Boundaries passed since its own, while its swap goes on."""
    reason: str = "no_peers"
    """Why it would be solo if it ended now."""
    broke_with: str | None = None
    applied: int = 0
    one_sided: int = 0
    """Of swaps that broke."""
    met: set[str] = field(default_factory=set)
    """Who swapped it already: the round is committed, the offer open for further partners."""


@dataclass(slots=True)
class Round:
    """`handle` is the only method that changes anything."""

    random: Random
    swaps: int | None = 1
    """How many partners a round may have; None: as many as come while a swap takes little of the phase."""
    me: str = ""
    """Our own peer id."""
    blocking: bool = False
    """Whether training waits for the round to be over, so that no boundary comes before."""
    _candidates: frozenset[str] = frozenset()
    _offer: _Offer | None = None
    _out: _Outgoing | None = None
    """Our call that is not answered yet."""
    _held: Called | None = None
    """A call that waits for the answer to ours."""
    _swap: tuple[bytes, str] | None = None
    _swap_began: float = 0.0
    _swap_s: float = 0.0
    """How long the last whole swap took: the best guess at the next one."""
    _promised: Called | None = None
    """The next offer goes to this caller, who stays on the line."""
    _last_partner: str | None = None
    _backoffs: dict[str, _Backoff] = field(default_factory=dict)
    _shunned: dict[str, _Shunned] = field(default_factory=dict)
    """Candidates or not: a caller need not be one."""
    _phase_s: float = 1.0
    _boundary_at: float = float("-inf")
    """Before the first boundary there is no next one to promise."""
    _shut: str | None = None
    """Why there are no offers and no calls: LEAVING, or what Pausing said."""
    _now: float = 0.0

    def handle(self, event: Event, now: float) -> list[Action]:
        self._now = now
        offered = self._offer
        actions = [*self._react(event, now), *self._expire(now), *self._seek(now)]
        if self.blocking and offered and not self._offer:
            self._boundary_at = now  # the next phase begins here
        return actions

    @property
    def offered(self) -> int | None:
        """The round of the open offer, or of the one that is being swapped."""
        return self._offer.round if self._offer else None

    @property
    def swapping(self) -> bytes | None:
        """The exchange under way."""
        return self._swap[0] if self._swap else None

    @property
    def stall_s(self) -> float:
        """How long a partner may make no headway in a swap."""
        return max(MIN_STALL_S, STALL_SHARE * self._phase_s)

    def wake_at(self) -> float | None:
        """When a Tick is wanted, or None: only an event can change anything."""
        if self._offer is None or (self._out and not self._swap):
            return None
        waits = [self._expires_at()] if self.blocking else []
        if not self._swap and self._offer.calls < MAX_CALLS:
            waits += [self._free_at(peer) for peer in self._candidates & {*self._backoffs, *self._shunned}]
        return min((at for at in waits if at > self._now), default=None)

    # ---- events ----
    def _react(self, event: Event, now: float) -> Iterable[Action]:
        match event:
            case Boundary():
                yield from self._at_boundary(event, now)
            case Candidates(peers):
                self._candidates = peers
                self._backoffs = {p: b for p, b in self._backoffs.items() if p in peers}
                kept = {p: s for p, s in self._shunned.items() if s.forgotten_at > now}
                self._shunned = kept if peers else {}  # all gone at once: our own network was, by no peer's doing
            case Called():
                yield from self._at_call(event, now)
            case CallerGone(exchange):
                self._held = None if self._held and self._held.exchange == exchange else self._held
                self._promised = None if self._promised and self._promised.exchange == exchange else self._promised
                yield from self._at_swap_end(SwapEnded(exchange, "hung_up"), now)  # accepted, and gone before it knew
            case Accepted(exchange):
                yield from self._at_accepted(exchange, now)
            case Appointed(exchange, in_s):
                yield from self._at_appointed(exchange, in_s, now)
            case Refused() | Unanswered():
                yield from self._at_no(event, now)
            case SwapEnded():
                yield from self._at_swap_end(event, now)
            case Stopping():
                yield from self._shut_for(LEAVING, now)
            case Pausing(reason):
                yield from self._shut_for(reason, now)
            case Resuming():
                self._shut = LEAVING if self._shut == LEAVING else None
            case Tick():
                pass

    def _at_boundary(self, event: Boundary, now: float) -> Iterable[Action]:
        self._phase_s, self._boundary_at = event.phase_s, now
        if self._swap and self._offer:
            self._offer.lag += 1
            if self._offer.lag > MAX_LAG:
                yield HangUp(self._swap[0])
            yield from self._break_promise(now)
            yield EndRound(event.round, "swapping")
            return
        if closed := event.closed or self._shut:
            yield from self._break_promise(now)
            yield from self._close(None, now)
            yield EndRound(event.round, closed)
            return
        if self._offer:
            yield self._end(self._offer)
        self._offer = _Offer(event.round)  # whom we called, and who waits for an answer, may have this one
        if self._promised:
            promised, self._promised = self._promised, None
            yield from self._take(self._offer, promised, now)

    def _at_call(self, call: Called, now: float) -> Iterable[Action]:
        kept = self._out is not None and self._out.kept and self._out.peer != call.peer
        if self._offer is None or self._swap or self._shut or kept or not self._wants(self._offer, call.peer, now):
            yield self._no(call, now)
        elif self._out and not self._out.kept and _rank(call.peer, self.me) > _rank(self.me, self._out.peer):
            if self._held:
                yield self._no(call, now)
            else:
                self._held = call
        else:
            yield from self._take(self._offer, call, now)

    def _at_accepted(self, exchange: bytes, now: float) -> Iterable[Action]:
        if self._out is None or self._out.exchange != exchange or self._offer is None:
            yield HangUp(exchange)  # somebody else was faster
            return
        peer, self._out = self._out.peer, None
        yield from self._settle(exchange, peer, now)
        yield Begin(exchange, peer, self._offer.round)

    def _at_appointed(self, exchange: bytes, in_s: float, now: float) -> Iterable[Action]:
        if self._out is None or self._out.exchange != exchange or self._offer is None:
            return
        if self._held:
            held, self._held = self._held, None
            yield from self._take(self._offer, held, now)
            return
        self._out.kept, self._offer.reason = True, "appointment"
        yield Stay(exchange, min(in_s, self._phase_s) + max(MIN_SLACK_S, SLACK * self._phase_s))

    def _at_no(self, event: Refused | Unanswered, now: float) -> Iterable[Action]:
        if self._out is None or self._out.exchange != event.exchange or self._offer is None:
            return
        out, self._out = self._out, None
        self._offer.reason = "missed_appointment" if out.kept else event.reason
        if self._held:
            held, self._held = self._held, None
            yield from self._take(self._offer, held, now)
        elif isinstance(event, Refused):
            self._back_off(out.peer, now, 1, event.retry_in_s - self._phase_s)
        else:
            self._back_off(out.peer, now, 1 if out.kept else SILENT)

    def _at_swap_end(self, event: SwapEnded, now: float) -> Iterable[Action]:
        if self._swap is None or self._swap[0] != event.exchange or self._offer is None:
            return
        peer, offer = self._swap[1], self._offer
        self._swap = None
        if event.reason is None:
            yield from self._at_whole_swap(offer, peer, event, now)
            return
        self._shun(peer, now)
        too_slow = offer.lag >= MAX_LAG
        offer.reason, offer.broke_with = TOO_SLOW if too_slow else event.reason, peer
        offer.applied += event.applied
        offer.one_sided += event.one_sided
        if self._shut or now >= self._next_boundary() or too_slow:
            self._offer = None
            yield self._end(offer)

    def _at_whole_swap(self, offer: _Offer, peer: str, event: SwapEnded, now: float) -> Iterable[Action]:
        self._last_partner, self._swap_s = peer, now - self._swap_began
        self._backoffs.pop(peer, None)
        self._shunned.pop(peer, None)
        first = not offer.met
        offer.met.add(peer)
        further = self._may_have_another(offer, now)
        if first:
            yield EndRound(offer.round, None, peer, event.applied, event.one_sided, further)
        else:
            yield Further(offer.round, peer, len(offer.met))
        if further:
            offer.calls, offer.lag = MAX_CALLS - MAX_FURTHER_CALLS, 0
            return
        self._offer = None
        if not first:
            yield CloseOffer(offer.round)

    # ---- parts ----
    def _seek(self, now: float) -> Iterable[Action]:
        """Draw a partner if the offer is open and waits for nobody."""
        if self._offer is None or self._swap or self._out or self._offer.calls >= MAX_CALLS:
            return
        free = sorted(p for p in self._candidates if self._wants(self._offer, p, now) and self._free_at(p) <= now)
        others = [p for p in free if p != self._last_partner]
        if others or (free and not self._others_answer()):
            yield self._call(self._offer, self.random.choice(others or free), now)

    def _others_answer(self) -> bool:
        """Whether waiting for somebody other than the last partner makes sense."""
        others = self._candidates - {self._last_partner}
        return any(p not in self._backoffs or self._backoffs[p].refusals < SILENT for p in others)

    def _call(self, offer: _Offer, peer: str, now: float) -> Call:
        exchange = self.random.randbytes(16)
        self._out = _Outgoing(exchange, peer)
        offer.calls += 1
        offer.reason = "no_answer"
        deadline_s = min(max(ANSWER_SHARE * self._phase_s, MIN_ANSWER_S), MAX_ANSWER_S)
        return Call(exchange, peer, offer.round, self._patience_s(offer, now), deadline_s)

    def _patience_s(self, offer: _Offer, now: float) -> float:
        """How late a swap may begin. A short one should end before the boundary: else it costs that round its offer."""
        if offer.met:
            return 0.0
        return max(0.0, self._next_boundary() - now - min(self._swap_s, SLACK * self._phase_s))

    def _take(self, offer: _Offer, call: Called, now: float) -> Iterable[Action]:
        if self._out:
            yield HangUp(self._out.exchange)
            self._out = None
        yield from self._settle(call.exchange, call.peer, now)
        yield Accept(call.exchange, call.peer, offer.round)

    def _settle(self, exchange: bytes, peer: str, now: float) -> Iterable[Action]:
        self._swap, self._swap_began = (exchange, peer), now
        if self._held:
            held, self._held = self._held, None
            yield self._no(held, now)

    def _no(self, call: Called, now: float) -> Appoint | Refuse:
        """Make an appointment where the next offer is free and opens while the caller's is still there; else refuse."""
        if self._shut:
            return Refuse(call.exchange, self._no_offers())
        if self._shuns(call.peer, now):
            return Refuse(call.exchange, "busy", self._shunned[call.peer].until - now)
        wait_s = max(0.0, self._next_boundary() - now)
        if self._promised:
            return Refuse(call.exchange, "busy", wait_s + self._phase_s)
        if not 0 < wait_s <= call.patience_s:
            return Refuse(call.exchange, "busy", wait_s)
        self._promised = call
        return Appoint(call.exchange, wait_s)

    def _break_promise(self, now: float) -> Iterable[Action]:
        """The offer that was promised does not open."""
        if self._promised:
            promised, self._promised = self._promised, None
            yield Refuse(promised.exchange, self._no_offers())

    def _no_offers(self) -> str:
        """What callers hear of why there is no offer."""
        if self._shut:
            return LEAVING if self._shut == LEAVING else "paused"
        return "busy"

    def _shut_for(self, reason: str, now: float) -> Iterable[Action]:
        """Who leaves does not pause any more."""
        if self._shut == LEAVING:
            return
        self._shut = reason
        yield from self._break_promise(now)
        yield from self._close(reason, now)

    def _close(self, reason: str | None, now: float) -> Iterable[Action]:
        """Close the open offer without a partner; a swap under way goes on."""
        if self._out and not self._swap:
            yield HangUp(self._out.exchange)
            self._out = None
        if self._held:
            held, self._held = self._held, None
            yield self._no(held, now)
        if self._offer and not self._swap:
            ended, self._offer = self._offer, None
            yield self._end(ended, reason)

    def _end(self, offer: _Offer, reason: str | None = None) -> EndRound | CloseOffer:
        """The offer closes, and finds no partner any more."""
        if offer.met:
            return CloseOffer(offer.round)
        return EndRound(offer.round, reason or offer.reason, offer.broke_with, offer.applied, offer.one_sided)

    def _wants(self, offer: _Offer, peer: str, now: float) -> bool:
        """Whether this peer may be the offer's partner, or its next one."""
        return peer not in offer.met and not self._shuns(peer, now) and self._in_time(offer, now)

    def _may_have_another(self, offer: _Offer, now: float) -> bool:
        more = self.swaps is None or len(offer.met) < self.swaps
        return more and not self._shut and self._in_time(offer, now)

    def _in_time(self, offer: _Offer, now: float) -> bool:
        """A first swap always is; a further one if it will probably end before the boundary."""
        if not offer.met:
            return True
        left_s = self._next_boundary() - now
        return self._swap_s < (FURTHER_SHARE if self.swaps is None else 1) * left_s

    def _back_off(self, peer: str, now: float, refusals: int = 1, at_least_s: float = 0.0) -> None:
        refusals += self._backoffs[peer].refusals if peer in self._backoffs else 0
        wait_s = min(MAX_BACKOFF_S, BACKOFF_SHARE * self._phase_s * 2 ** min(refusals - 1, 16))
        self._backoffs[peer] = _Backoff(now + max(wait_s, at_least_s), refusals)

    def _shun(self, peer: str, now: float) -> None:
        """The swap under way with this peer broke."""
        self._back_off(peer, now)
        swaps = 1 + (self._shunned[peer].swaps if peer in self._shunned else 0)
        held_s = now - self._swap_began
        until = now + max(BACKOFF_SHARE * self._phase_s, min(2 ** (swaps - 1) - 1, MAX_SHUNNED) * held_s)
        self._shunned[peer] = _Shunned(until, swaps, forgotten_at=until + MAX_SHUNNED * held_s)

    def _shuns(self, peer: str, now: float) -> bool:
        return peer in self._shunned and self._shunned[peer].until > now

    def _free_at(self, peer: str) -> float:
        """From when on this peer may be called."""
        backoff, shunned = self._backoffs.get(peer), self._shunned.get(peer)
        return max(backoff.until if backoff else float("-inf"), shunned.until if shunned else float("-inf"))

    def _expire(self, now: float) -> Iterable[Action]:
        """With blocking overlap: what a boundary does else. A call of ours has a deadline of its own."""
        offer = self._offer
        if offer is None or not self.blocking:
            return
        if self._swap:
            if now >= self._expires_at() and offer.lag <= MAX_LAG:
                offer.lag = MAX_LAG + 1
                yield HangUp(self._swap[0])
        elif not self._out and (now >= self._expires_at() or not self._candidates):
            self._offer = None
            yield self._end(offer)

    def _expires_at(self) -> float:
        if self._swap:
            return self._swap_began + max(MIN_BLOCKED_S, MAX_LAG * self._phase_s)
        return self._next_boundary()

    def _next_boundary(self) -> float:
        return self._boundary_at + self._phase_s


def _rank(caller: str, callee: str) -> bytes:
    """Of two calls that cross, the one with the smaller rank stands."""
    return hashlib.sha256(f"{caller} {callee}".encode()).digest()
