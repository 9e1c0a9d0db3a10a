"""One node's outer rounds as a pure state machine: whom to call, which calls to refuse, and how each round ended.

It knows no sockets, no clocks, no tensors: an event and the time go in, actions come out, and `wake_at` says when it
needs a `Tick`. A failure is an event like the rest. Notable choices:

- At each boundary an offer opens, and *one* partner may swap it, drawn from the candidates. Drawing only
  among those whose offers are open would lock equal machines into the same few pairs, so a peer that is between two
  offers makes an *appointment*: it keeps its next offer for the caller, who waits on the open stream. So a pair costs
  one call, and each side notices at once when the other goes away.
- A busy peer says when it will be free, and is not called before an appointment with it could be kept.
- An unanswered outgoing call does not make a node busy. A call that comes in meanwhile is accepted if it ranks before
  our own call, which is then hung up; else it is held until our own call is answered. A call's rank is a hash of caller
  and callee: both ends know it, so calls that cross, and rings of any length, resolve the same way everywhere (in a
  ring the first in rank stands). It favours no machine; who draws ids until one ranks first wins calls, but no larger
  share of rounds. An appointment has no rank: who calls while this node waits is accepted, and the appointment hung up.
  (Two that waited for the next offers of others did not meet each other, and who came after them found everybody
  promised: of eight nodes whose boundaries lie close, 3.3% of rounds ended alone, and 1.1% with this.)
- A swap may last over boundaries. While one is under way a boundary opens no offer: that round is `solo: swapping`.
- A swap that fails leaves the offer open for another partner: what was applied stays, and the offered vector has moved
  with it, so the next partner swaps what is there now. The peer is neither called nor accepted for a while, nor one
  that sent bad input (core/standing.py): so a peer that holds swaps open to break them gets less and less of our time.
  While others are there, a swap that would not end within MAX_LAG at its pace is given up after two boundaries.
- Nobody takes more than a fair share of our rounds (core/standing.py) while there is somebody else to call in the same
  phase, be it the partner of the last round: a peer or a place that has had its share is neither called nor accepted,
  nor promised the next offer. Whom to call is drawn by place first: on one machine, which is one place, that is uniform
  over the peers.
- Nobody meets a partner of its last few rounds again (`no_repeat`) as long as there is somebody else to call; of those
  alone the one met longest ago. An appointment with such a one goes to a later caller that is none. But a call is never
  refused for that: it would cost rounds.
- The next offer is not promised to the last partner, nor to its place (`met_last`). Who always called had all rounds of
  honest nodes that had once refused each other five times: nobody else seemed to be there, so the next offer was
  promised to it, and was gone before the node could call anybody.
- With blocking overlap no boundary comes before the round is over, so an offer ends by the clock: when the next
  boundary would have come, or at once where there is no candidate.
- A node that pauses, has used up its quota, or leaves is *closed* for a reason: its rounds end with it, callers are
  refused, and a swap under way goes on. Only leaving is for good.
- Where the run allows it, an offer stays open after its round was committed, for a further swap with another peer. It
  never delays the next round: it waits for no appointment, and begins only if it will probably end before the boundary.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace

from noloco_node.core.partners import Partners, Random
from noloco_node.core.round_events import (
    LEAVING,
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
    Closing,
    EndRound,
    Event,
    Further,
    HangUp,
    Judged,
    Misbehaved,
    Refuse,
    Refused,
    Resuming,
    Settings,
    Stay,
    SwapEnded,
    Tick,
    Unanswered,
)

MAX_CALLS = 6
"""Calls made for one offer, whatever became of them; then it only waits to be called. Bounds the traffic of a swarm in
which everybody is busy, and of one in which every swap fails."""
SEARCH_CALLS = 2
"""After so many calls in vain an offer's next ones go to partners that refused least. Who refuses always would else
get all of them, and the partner of the last round none."""
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
MAX_LAG = 8
"""Boundaries that a swap may last over. Later corrections would still add up, but the snapshot is held too long."""
MIN_BLOCKED_S = 600.0
"""With blocking overlap a swap may take MAX_LAG phases by the clock, but always so long: no correction is late there,
and a short phase is no reason to break the swap."""
MOST_LONGER, LONG_S = 8.0, 600.0
"""A phase counts as so many times the one before it, or as LONG_S, at most. As the process stands still, no clock does:
the phase of a night's standstill made back-offs of hours and quarantines of days out of those of minutes."""
LEASH, SHORT_LEASH = 2, 1
"""Boundaries within which a swap must get on, where others are there; the second after a swap that broke."""
BROKEN_FACTOR = 4.0
"""Times that the time of a swap that broke counts in its peer's share, and in its place's."""
STALL_SHARE, MIN_STALL_S = 1 / 2, 60.0
"""How long a partner may send signs of life without a fragment or an acknowledgement: longer than an inner step or an
evaluation, behind which its corrections may wait; short enough that the offer is still open for another peer after it.
(rounds/swap.py gives a slow link longer.)"""
LOGGED_EVENTS = 200
"""The latest, kept for a bug report: a busy node sees about ten a round."""

TOO_SLOW = "too_slow"
"""A swap was given up after MAX_LAG boundaries, whichever end did it: the link, or what a volunteer allows of it, is
too slow for the run's phases."""
OWN_FAULTS = ("nonfinite", "no_memory")
"""With these this node broke a swap off itself, which is not the partner's doing."""
CALLER_GONE = "caller_gone"
"""The caller hung up before it knew that it was accepted: it had met another peer."""
TAKEN_BACK = "taken_back"
"""The partner was found to lie before the swap's end, and is in quarantine: what else it sends would be taken back."""
STALLED = "stalled"
"""As rounds/swap.py says of a partner that makes no progress."""


@dataclass(slots=True)
class _Outgoing:
    """Our call that is not answered yet."""

    exchange: bytes
    peer: str
    place: str
    began: float
    appointed_at: float | None = None
    """Since when we have an appointment."""


@dataclass(slots=True)
class _Swap:
    """The swap under way."""

    exchange: bytes
    peer: str
    place: str
    began: float
    lag: int = 0
    """Boundaries that came since."""
    progress: list[float] = field(default_factory=lambda: [0.0])
    """At its beginning and at each of these."""
    given_up: str | None = None
    """Why this node hung up."""
    instead: bool = False
    """Our own call was hung up for it."""


@dataclass(slots=True)
class _Offer:
    """One round's offer, from its boundary to its end."""

    round: int
    calls: int = 0
    lag: int = 0
    """Boundaries that came during its swap."""
    reason: str | None = None
    """What became of the last call; None: nobody was called."""
    failed_with: str | None = None
    broke: str | None = None
    """Why that swap did: no later call's answer takes its place, as whoever is told of the round knows one partner."""
    applied: int = 0
    one_sided: int = 0
    """Of swaps that failed."""
    too_late: set[str] = field(default_factory=set)
    """Peers whose next free offer opens when this one has closed."""
    swapped_with: set[str] = field(default_factory=set)
    """Not empty: the round is committed, and the offer is open for further partners."""


class Round:
    """`handle` is the only method that changes anything."""

    def __init__(self, random: Random, me: str = "") -> None:
        """`me`: our own peer id."""
        self.partners = Partners(random)
        """Whom it may call, and why not."""
        self._random = random
        self._me = me
        self._settings = Settings()
        self._offer: _Offer | None = None
        self._outgoing: _Outgoing | None = None
        self._held: Called | None = None
        """A call that waits for the answer to ours."""
        self._swap: _Swap | None = None
        self._swap_s = 0.0
        """How long the last whole swap took: the best estimate of the next one."""
        self._appointment: Called | None = None
        """The next offer is kept for this caller, who waits."""
        self._appointed_at = 0.0
        self._phase_s = 1.0
        self._boundary_at = float("-inf")
        """Before the first boundary there is no next offer to promise."""
        self._closed: str | None = None
        """Why there are no offers and no calls: LEAVING, or the reason in Closing."""
        self._now = 0.0
        self.log: deque[tuple[float, Event]] = deque(maxlen=LOGGED_EVENTS)
        """The latest events, each with its time."""

    def handle(self, event: Event, now: float) -> list[Action]:
        self._now = now
        self.log.append((now, event))
        offered = self._offer
        actions = self._react(event, now)
        self.partners.look(now)
        actions += [*self._expire(now), *self._seek(now)]
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
        return self._swap.exchange if self._swap else None

    @property
    def stall_s(self) -> float:
        """How long a partner may make no progress in a swap."""
        return max(MIN_STALL_S, STALL_SHARE * self._phase_s)

    def wake_at(self) -> float | None:
        """When a Tick is wanted, or None: only another event can change anything."""
        if self._offer is None or (self._outgoing and not self._swap):
            return None
        waits = [self._expires_at()] if self._settings.blocking else []
        if not self._swap and self._offer.calls < MAX_CALLS:
            waits += map(self.partners.free_at, self.partners.candidates.keys() - self._offer.too_late)
        return min((at for at in waits if at > self._now), default=None)

    # ---- events ----
    def _react(self, event: Event, now: float) -> list[Action]:  # noqa: PLR0911, PLR0912 - one for each kind
        match event:
            case Settings():
                self._settings = event
            case Boundary():
                return self._at_boundary(event, now)
            case Candidates(places, own):
                self.partners.may_be(places, own)
            case Called():
                return self._at_call(event, now)
            case CallerGone(exchange):
                self._held = None if self._held and self._held.exchange == exchange else self._held
                if self._appointment and self._appointment.exchange == exchange:
                    gone, self._appointment = self._appointment, None
                    self.partners.charge(gone.peer, gone.place, self._passed_s(self._appointed_at) / self._phase_s)
                return self._at_swap_end(SwapEnded(exchange, CALLER_GONE), now)
            case Accepted(exchange):
                return self._at_accepted(exchange, now)
            case Appointed(exchange, in_s):
                return self._at_appointed(exchange, in_s, now)
            case Refused() | Unanswered():
                return self._at_refusal(event, now)
            case SwapEnded():
                return self._at_swap_end(event, now)
            case Misbehaved(peer, reason):
                self.partners.ledger.misbehaved(peer, reason, now, self._phase_s)
            case Judged(peer, verdict, exchange):
                phases = self.partners.ledger.judged(peer, self.partners.crowd(peer), verdict, now, self._phase_s)
                self.partners.charge(peer, self.partners.place(peer), phases)
                if verdict.a_lie and self._swap and self._swap.exchange == exchange:
                    self._swap.given_up = TAKEN_BACK
                    return [HangUp(exchange)]
            case Closing(reason):
                return self._close_for(reason, now)
            case Resuming():
                self._closed = LEAVING if self._closed == LEAVING else None
            case Tick():
                pass
        return []

    def _at_boundary(self, event: Boundary, now: float) -> list[Action]:
        most_s = max(MOST_LONGER * self._phase_s, LONG_S) if self._boundary_at > float("-inf") else float("inf")
        self._phase_s, self._boundary_at = min(event.phase_s, most_s), now
        self.partners.share(now)
        if self._swap and self._offer:
            self._offer.lag += 1
            late: list[Action] = [HangUp(self._swap.exchange)] if self._gives_up(self._offer, event, now) else []
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
        call = replace(call, place=call.place or self.partners.candidates.get(call.peer, ""))
        ours = self._outgoing
        wanted = self._wants(call.peer, now) and not self._yields(call, now)
        if self._offer is None or self._swap or self._closed or not wanted:
            return self._decline(call, now)
        if ours and ours.appointed_at is None and _rank(call.peer, self._me) > _rank(self._me, ours.peer):
            if self._held:
                return self._decline(call, now)
            self._held = call
            return []
        return self._accept(self._offer, call, now)

    def _at_accepted(self, exchange: bytes, now: float) -> list[Action]:
        if self._outgoing is None or self._outgoing.exchange != exchange or self._offer is None:
            return [HangUp(exchange)]  # another swap has begun meanwhile
        call, self._outgoing = self._outgoing, None
        return [*self._begin_swap(exchange, call.peer, call.place, now), Begin(exchange, call.peer, self._offer.round)]

    def _at_appointed(self, exchange: bytes, in_s: float, now: float) -> list[Action]:
        if self._outgoing is None or self._outgoing.exchange != exchange or self._offer is None:
            return []
        if self._held:
            return self._accept(self._offer, self._held, now)
        self._outgoing.appointed_at, self._offer.reason = now, "appointment"
        return [Stay(exchange, min(in_s, self._phase_s) + max(MIN_SLACK_S, SLACK * self._phase_s))]

    def _at_refusal(self, event: Refused | Unanswered, now: float) -> list[Action]:
        if self._outgoing is None or self._outgoing.exchange != event.exchange or self._offer is None:
            return []
        call, self._outgoing = self._outgoing, None
        waited_s = 0.0 if call.appointed_at is None else self._passed_s(call.appointed_at)
        self._offer.reason = "missed_appointment" if waited_s else event.reason
        lost_s = self._passed_s(call.began) if isinstance(event, Unanswered) else waited_s
        self.partners.charge(call.peer, call.place, lost_s / self._phase_s)
        if self._held:
            return self._accept(self._offer, self._held, now)
        if isinstance(event, Refused):
            if event.retry_in_s > self._patience_s(self._offer, now):
                self._offer.too_late.add(call.peer)
            self.partners.backoffs.failed(call.peer, now, self._phase_s, at_least_s=event.retry_in_s - self._phase_s)
        else:
            self.partners.backoffs.failed(call.peer, now, self._phase_s, silent=not waited_s)
            if waited_s:
                self.partners.ledger.wasted(call.peer, waited_s, now, self._phase_s)
        return []

    def _at_swap_end(self, event: SwapEnded, now: float) -> list[Action]:
        if self._swap is None or self._swap.exchange != event.exchange or self._offer is None:
            return []
        swap, offer = self._swap, self._offer
        self._swap = None
        held_s = self._passed_s(swap.began)
        if event.reason is None:
            self.partners.charge(swap.peer, swap.place, max(1.0, held_s / self._phase_s))
            return self._at_whole_swap(offer, swap.peer, held_s, event, now)
        held_phases = held_s / self._phase_s
        taken_back = swap.given_up == TAKEN_BACK
        if ours := not event.faulty and (taken_back or event.reason in OWN_FAULTS):
            self.partners.charge(swap.peer, swap.place, max(float(taken_back), held_phases))
        else:  # one that brought nothing costs its place a whole round, however short it was: new identities are free
            least = 0.0 if event.applied and not event.faulty else 1.0
            self.partners.charge(swap.peer, swap.place, max(least, BROKEN_FACTOR * held_phases))
        self.partners.backoffs.failed(swap.peer, now, self._phase_s)
        if event.faulty:
            self.partners.ledger.misbehaved(swap.peer, event.reason, now, self._phase_s)
        elif not ours:
            self.partners.ledger.failed(swap.peer, held_s, now, self._phase_s)
        too_slow = offer.lag >= MAX_LAG
        offer.broke, offer.failed_with = TOO_SLOW if too_slow else swap.given_up or event.reason, swap.peer
        offer.calls -= swap.instead and not event.applied
        offer.applied += event.applied
        offer.one_sided += event.one_sided
        if not (self._closed or now >= self._next_boundary() or too_slow):
            return []
        self._offer = None
        return [self._end(offer)]

    def _at_whole_swap(self, offer: _Offer, peer: str, lasted_s: float, event: SwapEnded, now: float) -> list[Action]:
        self._swap_s = lasted_s
        self.partners.swapped(peer, now)
        first = not offer.swapped_with
        if not first:
            self.partners.shares.pay_off()  # this round has more to share
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
        whom = self.partners
        able = [p for p in whom.candidates if p not in self._offer.too_late]
        free = [p for p in able if self._wants(p, now) and whom.free_at(p) <= now]
        if free and self._offer.calls >= SEARCH_CALLS and not self._offer.swapped_with:
            best = min(map(whom.refusals, free))
            return [self._call(self._offer, whom.draw([p for p in free if whom.refusals(p) == best]), now)]
        last, end = whom.last, self._next_boundary()
        others = (p for p in able if p != last and self._wants(p, now))
        if not free or (free == [last] and any(whom.free_at(p) <= end for p in others)):
            return []
        fair = [p for p in free if not whom.shares.over_for(p, whom.candidates[p])] or free
        return [self._call(self._offer, whom.draw([p for p in fair if p != last] or fair), now)]

    def _yields(self, call: Called, now: float) -> bool:
        met = self._offer.swapped_with if self._offer else ()
        return self.partners.yields(call.peer, call.place, now, self._next_boundary(), met)

    def _gives_up(self, offer: _Offer, event: Boundary, now: float) -> bool:
        """Whether the swap under way is too old, or would not end in time at its pace while others wait."""
        swap = self._swap
        if swap is None or swap.given_up:
            return False
        swap.lag += 1
        swap.progress.append(0.0 if event.progress is None else event.progress)
        if offer.lag > MAX_LAG:
            return True
        leash, lasted = LEASH, (now - swap.began) / self._phase_s
        if self.partners.ledger.broke_lately(swap.peer, now):
            leash = SHORT_LEASH
        waits = any(p != swap.peer and not self.partners.backoffs.is_silent(p) for p in self.partners.candidates)
        if swap.lag < leash or lasted < leash / 2 or event.progress is None or not waits:
            return False
        gets_on = event.progress > swap.progress[-1 - leash]
        if gets_on and event.progress * (MAX_LAG + 1) >= lasted:
            return False
        swap.given_up = TOO_SLOW if gets_on else STALLED
        return True

    def _call(self, offer: _Offer, peer: str, now: float) -> Call:
        exchange = self._random.randbytes(16)
        self._outgoing = _Outgoing(exchange, peer, self.partners.candidates[peer], now)
        offer.calls += 1
        offer.reason = "no_answer"
        deadline_s = min(max(ANSWER_SHARE * self._phase_s, MIN_ANSWER_S), MAX_ANSWER_S)
        return Call(exchange, peer, self._patience_s(offer, now), deadline_s)

    def _patience_s(self, offer: _Offer, now: float) -> float:
        """How late a swap may begin. A short one should end before the boundary: else that round has no offer."""
        if offer.swapped_with:
            return 0.0
        return max(0.0, self._next_boundary() - now - min(self._swap_s, SLACK * self._phase_s))

    def _accept(self, offer: _Offer, call: Called, now: float) -> list[Action]:
        ours: list[Action] = [HangUp(self._outgoing.exchange)] if self._outgoing else []
        self._outgoing = None
        self._held = None if call is self._held else self._held
        begun = self._begin_swap(call.exchange, call.peer, call.place, now, instead=bool(ours))
        return [*ours, *begun, Accept(call.exchange, call.peer, offer.round)]

    def _begin_swap(self, exchange: bytes, peer: str, place: str, now: float, *, instead: bool = False) -> list[Action]:
        """A held call is declined."""
        self._swap = _Swap(exchange, peer, place, now, instead=instead)
        self.partners.begins(peer, place)
        return self._decline_held(now)

    def _decline_held(self, now: float) -> list[Action]:
        held, self._held = self._held, None
        return self._decline(held, now) if held else []

    def _decline(self, call: Called, now: float) -> list[Action]:
        """Make an appointment where the next offer is free and opens while the caller's is still open; else refuse."""
        if self._closed:
            return [Refuse(call.exchange, self._refusal())]
        if barred := self._barred(call, now):
            return [barred]
        self.partners.backoffs.called(call.peer)
        wait_s = max(0.0, self._next_boundary() - now)
        if not 0 < wait_s <= call.patience_s:
            return [Refuse(call.exchange, "busy", wait_s)]
        holder = self._appointment
        if self.partners.met_last(call.peer, call.place) or (holder and not self._goes_before(call, holder)):
            return [Refuse(call.exchange, "busy", wait_s + self._phase_s)]
        lost = [Refuse(holder.exchange, "busy", wait_s + self._phase_s)] if holder else []
        self._appointment, self._appointed_at = call, now
        return [*lost, Appoint(call.exchange, wait_s)]

    def _barred(self, call: Called, now: float) -> Refuse | None:
        """Why this caller may not have the next offer either."""
        alone = self.partners.alone(call.peer)
        if (until := self.partners.ledger.quarantined_until(call.peer, alone=alone)) > now:
            return Refuse(call.exchange, "quarantined", until - now)
        if (until := self.partners.ledger.free_at(call.peer, alone=alone)) > now:
            return Refuse(call.exchange, "busy", until - now)
        if self._yields(call, now):
            phases = self.partners.shares.over_for(call.peer, call.place)
            return Refuse(call.exchange, "busy", max(0.0, self._next_boundary() - now) + phases * self._phase_s)
        return None

    def _goes_before(self, call: Called, holder: Called) -> bool:
        """Whether the one with the appointment has had its share, or was met lately, and this caller was not. Of equals
        the first stays: to draw anew for each caller would cost honest swarms one round in a hundred."""
        recent, over = self.partners.recent(), self.partners.shares.over_for
        if bool(over(holder.peer, holder.place)) != bool(over(call.peer, call.place)):
            return over(holder.peer, holder.place) > 0
        return holder.peer in recent and call.peer not in recent

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
        reason = reason or offer.broke or offer.reason or self.partners.why_none(self._now)
        return EndRound(offer.round, reason, offer.failed_with, offer.applied, offer.one_sided)

    def _wants(self, peer: str, now: float) -> bool:
        """Whether this peer may be the open offer's partner, or its next one."""
        offer = self._offer
        if offer is None or peer in offer.swapped_with:
            return False
        return self.partners.ledger.free_at(peer, alone=self.partners.alone(peer)) <= now and self._in_time(offer, now)

    def _may_have_another(self, offer: _Offer, now: float) -> bool:
        more = self._settings.swaps is None or len(offer.swapped_with) < self._settings.swaps
        return more and not self._closed and self._in_time(offer, now)

    def _in_time(self, offer: _Offer, now: float) -> bool:
        """A first swap always is; a further one if it will probably end before the boundary."""
        if not offer.swapped_with:
            return True
        left_s = self._next_boundary() - now
        return self._swap_s < (FURTHER_SHARE if self._settings.swaps is None else 1) * left_s

    def _expire(self, now: float) -> list[Action]:
        """End by the clock what else a boundary ends, where training blocks. A call has a deadline of its own."""
        offer = self._offer
        if offer is None or not self._settings.blocking:
            return []
        if self._swap:
            if now < self._expires_at() or offer.lag > MAX_LAG:
                return []
            offer.lag = MAX_LAG + 1
            return [HangUp(self._swap.exchange)]
        if self._outgoing or (now < self._expires_at() and self.partners.candidates):
            return []
        self._offer = None
        return [self._end(offer)]

    def _passed_s(self, since: float) -> float:
        """How long a peer held this node: no longer than a swap may last, whatever the clock says of a standstill."""
        return min(self._now - since, max(MIN_BLOCKED_S, (MAX_LAG + 1) * self._phase_s))

    def _expires_at(self) -> float:
        if self._swap:
            return self._swap.began + max(MIN_BLOCKED_S, MAX_LAG * self._phase_s)
        return self._next_boundary()

    def _next_boundary(self) -> float:
        return self._boundary_at + self._phase_s


def _rank(caller: str, callee: str) -> bytes:
    """Of two calls that cross, the one with the smaller rank stands."""
    return hashlib.sha256(f"{caller} {callee}".encode()).digest()
