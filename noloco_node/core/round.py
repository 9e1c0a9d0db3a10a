"""One node's outer rounds as a pure state machine: whom to meet, when to say no, and how each round ended.

It knows no sockets, no clocks, no tensors: an event and the time go in, actions come out, and `wake_at` says when it
wants to hear a `Tick`. A failure is an event like the rest. Notable choices:

- An offer opens at each boundary and is answered by *one* partner, drawn uniformly from the candidates. Drawing only
  among those whose offers are open would lock equal boxes into the same few pairs, so a peer that is between two offers
  makes an *appointment*: its next offer is kept for the caller, and it calls back when that opens.
- An unanswered outgoing call does not make a node busy. A call that comes in meanwhile is taken if its exchange id is
  smaller than that of the own call, which is then hung up; else it is held until the own call is answered. Ids are
  drawn at random and both ends see both, so calls that cross, and rings of any length, resolve the same way
  everywhere: around a ring the smallest id stands. (Ordering by peer id would always favour the same boxes.)
- A swap may straddle boundaries. While one is under way a boundary opens no offer: that round is `solo: swapping`.
- A swap that breaks before anything was applied leaves the offer open for somebody else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MAX_CALLS = 4
"""Calls made for one offer; then it waits to be called. Bounds the traffic of a swarm in which everybody is busy."""
SLACK = 0.25
"""A kept offer waits this share of a phase beyond the appointed time: the estimate comes from the phase before."""
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


# ---- what happens ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Boundary:
    """An inner phase ended and the local step was taken."""

    round: int
    phase_s: float
    """How long the phase took: the best guess at the next one."""
    closed: str | None = None
    """Why no offer comes with it (a swap under way, a non-finite vector), or None: the offer is open."""


@dataclass(frozen=True, slots=True)
class Candidates:
    peers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Called:
    """A compatible offer came in."""

    exchange: bytes
    peer: str
    patience_s: float
    """How long the caller's offer stays open."""


@dataclass(frozen=True, slots=True)
class CallerGone:
    """A caller went away before it was answered."""

    exchange: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    exchange: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    exchange: bytes
    reason: str
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Our call failed: nobody there, or silence until its deadline."""

    exchange: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class SwapEnded:
    exchange: bytes
    reason: str | None
    """None: every fragment was applied."""
    applied: int = 0
    one_sided: int = 0


@dataclass(frozen=True, slots=True)
class Stopping:
    """No more offers, no more calls; a swap under way may end."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Boundary | Candidates | Called | CallerGone | Accepted | Refused | Unanswered | SwapEnded | Stopping | Tick


# ---- what to do ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Call:
    exchange: bytes
    peer: str
    round: int
    patience_s: float
    deadline_s: float
    """For the answer; a call goes on over a boundary, the new offer takes the old one's place in it."""


@dataclass(frozen=True, slots=True)
class HangUp:
    exchange: bytes


@dataclass(frozen=True, slots=True)
class Accept:
    """Take this caller; the swap of the open offer begins."""

    exchange: bytes
    peer: str
    round: int


@dataclass(frozen=True, slots=True)
class Refuse:
    exchange: bytes
    reason: str
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Our call was accepted; the swap of the open offer, which may be a later one by now, begins."""

    exchange: bytes
    peer: str
    round: int


@dataclass(frozen=True, slots=True)
class EndRound:
    """The round is over: `reason` is None when it was committed, else why it went solo."""

    round: int
    reason: str | None
    partner: str | None = None
    applied: int = 0
    one_sided: int = 0


Action = Call | HangUp | Accept | Refuse | Begin | EndRound


class Random(Protocol):
    """The part of `random.Random` that is used here."""

    def choice(self, options: Sequence[str], /) -> str: ...
    def randbytes(self, n: int, /) -> bytes: ...


@dataclass(slots=True)
class _Appointment:
    peer: str
    until: float


@dataclass(slots=True)
class _Backoff:
    until: float
    refusals: int


@dataclass(slots=True)
class _Offer:
    """One round's offer, from its boundary to its end."""

    round: int
    calls: int = 0
    lag: int = 0
    """Boundaries passed since its own, while its swap goes on."""
    reason: str = "no_peers"
    """Why it would be solo if it ended now."""


@dataclass(slots=True)
class Round:
    """`handle` is the only method that changes anything."""

    random: Random
    _candidates: frozenset[str] = frozenset()
    _offer: _Offer | None = None
    _out: tuple[bytes, str] | None = None
    """Our call that is not answered yet."""
    _held: Called | None = None
    """A call that waits for the answer to ours."""
    _swap: tuple[bytes, str] | None = None
    _kept_for: _Appointment | None = None
    """The open offer waits for this peer's call."""
    _promised: str | None = None
    """The next offer goes to this peer: we call it when it opens."""
    _last_partner: str | None = None
    _backoffs: dict[str, _Backoff] = field(default_factory=dict)
    _phase_s: float = 1.0
    _boundary_at: float = float("-inf")
    """Before the first boundary there is no next one to promise."""
    _stopping: bool = False

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = list(self._react(event, now))
        return actions + list(self._seek(now))

    @property
    def offered(self) -> int | None:
        """The round of the open offer, or of the one that is being swapped."""
        return self._offer.round if self._offer else None

    @property
    def swapping(self) -> bytes | None:
        """The exchange under way."""
        return self._swap[0] if self._swap else None

    def waiting_for(self) -> str | None:
        """What the open offer waits for, in a few words; peers stand as their ids."""
        if self._offer is None or self._swap:
            return None
        if self._out:
            return f"an answer from {self._out[1]}"
        if self._kept_for:
            return f"a call from {self._kept_for.peer}"
        return "a partner" if self._candidates else "other nodes"

    def wake_at(self) -> float | None:
        """When a Tick is wanted, or None: only an event can change anything."""
        if self._offer is None or self._swap or self._out:
            return None
        if self._kept_for:
            return self._kept_for.until
        if self._offer.calls >= MAX_CALLS:
            return None
        waits = [b.until for peer, b in self._backoffs.items() if peer in self._candidates]
        return min(waits, default=None)

    # ---- events ----
    def _react(self, event: Event, now: float) -> Iterable[Action]:
        match event:
            case Boundary():
                yield from self._at_boundary(event, now)
            case Candidates(peers):
                self._candidates = peers
                self._backoffs = {p: b for p, b in self._backoffs.items() if p in peers}
            case Called():
                yield from self._at_call(event, now)
            case CallerGone(exchange):
                if self._held and self._held.exchange == exchange:
                    self._held = None
                yield from self._at_swap_end(SwapEnded(exchange, "hung_up"), now)  # accepted, and gone before it knew
            case Accepted(exchange):
                yield from self._at_accepted(exchange, now)
            case Refused() | Unanswered():
                yield from self._at_no(event, now)
            case SwapEnded():
                yield from self._at_swap_end(event, now)
            case Stopping():
                self._stopping = True
                self._promised = None
                yield from self._close("leaving", now)
            case Tick():
                pass

    def _at_boundary(self, event: Boundary, now: float) -> Iterable[Action]:
        self._phase_s, self._boundary_at = event.phase_s, now
        if self._swap and self._offer:
            self._offer.lag += 1
            if self._offer.lag > MAX_LAG:
                yield HangUp(self._swap[0])
            yield EndRound(event.round, "swapping")
            return
        if event.closed or self._stopping:
            yield from self._close(None, now)
            yield EndRound(event.round, event.closed or "leaving")
            return
        if self._offer:
            yield EndRound(self._offer.round, self._offer.reason)
        self._offer = _Offer(event.round)  # whom we called, and who waits to call or to be answered, may have this one
        if self._promised and not self._out:
            promised, self._promised, self._kept_for = self._promised, None, None
            yield self._call(self._offer, promised, now)

    def _at_call(self, call: Called, now: float) -> Iterable[Action]:
        kept = self._kept_for is not None and self._kept_for.peer != call.peer
        if self._offer is None or self._swap or self._stopping or kept:
            yield self._no(call, now)
        elif self._out and call.exchange > self._out[0]:
            if self._held:
                yield self._no(call, now)
            else:
                self._held = call
        else:
            yield from self._take(self._offer, call, now)

    def _at_accepted(self, exchange: bytes, now: float) -> Iterable[Action]:
        if self._out is None or self._out[0] != exchange or self._offer is None:
            yield HangUp(exchange)  # somebody else was faster
            return
        peer = self._out[1]
        self._out = None
        yield from self._settle(exchange, peer, now)
        yield Begin(exchange, peer, self._offer.round)

    def _at_no(self, event: Refused | Unanswered, now: float) -> Iterable[Action]:
        if self._out is None or self._out[0] != event.exchange or self._offer is None:
            return
        peer = self._out[1]
        self._out = None
        self._offer.reason = event.reason
        if self._held:
            held, self._held = self._held, None
            yield from self._take(self._offer, held, now)
        elif isinstance(event, Refused) and event.reason == "appointment":
            self._kept_for = _Appointment(peer, now + event.retry_in_s + max(MIN_SLACK_S, SLACK * self._phase_s))
        else:
            self._back_off(peer, now, SILENT if isinstance(event, Unanswered) else 1)

    def _at_swap_end(self, event: SwapEnded, now: float) -> Iterable[Action]:
        if self._swap is None or self._swap[0] != event.exchange or self._offer is None:
            return
        peer = self._swap[1]
        self._swap = None
        if event.reason is None:
            self._last_partner = peer
            self._backoffs.pop(peer, None)
        else:
            self._back_off(peer, now)
            if event.applied == 0 and now < self._next_boundary() and not self._stopping:
                self._offer.reason = event.reason
                return
        ended, self._offer = self._offer.round, None
        yield EndRound(ended, event.reason, peer, event.applied, event.one_sided)

    # ---- parts ----
    def _seek(self, now: float) -> Iterable[Action]:
        """Draw a partner if the offer is open and waits for nobody."""
        if self._kept_for and self._kept_for.until <= now:
            if self._offer:
                self._offer.reason = "missed_appointment"
            self._back_off(self._kept_for.peer, now)
            self._kept_for = None
        if self._offer is None or self._swap or self._out or self._kept_for or self._offer.calls >= MAX_CALLS:
            return
        free = sorted(p for p in self._candidates if p not in self._backoffs or self._backoffs[p].until <= now)
        others = [p for p in free if p != self._last_partner]
        if others or (free and not self._others_answer()):
            yield self._call(self._offer, self.random.choice(others or free), now)

    def _others_answer(self) -> bool:
        """Whether waiting for somebody other than the last partner makes sense."""
        others = self._candidates - {self._last_partner}
        return any(p not in self._backoffs or self._backoffs[p].refusals < SILENT for p in others)

    def _call(self, offer: _Offer, peer: str, now: float) -> Call:
        exchange = self.random.randbytes(16)
        self._out = (exchange, peer)
        offer.calls += 1
        offer.reason = "no_answer"
        deadline_s = min(max(ANSWER_SHARE * self._phase_s, MIN_ANSWER_S), MAX_ANSWER_S)
        return Call(exchange, peer, offer.round, max(0.0, self._next_boundary() - now), deadline_s)

    def _take(self, offer: _Offer, call: Called, now: float) -> Iterable[Action]:
        if self._out:
            yield HangUp(self._out[0])
            self._out = None
        yield from self._settle(call.exchange, call.peer, now)
        yield Accept(call.exchange, call.peer, offer.round)

    def _settle(self, exchange: bytes, peer: str, now: float) -> Iterable[Action]:
        self._swap = (exchange, peer)
        self._kept_for = None
        if self._promised == peer:
            self._promised = None
        if self._held:
            held, self._held = self._held, None
            yield self._no(held, now)

    def _no(self, call: Called, now: float) -> Refuse:
        """Refuse, with an appointment where the next offer is free and opens while the caller's is still there."""
        if self._stopping:
            return Refuse(call.exchange, "leaving")
        wait_s = self._next_boundary() - now
        if self._promised in (None, call.peer) and 0 < wait_s <= call.patience_s:
            self._promised = call.peer
            return Refuse(call.exchange, "appointment", wait_s)
        return Refuse(call.exchange, "busy")

    def _close(self, reason: str | None, now: float) -> Iterable[Action]:
        """Close the open offer without a partner; a swap under way goes on."""
        if self._out and not self._swap:
            yield HangUp(self._out[0])
            self._out = None
        if self._held:
            held, self._held = self._held, None
            yield self._no(held, now)
        self._kept_for = None
        if self._offer and not self._swap:
            ended, self._offer = self._offer, None
            yield EndRound(ended.round, reason or ended.reason)

    def _back_off(self, peer: str, now: float, refusals: int = 1) -> None:
        refusals += self._backoffs[peer].refusals if peer in self._backoffs else 0
        wait_s = min(MAX_BACKOFF_S, BACKOFF_SHARE * self._phase_s * 2 ** min(refusals - 1, 16))
        self._backoffs[peer] = _Backoff(now + wait_s, refusals)

    def _next_boundary(self) -> float:
        return self._boundary_at + self._phase_s
