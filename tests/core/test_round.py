"""The round's state machine: by lists of events, by random events, and as a swarm of machines in virtual time."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.core.moves import (
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
    Refuse,
    Refused,
    Stay,
    Stopping,
    SwapEnded,
    Tick,
    Unanswered,
)
from noloco_node.core.round import MAX_LAG, TOO_SLOW, Round

LOW, MIDDLE, HIGH = bytes(16), b"\x80" + bytes(15), b"\xff" * 16


class Fixed(random.Random):
    """Draws the exchange ids it is given."""

    def __init__(self, *ids: bytes) -> None:
        super().__init__(0)
        self.ids = list(ids)

    def randbytes(self, n: int) -> bytes:
        return self.ids.pop(0) if self.ids else super().randbytes(n)


def machine(*peers: str, ids: tuple[bytes, ...] = (MIDDLE,)) -> Round:
    round_ = Round(Fixed(*ids))
    assert round_.handle(Candidates(frozenset(peers)), 0.0) == []
    return round_


A = TypeVar("A", bound=Action)


def only(actions: list[Action], kind: type[A]) -> A:
    (found,) = [a for a in actions if isinstance(a, kind)]
    return found


def test_an_open_offer_calls_one_candidate_and_commits() -> None:
    m = machine("b")
    assert m.handle(Boundary(1, 10.0), 10.0) == [Call(MIDDLE, "b", 1, 10.0, 2.5)]
    assert m.handle(Accepted(MIDDLE), 10.1) == [Begin(MIDDLE, "b", 1)]
    assert m.swapping == MIDDLE
    assert m.handle(SwapEnded(MIDDLE, None, applied=3), 11.0) == [EndRound(1, None, "b", 3, 0)]
    assert m.handle(Tick(), 12.0) == []


def test_nobody_there_is_a_solo_round_at_the_next_boundary() -> None:
    m = machine()
    assert m.handle(Boundary(1, 10.0), 10.0) == []
    assert m.wake_at() is None
    assert m.handle(Boundary(2, 10.0), 20.0) == [EndRound(1, "no_peers")]


def test_a_candidate_who_appears_later_is_called_at_once() -> None:
    m = machine()
    m.handle(Boundary(1, 10.0), 10.0)
    assert m.handle(Candidates(frozenset({"b"})), 12.0) == [Call(MIDDLE, "b", 1, 8.0, 2.5)]


def test_an_open_offer_takes_whoever_calls() -> None:
    m = machine()
    m.handle(Boundary(1, 10.0), 10.0)
    assert m.handle(Called(LOW, "c", 5.0), 11.0) == [Accept(LOW, "c", 1)]


def test_between_two_offers_a_caller_gets_an_appointment_and_the_next_offer() -> None:
    m = machine("b", "c")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    m.handle(Accepted(call.exchange), 10.0)
    m.handle(SwapEnded(call.exchange, None), 11.0)
    assert m.handle(Called(LOW, "d", 9.5), 12.0) == [Appoint(LOW, 8.0)]
    assert m.handle(Called(HIGH, "e", 9.5), 12.0) == [Refuse(HIGH, "busy", 18.0)], "one only; free a phase later"
    assert m.handle(Boundary(2, 10.0), 20.0) == [Accept(LOW, "d", 2)]


def test_who_hangs_up_has_no_appointment_any_more() -> None:
    m = machine("b")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    m.handle(Accepted(call.exchange), 10.0)
    m.handle(SwapEnded(call.exchange, None), 11.0)
    m.handle(Called(LOW, "d", 9.5), 12.0)
    assert m.handle(CallerGone(LOW), 13.0) == []
    assert m.handle(Called(HIGH, "e", 9.5), 14.0) == [Appoint(HIGH, 6.0)]


def test_a_promised_offer_that_does_not_open_is_refused() -> None:
    for closing, reason in ((Boundary(2, 10.0, closed="nonfinite"), "busy"), (Stopping(), "leaving")):
        m = machine("b")
        call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
        m.handle(Accepted(call.exchange), 10.0)
        m.handle(SwapEnded(call.exchange, None), 11.0)
        m.handle(Called(LOW, "d", 9.5), 12.0)
        assert Refuse(LOW, reason) in m.handle(closing, 20.0)


def test_no_appointment_beyond_the_callers_patience() -> None:
    m = machine()
    m.handle(Boundary(1, 10.0, closed="nonfinite"), 10.0)
    assert m.handle(Called(LOW, "d", 3.0), 12.0) == [Refuse(LOW, "busy", 8.0)]
    assert m.handle(Boundary(2, 10.0), 20.0) == []


def test_an_unanswered_call_goes_on_over_a_boundary() -> None:
    m = machine("b")
    m.handle(Boundary(1, 10.0), 10.0)
    assert m.handle(Boundary(2, 10.0), 20.0) == [EndRound(1, "no_answer")]
    assert m.handle(Accepted(MIDDLE), 20.1) == [Begin(MIDDLE, "b", 2)]


def test_who_has_an_appointment_stays_on_the_line_and_then_gives_up() -> None:
    m = machine("b", "c")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    assert m.handle(Appointed(call.exchange, 4.0), 10.1) == [Stay(call.exchange, 6.5)]
    assert m.handle(Called(LOW, "x", 0.5), 11.0) == [Refuse(LOW, "busy", 9.0)]
    assert m.wake_at() is None
    other = only(m.handle(Unanswered(call.exchange, "silent"), 16.6), Call)
    assert other.peer != call.peer


def test_an_appointment_is_kept() -> None:
    m = machine("b")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    m.handle(Appointed(call.exchange, 4.0), 10.1)
    assert m.handle(Accepted(call.exchange), 14.0) == [Begin(call.exchange, "b", 1)]


def test_a_peer_with_whom_we_have_an_appointment_may_also_call() -> None:
    m = machine("b")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    m.handle(Appointed(call.exchange, 4.0), 10.1)
    assert m.handle(Called(HIGH, "b", 10.0), 14.0) == [HangUp(call.exchange), Accept(HIGH, "b", 1)]


def test_who_is_busy_is_not_called_before_an_appointment_could_be_kept() -> None:
    m = machine("b")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    assert m.handle(Refused(call.exchange, "busy", 17.0), 10.0) == []
    assert m.wake_at() == 17.0


# ---- further partners of a round ----
def in_a_swap(swaps: int | None) -> Round:
    """A machine in the first swap of its round, with b."""
    m = machine("b")
    m.swaps = swaps
    m.handle(Boundary(1, 10.0), 10.0)
    m.handle(Accepted(MIDDLE), 10.0)
    m.handle(Candidates(frozenset({"b", "c"})), 10.0)
    return m


def test_a_further_partner_is_another_one_and_the_round_counts_once() -> None:
    m = in_a_swap(2)
    first = m.handle(SwapEnded(MIDDLE, None, 3), 11.0)
    assert first[0] == EndRound(1, None, "b", 3, 0, further=True)
    call = only(first, Call)
    assert (call.peer, call.round, call.patience_s) == ("c", 1, 0.0), "it waits for no appointment"
    assert m.handle(Accepted(call.exchange), 11.1) == [Begin(call.exchange, "c", 1)]
    assert m.handle(SwapEnded(call.exchange, None, 3), 12.0) == [Further(1, "c", 2), CloseOffer(1)]


def test_an_offer_stays_open_for_further_callers_until_the_boundary() -> None:
    m = in_a_swap(3)
    call = only(m.handle(SwapEnded(MIDDLE, None, 3), 11.0), Call)
    m.handle(Refused(call.exchange, "busy"), 11.1)
    assert m.handle(Called(LOW, "b", 9.0), 11.2) == [Appoint(LOW, 20.0 - 11.2)], "not the same one again"
    assert m.handle(Called(HIGH, "d", 5.0), 11.3) == [Accept(HIGH, "d", 1)]
    assert m.handle(SwapEnded(HIGH, None, 3), 12.0)[0] == Further(1, "d", 2)
    assert m.handle(Boundary(2, 10.0), 20.0)[0] == CloseOffer(1)


def test_no_further_swap_that_would_delay_the_next_round() -> None:
    for swaps, ended, more in ((2, 14.9, True), (2, 15.1, False), (None, 11.9, True), (None, 12.1, False)):
        m = in_a_swap(swaps)
        end = m.handle(SwapEnded(MIDDLE, None, 3), ended)[0]
        assert isinstance(end, EndRound) and end.further == more


def test_a_further_swap_that_breaks_ends_no_round() -> None:
    m = in_a_swap(2)
    call = only(m.handle(SwapEnded(MIDDLE, None, 3), 11.0), Call)
    m.handle(Accepted(call.exchange), 11.1)
    assert m.handle(SwapEnded(call.exchange, "silent", 1), 12.0) == []
    assert m.handle(Boundary(2, 10.0), 20.0)[0] == CloseOffer(1)


def test_of_two_calls_that_cross_the_smaller_id_stands() -> None:
    taker = machine("b")
    taker.handle(Boundary(1, 10.0), 10.0)
    assert taker.handle(Called(LOW, "b", 10.0), 10.0) == [HangUp(MIDDLE), Accept(LOW, "b", 1)]

    holder = machine("a", ids=(LOW,))
    holder.handle(Boundary(1, 10.0), 10.0)
    assert holder.handle(Called(MIDDLE, "a", 10.0), 10.0) == [], "held until our own call is answered"
    assert holder.handle(CallerGone(MIDDLE), 10.05) == []
    assert holder.handle(Accepted(LOW), 10.1) == [Begin(LOW, "a", 1)]


def test_a_held_caller_is_taken_when_our_own_call_fails() -> None:
    m = machine("b", ids=(LOW,))
    m.handle(Boundary(1, 10.0), 10.0)
    m.handle(Called(HIGH, "c", 10.0), 10.0)
    assert m.handle(Unanswered(LOW, "silent"), 12.0) == [Accept(HIGH, "c", 1)]


def test_a_late_acceptance_is_hung_up() -> None:
    m = machine("b")
    m.handle(Boundary(1, 10.0), 10.0)
    m.handle(Called(LOW, "c", 10.0), 10.0)
    assert m.handle(Accepted(MIDDLE), 10.1) == [HangUp(MIDDLE)]


def test_a_swap_straddles_boundaries_until_it_is_too_old() -> None:
    m = machine("b")
    m.handle(Boundary(1, 10.0), 10.0)
    m.handle(Accepted(MIDDLE), 10.1)
    for k in range(MAX_LAG):
        assert m.handle(Boundary(2 + k, 10.0), 20.0 + 10 * k) == [EndRound(2 + k, "swapping")]
    assert HangUp(MIDDLE) in m.handle(Boundary(2 + MAX_LAG, 10.0), 200.0)
    assert m.handle(SwapEnded(MIDDLE, "hung_up", applied=2), 200.0) == [EndRound(1, TOO_SLOW, "b", 2, 0)]


def test_a_swap_that_breaks_leaves_the_offer_open_and_its_fragments_are_counted() -> None:
    m = machine("b", "c")
    call = only(m.handle(Boundary(1, 10.0), 10.0), Call)
    m.handle(Accepted(call.exchange), 10.1)
    again = only(m.handle(SwapEnded(call.exchange, "silent", 2, 1), 12.0), Call)
    assert again.peer != call.peer and again.round == 1
    m.handle(Refused(again.exchange, "busy", 30.0), 12.1)
    assert m.handle(Boundary(2, 10.0), 20.0)[0] == EndRound(1, "busy", call.peer, 2, 1)


def test_a_caller_that_vanishes_between_acceptance_and_swap_frees_the_node() -> None:
    m = machine()
    m.handle(Boundary(1, 10.0), 10.0)
    m.handle(Called(LOW, "c", 10.0), 10.0)
    m.handle(CallerGone(LOW), 10.0)
    assert m.swapping is None
    assert m.handle(Called(HIGH, "d", 10.0), 11.0) == [Accept(HIGH, "d", 1)]


def test_the_same_partner_twice_only_when_there_is_no_other() -> None:
    m = machine("b", "c", ids=())
    last = None
    for k in range(1, 30):
        call = only(m.handle(Boundary(k, 1.0), float(k)), Call)
        assert call.peer != last
        last = call.peer
        m.handle(Accepted(call.exchange), k + 0.1)
        m.handle(SwapEnded(call.exchange, None), k + 0.2)

    alone = machine("b", ids=())
    for k in range(1, 4):
        call = only(alone.handle(Boundary(k, 1.0), float(k)), Call)
        alone.handle(Accepted(call.exchange), k + 0.1)
        assert alone.handle(SwapEnded(call.exchange, None), k + 0.2) == [EndRound(k, None, "b", 0, 0)]


def test_a_silent_stranger_does_not_keep_two_partners_apart() -> None:
    m = machine("b", "gone", ids=())
    committed = 0
    for k in range(1, 12):
        actions = m.handle(Boundary(k, 1.0), float(k))
        for step in range(8):
            calls = [a for a in actions if isinstance(a, Call)]
            if not calls:
                break
            now = k + 0.1 * (step + 1)
            if calls[0].peer == "gone":
                actions = m.handle(Unanswered(calls[0].exchange, "unavailable"), now)
            else:
                m.handle(Accepted(calls[0].exchange), now)
                m.handle(SwapEnded(calls[0].exchange, None), now)
                committed += 1
                break
    assert committed >= 9


def test_leaving_refuses_and_ends_the_open_round() -> None:
    m = machine("b")
    m.handle(Boundary(1, 10.0), 10.0)
    assert m.handle(Stopping(), 11.0) == [HangUp(MIDDLE), EndRound(1, "leaving")]
    assert m.handle(Called(LOW, "c", 5.0), 11.0) == [Refuse(LOW, "leaving")]
    assert m.handle(Boundary(2, 10.0), 20.0) == [EndRound(2, "leaving")]


ids = st.sampled_from([bytes([k]) * 16 for k in range(6)])
peers = st.sampled_from(["b", "c", "d"])
events = st.one_of(
    st.builds(Candidates, st.frozensets(peers)),
    st.builds(Called, ids, peers, st.floats(0, 20)),
    st.builds(CallerGone, ids),
    st.builds(Accepted, ids),
    st.builds(Appointed, ids, st.floats(0, 20)),
    st.builds(Refused, ids, st.sampled_from(["busy", "leaving"]), st.floats(0, 20)),
    st.builds(Unanswered, ids, st.just("silent")),
    st.builds(SwapEnded, ids, st.sampled_from([None, "silent"]), st.integers(0, 3), st.integers(0, 1)),
    st.builds(lambda closed: Boundary(0, 5.0, closed), st.sampled_from([None, None, "nonfinite"])),
    st.just(Tick()),
    st.builds(Stopping),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(events, st.floats(0, 5)), max_size=60), st.integers(0, 2**32), st.sampled_from([1, 1, 2, None])
)
def test_whatever_happens_every_call_is_answered_once_and_every_round_ends_once(
    story: list[tuple[Event, float]], seed: int, swaps: int | None
) -> None:
    class Small(random.Random):
        def randbytes(self, n: int) -> bytes:
            return bytes([self.randrange(6)]) * n

    m = Round(Small(seed), swaps)
    now, boundaries, ended = 0.0, 0, []
    waiting: set[bytes] = set()
    still_open: set[int] = set()
    for event, wait in story:
        now += wait
        if isinstance(event, Boundary):
            boundaries += 1
            event = Boundary(boundaries, 5.0, event.closed)  # noqa: PLW2901
        if isinstance(event, Called):
            if event.exchange in waiting:
                continue  # the shell refuses an exchange that it knows already
            waiting.add(event.exchange)
        if isinstance(event, CallerGone):
            waiting.discard(event.exchange)
        for action in m.handle(event, now):
            if isinstance(action, Accept | Refuse):
                assert action.exchange in waiting
                waiting.remove(action.exchange)
            if isinstance(action, Appoint):
                assert action.exchange in waiting
            if isinstance(action, EndRound):
                ended.append(action.round)
                still_open |= {action.round} if action.further else set()
            if isinstance(action, CloseOffer):
                still_open.remove(action.round)
        wake_at = m.wake_at()
        assert wake_at is None or wake_at > now
    assert len(waiting) <= 2, "at most one caller is held and one has an appointment"
    assert still_open <= _open(m), "an offer that stayed open is closed once"
    assert len(ended) == len(set(ended)), "a round ends once"
    assert set(range(1, boundaries)) - set(ended) <= {max(ended, default=0) + 1, *_open(m)}


def _open(m: Round) -> set[int]:
    return {m._offer.round} if m._offer else set()


class Town:
    """Many machines and a network of delays, in virtual time: no sockets, no asyncio."""

    def __init__(self, phases: list[float], seed: int, delay_s: float = 0.05, swap_s: float = 0.3) -> None:
        self.rng = random.Random(seed)
        self.now, self.counter = 0.0, itertools.count()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.delay_s, self.swap_s = delay_s, swap_s
        self.names = [f"n{k:03}" for k in range(len(phases))]
        self.phase = dict(zip(self.names, phases, strict=True))
        self.machines = {n: Round(random.Random(self.rng.random())) for n in self.names}
        self.callers: dict[bytes, tuple[str, str]] = {}
        self.rounds: Counter[str] = Counter()
        self.committed: Counter[str] = Counter()
        self.met: dict[str, Counter[str]] = {n: Counter() for n in self.names}
        self.calls = 0
        self.dead: set[str] = set()
        self.swaps: dict[bytes, tuple[str, str]] = {}
        for n in self.names:
            self.handle(n, Candidates(frozenset(self.names) - {n}))
            self.at(self.rng.random() * self.phase[n], lambda n=n: self.boundary(n))

    def at(self, wait: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + wait, next(self.counter), do))

    def boundary(self, n: str) -> None:
        if n in self.dead:
            return
        self.rounds[n] += 1
        closed = "swapping" if self.machines[n].swapping else None
        self.handle(n, Boundary(self.rounds[n], self.phase[n], closed))
        self.at(self.phase[n] * self.rng.uniform(0.97, 1.03), lambda: self.boundary(n))

    def later(self, n: str, event: Event) -> None:
        self.at(self.delay_s * self.rng.uniform(0.5, 1.5), lambda: self.handle(n, event))

    def handle(self, n: str, event: Event) -> None:
        if n in self.dead:
            if isinstance(event, Called):
                caller = self.callers[event.exchange][0]
                self.later(caller, Unanswered(event.exchange, "silent"))
            return
        for action in self.machines[n].handle(event, self.now):
            self.perform(n, action)
        wake_at = self.machines[n].wake_at()
        if wake_at is not None:
            self.at(max(0.0, wake_at - self.now), lambda: self.handle(n, Tick()) if n not in self.dead else None)

    def perform(self, n: str, action: Action) -> None:
        match action:
            case Call(exchange, peer, _, patience):
                self.calls += 1
                self.callers[exchange] = (n, peer)
                self.later(peer, Called(exchange, n, patience))
            case Stay(exchange, deadline):
                self.at(deadline, lambda: self.handle(n, Unanswered(exchange, "silent")))
            case Appoint(exchange, in_s):
                self.later(self.callers[exchange][0], Appointed(exchange, in_s))
            case Refuse(exchange, reason, retry):
                self.later(self.callers[exchange][0], Refused(exchange, reason, retry))
            case Accept(exchange):
                self.later(self.callers[exchange][0], Accepted(exchange))
            case HangUp(exchange):
                self.later(self.callers[exchange][1], CallerGone(exchange))
            case Begin(exchange, peer):
                self.at(self.swap_s, lambda: self.end_swap(exchange, n, peer))
            case EndRound(_, None, partner) if partner:
                self.committed[n] += 1
                self.met[n][partner] += 1
            case _:
                pass

    def end_swap(self, exchange: bytes, a: str, b: str) -> None:
        whole = self.machines[a].swapping == exchange and self.machines[b].swapping == exchange
        for n in (a, b):
            if self.machines[n].swapping == exchange:
                self.handle(n, SwapEnded(exchange, None if whole and not {a, b} & self.dead else "silent", int(whole)))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self.queue)
            do()


def test_sixty_four_equal_nodes_commit_and_meet_many() -> None:
    town = Town([10.0] * 64, seed=1)
    town.run(510)
    share = sum(town.committed.values()) / sum(town.rounds.values())
    assert share >= 0.9, share
    assert min(len(met) for met in town.met.values()) >= 20
    assert town.calls / (sum(town.committed.values()) / 2) < 3


def test_mixed_speeds_still_meet() -> None:
    town = Town([10.0] * 22 + [20.0] * 21 + [40.0] * 21, seed=2)
    town.run(800)
    slow = [n for n in town.names if town.phase[n] == 40.0]
    assert all(town.committed[n] / town.rounds[n] > 0.8 for n in slow)
    assert town.calls / (sum(town.committed.values()) / 2) < 6


def test_a_tenth_vanishes_and_the_rest_go_on() -> None:
    town = Town([10.0] * 40, seed=3)
    for k, n in enumerate(town.names[:4]):
        town.at(100 + 20 * k, lambda n=n: town.dead.add(n))
    town.run(200)
    before = Counter(town.committed)
    town.run(700)
    alive = [n for n in town.names if n not in town.dead]
    assert all(town.committed[n] - before[n] >= 0.75 * 50 for n in alive), "solo only now and then"


def test_a_ring_of_simultaneous_calls_resolves() -> None:
    for size in (3, 4, 5, 7):
        order = [bytes([k + 1]) * 16 for k in range(size)]
        nodes = [Round(Fixed(order[k])) for k in range(size)]
        for k, node in enumerate(nodes):
            node.handle(Candidates(frozenset({f"{(k + 1) % size}"})), 0.0)
            node.handle(Boundary(1, 10.0), 0.0)
        events: list[tuple[int, Event]] = [((k + 1) % size, Called(order[k], f"{k}", 10.0)) for k in range(size)]
        swapping: set[int] = set()
        for _ in range(6 * size):
            if not events:
                break
            where, event = events.pop(0)
            for action in nodes[where].handle(event, 0.1):
                match action:
                    case Accept(exchange) | Begin(exchange):
                        swapping.add(where)
                        if isinstance(action, Accept):
                            events.append((order.index(exchange), Accepted(exchange)))
                    case Refuse(exchange, reason):
                        events.append((order.index(exchange), Refused(exchange, reason)))
                    case HangUp(exchange) if exchange in order:
                        events.append(((order.index(exchange) + 1) % size, CallerGone(exchange)))
        assert len(swapping) >= 2
        assert nodes[0].swapping == order[0] == nodes[1].swapping, "the smallest id stands"
