"""One node's outer rounds as a pure state machine: whom to call, which calls to refuse, and how each round ended.

It knows no sockets, no clocks, no tensors: an event and the time go in, actions come out, and `wake_at` says when it
needs a `Tick`. A failure is an event like the rest. Notable choices:

- At each boundary an offer opens, and *one* partner may swap it, drawn uniformly from the candidates. Drawing only
  among those whose offers are open would lock equal machines into the same few pairs, so a peer that is between two
  offers makes an *appointment*: it keeps its next offer for the caller, who waits on the open stream. So a pair costs
  one call, and each side notices at once when the other goes away.
- A busy peer says when it will be free, and is not called before an appointment with it could be kept.
- An unanswered outgoing call does not make a node busy. A call that comes in meanwhile is accepted if it ranks before
  our own call, which is then hung up; else it is held until our own call is answered. A call's rank is a hash of caller
  and callee: both ends know it, so calls that cross, and rings of any length, resolve the same way everywhere (in a
  ring the first in rank stands). It favours no machine, and no caller can choose it, as it could an id that it draws.
- A swap may last over boundaries. While one is under way a boundary opens no offer: that round is `solo: swapping`.
- A swap that fails leaves the offer open for another partner: what was applied stays, and the offered vector has moved
  with it, so the next partner swaps what is there now. After n failed swaps in a row, a peer is neither called nor
  accepted for (2^(n-1) - 1) times the last swap's duration, and at least for BACKOFF_SHARE of a phase. So an honest
  pair soon tries again, and a peer that holds swaps open to break them gets less and less of our time.
- With blocking overlap no boundary comes before the round is over, so an offer ends by the clock: when the next
  boundary would have come, or at once where there is no candidate.
- A node that pauses, has used up its quota, or leaves is *closed* for a reason: its rounds end with it, callers are
  refused, and a swap under way goes on. Only leaving is for good.
- Where the run allows it, an offer stays open after its round was committed, for a further swap with another peer. It
  never delays the next round: it waits for no appointment, and begins only if it will probably end before the boundary.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from noloco_node.core.round_events import (
    SWAPPING,
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
    Settings,
    Stay,
    Stopping,
    SwapEnded,
    Tick,
    Unanswered,
)

MAX_CALLS = 4
"""Calls made for one offer, whatever became of them; then it only waits to be called. Bounds the traffic of a swarm in
which everybody is busy, and of one in which every swap fails."""
MAX_FURTHER_CALLS = 1
"""Calls made for each further swap of a committed round: it is optional, so no search is made."""
FURTHER_SHARE = 1 / 4
"""With `swaps=None`, a further swap begins if it will probably take no more than this share of the time left."""
SLACK = 0.25
"""A caller waits for this share of a phase beyond the appointed time, which was estimated from the last phase."""
MIN_SLACK_S = 1.0
ANSWER_SHARE, MIN_ANSWER_S, MAX_ANSWER_S = 1 / 4, 2.0, 10.0
"""How long a call waits for its answer: a share of a phase, between what a dial over a relay takes and what a silent
peer may cost."""
BACKOFF_SHARE = 1 / 8
"""First back-off after a refusal, as a share of a phase; it doubles with each refusal in a row."""
MAX_BACKOFF_S = 60.0
SILENT = 5
"""Refusals in a row after which a peer no longer counts as another partner to prefer. Silence counts as so many at
once: it cost a whole deadline, so the first back-off is already two phases."""
MAX_LAG = 8
"""Boundaries that a swap may last over. Later corrections would still add up, but the snapshot is held too long."""
MIN_BLOCKED_S = 600.0
"""With blocking overlap a swap may take MAX_LAG phases by the clock, but always so long: no correction is late there,
and a short phase is no reason to break the swap."""
MAX_FAILED_FACTOR = 64
"""The back-off after failed swaps is at most so many times the last one's duration: in the long run such a peer gets
1.5% of our time. After as long again without a swap, its failures are forgotten."""
STALL_SHARE, MIN_STALL_S = 1 / 2, 60.0
"""How long a partner may send signs of life without a fragment or an acknowledgement: longer than an inner step or an
evaluation, behind which its corrections may wait; short enough that the offer is still open for another peer after it.
(rounds/swap.py gives a slow link longer.)"""
LOGGED_EVENTS = 200
"""The latest, kept for a bug report: a busy node sees about ten a round."""

LEAVING = "leaving"
TOO_SLOW = "too_slow"
"""A swap was given up after MAX_LAG boundaries, whichever end did it: the link, or what a volunteer allows of it, is
too slow for the run's phases."""


class Random(Protocol):
    """The part of `random.Random` that is used here."""

    def choice(self, options: Sequence[str], /) -> str: ...
    def randbytes(self, n: int, /) -> bytes: ...


@dataclass(slots=True)
class _Outgoing:
    """Our call that is not answered yet."""

    exchange: bytes
    peer: str
    appointed: bool = False
    """We have an appointment, and are busy for everybody else."""


@dataclass(slots=True)
class _Backoff:
    """After refusals and silence: the peer is not called until then."""

    until: float
    refusals: int


@dataclass(slots=True)
class _FailedSwaps:
    """With one peer, in a row: until then it is neither called nor accepted."""

    until: float
    count: int
    forgotten_at: float


@dataclass(slots=True)
class _Offer:
    """One round's offer, from its boundary to its end."""

    round: int
    calls: int = 0
    lag: int = 0
    """Boundaries that came during its swap."""
    reason: str = "no_peers"
    """Why the round would be solo if it ended now."""
    failed_with: str | None = None
    applied: int = 0
    one_sided: int = 0
    """Of swaps that failed."""
    swapped_with: set[str] = field(default_factory=set)
    """Not empty: the round is committed, and the offer is open for further partners."""


class Round:
    """`handle` is the only method that changes anything."""

    def __init__(self, random: Random, me: str = "") -> None:
        """`me`: our own peer id."""
        self._random = random
        self._me = me
        self._settings = Settings()
        self._candidates: Mapping[str, str] = {}
        """Place by peer."""
        self._offer: _Offer | None = None
        self._outgoing: _Outgoing | None = None
        self._held: Called | None = None
        """A call that waits for the answer to ours."""
        self._swap: tuple[bytes, str] | None = None
        """Exchange and partner of the swap under way."""
        self._swap_began = 0.0
        self._swap_s = 0.0
        """How long the last whole swap took: the best estimate of the next one."""
        self._appointment: Called | None = None
        """The next offer is kept for this caller, who waits."""
        self._last_partner: str | None = None
        self._backoffs: dict[str, _Backoff] = {}
        self._failed: dict[str, _FailedSwaps] = {}
        """Of callers too, who need not be candidates."""
        self._phase_s = 1.0
        self._boundary_at = float("-inf")
        """Before the first boundary there is no next offer to promise."""
        self._closed: str | None = None
        """Why there are no offers and no calls: LEAVING, or the reason in Pausing."""
        self._now = 0.0
        self._log: deque[tuple[float, Event]] = deque(maxlen=LOGGED_EVENTS)

    def handle(self, event: Event, now: float) -> list[Action]:
        self._now = now
        self._log.append((now, event))
        offered = self._offer
        actions = [*self._react(event, now), *self._expire(now), *self._seek(now)]
        if self._settings.blocking and offered and not self._offer:
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
        """How long a partner may make no progress in a swap."""
        return max(MIN_STALL_S, STALL_SHARE * self._phase_s)

    @property
    def log(self) -> tuple[tuple[float, Event], ...]:
        """The latest events, each with its time."""
        return tuple(self._log)

    def wake_at(self) -> float | None:
        """When a Tick is wanted, or None: only another event can change anything."""
        if self._offer is None or (self._outgoing and not self._swap):
            return None
        waits = [self._expires_at()] if self._settings.blocking else []
        if not self._swap and self._offer.calls < MAX_CALLS:
            waits += [self._free_at(peer) for peer in self._candidates.keys() & {*self._backoffs, *self._failed}]
        return min((at for at in waits if at > self._now), default=None)

    # ---- events ----
    def _react(self, event: Event, now: float) -> list[Action]:  # noqa: PLR0911, PLR0912 - one for each kind
        match event:
            case Settings():
                self._settings = event
            case Boundary():
                return self._at_boundary(event, now)
            case Candidates(places):
                self._candidates = places
                self._backoffs = {p: b for p, b in self._backoffs.items() if p in places}
                kept = {p: f for p, f in self._failed.items() if f.forgotten_at > now}
                self._failed = kept if places else {}  # all gone at once: our own network failed, and no peer
            case Called():
                return self._at_call(event, now)
            case CallerGone(exchange):
                self._held = None if self._held and self._held.exchange == exchange else self._held
                if self._appointment and self._appointment.exchange == exchange:
                    self._appointment = None
                return self._at_swap_end(SwapEnded(exchange, "hung_up"), now)  # accepted, but gone before it knew
            case Accepted(exchange):
                return self._at_accepted(exchange, now)
            case Appointed(exchange, in_s):
                return self._at_appointed(exchange, in_s, now)
            case Refused() | Unanswered():
                return self._at_refusal(event, now)
            case SwapEnded():
                return self._at_swap_end(event, now)
            case Stopping():
                return self._close_for(LEAVING, now)
            case Pausing(reason):
                return self._close_for(reason, now)
            case Resuming():
                self._closed = LEAVING if self._closed == LEAVING else None
            case Tick():
                pass
        return []

    def _at_boundary(self, event: Boundary, now: float) -> list[Action]:
        self._phase_s, self._boundary_at = event.phase_s, now
        if self._swap and self._offer:
            self._offer.lag += 1
            late: list[Action] = [HangUp(self._swap[0])] if self._offer.lag > MAX_LAG else []
            return [*late, *self._cancel_appointment(), EndRound(event.round, SWAPPING)]
        if closed := event.closed or self._closed:
            return [*self._cancel_appointment(), *self._close_offer(None, now), EndRound(event.round, closed)]
        ended: list[Action] = [self._end(self._offer)] if self._offer else []
        self._offer = _Offer(event.round)  # an unanswered call, and a caller with an appointment, may have this one
        if self._appointment is None:
            return ended
        appointed, self._appointment = self._appointment, None
        return [*ended, *self._accept(self._offer, appointed, now)]

    def _at_call(self, call: Called, now: float) -> list[Action]:
        appointed = self._outgoing is not None and self._outgoing.appointed and self._outgoing.peer != call.peer
        if self._offer is None or self._swap or self._closed or appointed or not self._wants(call.peer, now):
            return [self._decline(call, now)]
        ours = self._outgoing
        if ours and not ours.appointed and _rank(call.peer, self._me) > _rank(self._me, ours.peer):
            if self._held:
                return [self._decline(call, now)]
            self._held = call
            return []
        return self._accept(self._offer, call, now)

    def _at_accepted(self, exchange: bytes, now: float) -> list[Action]:
        if self._outgoing is None or self._outgoing.exchange != exchange or self._offer is None:
            return [HangUp(exchange)]  # another swap has begun meanwhile
        peer, self._outgoing = self._outgoing.peer, None
        return [*self._begin_swap(exchange, peer, now), Begin(exchange, peer, self._offer.round)]

    def _at_appointed(self, exchange: bytes, in_s: float, now: float) -> list[Action]:
        if self._outgoing is None or self._outgoing.exchange != exchange or self._offer is None:
            return []
        if self._held:
            held, self._held = self._held, None
            return self._accept(self._offer, held, now)
        self._outgoing.appointed, self._offer.reason = True, "appointment"
        return [Stay(exchange, min(in_s, self._phase_s) + max(MIN_SLACK_S, SLACK * self._phase_s))]

    def _at_refusal(self, event: Refused | Unanswered, now: float) -> list[Action]:
        if self._outgoing is None or self._outgoing.exchange != event.exchange or self._offer is None:
            return []
        call, self._outgoing = self._outgoing, None
        self._offer.reason = "missed_appointment" if call.appointed else event.reason
        if self._held:
            held, self._held = self._held, None
            return self._accept(self._offer, held, now)
        if isinstance(event, Refused):
            self._back_off(call.peer, now, 1, event.retry_in_s - self._phase_s)
        else:
            self._back_off(call.peer, now, 1 if call.appointed else SILENT)
        return []

    def _at_swap_end(self, event: SwapEnded, now: float) -> list[Action]:
        if self._swap is None or self._swap[0] != event.exchange or self._offer is None:
            return []
        peer, offer = self._swap[1], self._offer
        self._swap = None
        if event.reason is None:
            return self._at_whole_swap(offer, peer, event, now)
        self._back_off_after_failure(peer, now)
        too_slow = offer.lag >= MAX_LAG
        offer.reason, offer.failed_with = TOO_SLOW if too_slow else event.reason, peer
        offer.applied += event.applied
        offer.one_sided += event.one_sided
        if not (self._closed or now >= self._next_boundary() or too_slow):
            return []
        self._offer = None
        return [self._end(offer)]

    def _at_whole_swap(self, offer: _Offer, peer: str, event: SwapEnded, now: float) -> list[Action]:
        self._last_partner, self._swap_s = peer, now - self._swap_began
        self._backoffs.pop(peer, None)
        self._failed.pop(peer, None)
        first = not offer.swapped_with
        offer.swapped_with.add(peer)
        further = self._may_have_another(offer, now)
        ended: Action = Further(offer.round, peer, len(offer.swapped_with))
        if first:
            ended = EndRound(offer.round, None, peer, event.applied, event.one_sided, further)
        if further:
            offer.calls, offer.lag = MAX_CALLS - MAX_FURTHER_CALLS, 0
            return [ended]
        self._offer = None
        return [ended] if first else [ended, CloseOffer(offer.round)]

    # ---- parts ----
    def _seek(self, now: float) -> list[Action]:
        """Draw a partner and call it, if the offer is open and waits for nobody."""
        if self._offer is None or self._swap or self._outgoing or self._offer.calls >= MAX_CALLS:
            return []
        free = sorted(p for p in self._candidates if self._wants(p, now) and self._free_at(p) <= now)
        others = [p for p in free if p != self._last_partner]
        if others or (free and not self._others_answer()):
            return [self._call(self._offer, self._random.choice(others or free), now)]
        return []

    def _others_answer(self) -> bool:
        """Whether waiting for a partner other than the last one makes sense."""
        others = self._candidates.keys() - {self._last_partner}
        return any(p not in self._backoffs or self._backoffs[p].refusals < SILENT for p in others)

    def _call(self, offer: _Offer, peer: str, now: float) -> Call:
        exchange = self._random.randbytes(16)
        self._outgoing = _Outgoing(exchange, peer)
        offer.calls += 1
        offer.reason = "no_answer"
        deadline_s = min(max(ANSWER_SHARE * self._phase_s, MIN_ANSWER_S), MAX_ANSWER_S)
        return Call(exchange, peer, offer.round, self._patience_s(offer, now), deadline_s)

    def _patience_s(self, offer: _Offer, now: float) -> float:
        """How late a swap may begin. A short one should end before the boundary: else that round has no offer."""
        if offer.swapped_with:
            return 0.0
        return max(0.0, self._next_boundary() - now - min(self._swap_s, SLACK * self._phase_s))

    def _accept(self, offer: _Offer, call: Called, now: float) -> list[Action]:
        ours: list[Action] = [HangUp(self._outgoing.exchange)] if self._outgoing else []
        self._outgoing = None
        return [*ours, *self._begin_swap(call.exchange, call.peer, now), Accept(call.exchange, call.peer, offer.round)]

    def _begin_swap(self, exchange: bytes, peer: str, now: float) -> list[Action]:
        """A held call is declined."""
        self._swap, self._swap_began = (exchange, peer), now
        return self._decline_held(now)

    def _decline_held(self, now: float) -> list[Action]:
        held, self._held = self._held, None
        return [self._decline(held, now)] if held else []

    def _decline(self, call: Called, now: float) -> Appoint | Refuse:
        """Make an appointment where the next offer is free and opens while the caller's is still open; else refuse."""
        if self._closed:
            return Refuse(call.exchange, self._refusal())
        if self._failed_lately(call.peer, now):
            return Refuse(call.exchange, "busy", self._failed[call.peer].until - now)
        wait_s = max(0.0, self._next_boundary() - now)
        if self._appointment:
            return Refuse(call.exchange, "busy", wait_s + self._phase_s)
        if not 0 < wait_s <= call.patience_s:
            return Refuse(call.exchange, "busy", wait_s)
        self._appointment = call
        return Appoint(call.exchange, wait_s)

    def _cancel_appointment(self) -> list[Action]:
        """The offer of an appointment does not open."""
        appointed, self._appointment = self._appointment, None
        return [Refuse(appointed.exchange, self._refusal())] if appointed else []

    def _refusal(self) -> str:
        """The reason sent to callers when there is no offer. It does not say which limit of ours it was."""
        if self._closed:
            return LEAVING if self._closed == LEAVING else "paused"
        return "busy"

    def _close_for(self, reason: str, now: float) -> list[Action]:
        """A node that leaves does not pause any more."""
        if self._closed == LEAVING:
            return []
        self._closed = reason
        return [*self._cancel_appointment(), *self._close_offer(reason, now)]

    def _close_offer(self, reason: str | None, now: float) -> list[Action]:
        """Close the open offer without a partner; a swap under way goes on."""
        actions: list[Action] = []
        if self._outgoing and not self._swap:
            actions.append(HangUp(self._outgoing.exchange))
            self._outgoing = None
        actions += self._decline_held(now)
        if self._offer and not self._swap:
            actions.append(self._end(self._offer, reason))
            self._offer = None
        return actions

    def _end(self, offer: _Offer, reason: str | None = None) -> EndRound | CloseOffer:
        """The offer closes; no further partner comes."""
        if offer.swapped_with:
            return CloseOffer(offer.round)
        return EndRound(offer.round, reason or offer.reason, offer.failed_with, offer.applied, offer.one_sided)

    def _wants(self, peer: str, now: float) -> bool:
        """Whether this peer may be the open offer's partner, or its next one."""
        offer = self._offer
        if offer is None or peer in offer.swapped_with or self._failed_lately(peer, now):
            return False
        return self._in_time(offer, now)

    def _may_have_another(self, offer: _Offer, now: float) -> bool:
        more = self._settings.swaps is None or len(offer.swapped_with) < self._settings.swaps
        return more and not self._closed and self._in_time(offer, now)

    def _in_time(self, offer: _Offer, now: float) -> bool:
        """A first swap always is; a further one if it will probably end before the boundary."""
        if not offer.swapped_with:
            return True
        left_s = self._next_boundary() - now
        return self._swap_s < (FURTHER_SHARE if self._settings.swaps is None else 1) * left_s

    def _back_off(self, peer: str, now: float, refusals: int = 1, at_least_s: float = 0.0) -> None:
        refusals += self._backoffs[peer].refusals if peer in self._backoffs else 0
        wait_s = min(MAX_BACKOFF_S, BACKOFF_SHARE * self._phase_s * 2 ** min(refusals - 1, 16))
        self._backoffs[peer] = _Backoff(now + max(wait_s, at_least_s), refusals)

    def _back_off_after_failure(self, peer: str, now: float) -> None:
        """Of the swap with this peer that has just ended."""
        self._back_off(peer, now)
        count = 1 + (self._failed[peer].count if peer in self._failed else 0)
        lasted_s = now - self._swap_began
        wait_s = max(BACKOFF_SHARE * self._phase_s, min(2 ** (count - 1) - 1, MAX_FAILED_FACTOR) * lasted_s)
        self._failed[peer] = _FailedSwaps(now + wait_s, count, now + wait_s + MAX_FAILED_FACTOR * lasted_s)

    def _failed_lately(self, peer: str, now: float) -> bool:
        return peer in self._failed and self._failed[peer].until > now

    def _free_at(self, peer: str) -> float:
        """When this peer may be called again."""
        backoff, failed = self._backoffs.get(peer), self._failed.get(peer)
        return max(backoff.until if backoff else float("-inf"), failed.until if failed else float("-inf"))

    def _expire(self, now: float) -> list[Action]:
        """End by the clock what else a boundary ends, where training blocks. A call has a deadline of its own."""
        offer = self._offer
        if offer is None or not self._settings.blocking:
            return []
        if self._swap:
            if now < self._expires_at() or offer.lag > MAX_LAG:
                return []
            offer.lag = MAX_LAG + 1
            return [HangUp(self._swap[0])]
        if self._outgoing or (now < self._expires_at() and self._candidates):
            return []
        self._offer = None
        return [self._end(offer)]

    def _expires_at(self) -> float:
        if self._swap:
            return self._swap_began + max(MIN_BLOCKED_S, MAX_LAG * self._phase_s)
        return self._next_boundary()

    def _next_boundary(self) -> float:
        return self._boundary_at + self._phase_s


def _rank(caller: str, callee: str) -> bytes:
    """Of two calls that cross, the one with the smaller rank stands."""
    return hashlib.sha256(f"{caller} {callee}".encode()).digest()
