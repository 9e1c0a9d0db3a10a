"""Many nodes in one process and in virtual time: who calls whom, and what each reads and writes in the directory.

Real are the decisions: each node's rounds are core/round.py, its part in the directory is peers/size_estimate.py, with
the times of peers/membership.py and peers/directory.py. Each node is at a place of its own. A call takes DELAY_S each
way, a swap the bytes of its vector over the link. The DHT itself is a table: how many calls one of its operations takes
is counted with real nodes only.
The same seed gives the same run.
"""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from noloco_node.core import round_events as moves
from noloco_node.core.round import Round
from noloco_node.peers.membership import LOOK_S
from noloco_node.peers.record import REFRESH_S, TTL_S, bucket_of
from noloco_node.peers.size_estimate import SizeEstimate

DELAY_S = 0.05
UNEVEN = 0.02
"""By which a phase may be longer or shorter."""
WARM_UP = 2
"""Rounds before the count begins: what a node believes of the swarm's size settles."""


@dataclass(slots=True)
class _Node:
    name: str
    random: random.Random
    machine: Round
    size: SizeEstimate
    known: dict[str, float] = field(default_factory=dict)
    """Expiries of the records of others."""
    wake: int = 0
    round: int = 0
    swap_began: float = 0.0


@dataclass(slots=True)
class _Call:
    caller: _Node
    callee: _Node
    waits: int = 0
    """How often its caller began to wait, or was answered."""
    swapping: bool = False

    @property
    def ends(self) -> tuple[_Node, _Node]:
        return self.caller, self.callee


class VirtualSwarm:
    """`done` counts, since the warm-up, of all nodes together: `rounds`, `committed`, `calls`, `swaps` (each at both of
    its ends), `look_ups`, `stores` and the `records` that look-ups brought."""

    def __init__(self, nodes: int, phase_s: float, swap_s: float, seed: int = 1) -> None:
        self.phase_s, self._swap_s = phase_s, swap_s
        self.done: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._buckets: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
        """Of the directory: expiry and estimate of each record."""
        self._calls: dict[bytes, _Call] = {}
        self._nodes = {name: self._made(name) for name in (f"peer{number}" for number in range(nodes))}

    def _made(self, name: str) -> _Node:
        own = random.Random(self._chance.random())
        return _Node(name, own, Round(own, name), SizeEstimate(own))

    def run(self, rounds: int) -> Counter[str]:
        """So many rounds of each node, after the warm-up."""
        for node in self._nodes.values():
            self._publish(node)
        for node in self._nodes.values():
            self._at(node.random.random() * LOOK_S, partial(self._look, node))
            self._at(node.random.random() * REFRESH_S, partial(self._refresh, node))
            self._at((0.5 + node.random.random()) * self.phase_s, partial(self._boundary, node))
        last = (WARM_UP + 0.5) * self.phase_s
        self._until(last)
        self.done.clear()
        self._until(last + rounds * self.phase_s)
        return self.done

    def _until(self, end: float) -> None:
        while self._agenda and self._agenda[0][0] <= end:
            self._now, _, happen = heapq.heappop(self._agenda)
            happen()

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, next(self._order), happen))

    def _in(self, seconds: float, happen: Callable[[], None]) -> None:
        self._at(self._now + seconds, happen)

    # ---- the directory ----
    def _refresh(self, node: _Node) -> None:
        self._publish(node)
        self._in(REFRESH_S, lambda: self._refresh(node))

    def _publish(self, node: _Node) -> None:
        for depth in node.size.write_depths():
            self.done["stores"] += 1
            self._buckets[bucket_of(node.name, depth)][node.name] = self._now + TTL_S, node.size.peers

    def _look(self, node: _Node) -> None:
        """As `Directory._read`."""
        depth = node.size.read_depth()
        name = f"{node.random.getrandbits(depth):0{depth}b}" if depth else ""
        bucket = {peer: found for peer, found in self._buckets[name].items() if found[0] > self._now}
        self._buckets[name] = bucket
        there = {peer: expires for peer, (expires, _) in bucket.items() if peer != node.name}
        self.done["look_ups"] += 1
        self.done["records"] += len(there)
        node.size.found(depth, len(bucket), [estimate for _, estimate in bucket.values() if estimate])
        found = there if not (node.known and node.size.is_partial(depth)) else {}
        node.known = {peer: at for peer, at in {**node.known, **found}.items() if at > self._now}
        self._handle(node, moves.Candidates({peer: peer for peer in node.known}))
        self._in(LOOK_S, lambda: self._look(node))

    # ---- rounds ----
    def _boundary(self, node: _Node) -> None:
        node.round += 1
        self.done["rounds"] += 1
        busy = node.machine.swapping is not None
        progress = min(1.0, (self._now - node.swap_began) / self._swap_s) if busy else None
        closed = moves.SWAPPING if busy else None
        self._handle(node, moves.Boundary(node.round, self.phase_s, closed, progress))
        self._in(self.phase_s * node.random.uniform(1 - UNEVEN, 1 + UNEVEN), lambda: self._boundary(node))

    def _handle(self, node: _Node, event: moves.Event) -> None:
        for action in node.machine.handle(event, self._now):
            self._perform(node, action)
        node.wake += 1
        wake, at = node.wake, node.machine.wake_at()
        if at is not None:
            self._at(at, lambda: self._handle(node, moves.Tick()) if node.wake == wake else None)

    def _tell(self, node: _Node, event: moves.Event) -> None:
        self._in(DELAY_S, lambda: self._handle(node, event))

    def _perform(self, node: _Node, action: moves.Action) -> None:
        match action:
            case moves.Call(exchange, peer, patience_s, deadline_s):
                self.done["calls"] += 1
                call = self._calls[exchange] = _Call(node, self._nodes[peer])
                self._tell(call.callee, moves.Called(exchange, node.name, patience_s, node.name))
                self._wait(exchange, deadline_s)
            case moves.Stay(exchange, deadline_s):
                self._wait(exchange, deadline_s)
            case moves.HangUp(exchange):
                self._hang_up(exchange)
            case moves.Accept(exchange):
                self._answer(exchange, moves.Accepted(exchange))
            case moves.Appoint(exchange, in_s):
                self._answer(exchange, moves.Appointed(exchange, in_s))
            case moves.Refuse(exchange, reason, retry_in_s):
                self._answer(exchange, moves.Refused(exchange, reason, retry_in_s))
            case moves.Begin(exchange):
                self._calls[exchange].swapping = True
                for end in self._calls[exchange].ends:
                    end.swap_began = self._now
                self._in(self._swap_s, lambda: self._swap_over(exchange, None))
            case moves.EndRound(_, reason):
                self.done["committed"] += reason is None

    def _wait(self, exchange: bytes, seconds: float) -> None:
        """For the answer to a call."""
        if call := self._calls.get(exchange):
            call.waits += 1
            waits = call.waits
            self._in(seconds, lambda: self._unanswered(exchange) if call.waits == waits else None)

    def _unanswered(self, exchange: bytes) -> None:
        if call := self._calls.pop(exchange, None):
            self._handle(call.caller, moves.Unanswered(exchange, "no_answer"))
            self._tell(call.callee, moves.CallerGone(exchange))

    def _answer(self, exchange: bytes, answer: moves.Event) -> None:
        if call := self._calls.get(exchange):
            call.waits += 1  # nobody waits for it any more
            self._tell(call.caller, answer)
            if isinstance(answer, moves.Refused):
                del self._calls[exchange]

    def _hang_up(self, exchange: bytes) -> None:
        call = self._calls.get(exchange)
        if call and call.swapping:
            self._swap_over(exchange, "hung_up")
        elif call:
            del self._calls[exchange]
            self._tell(call.callee, moves.CallerGone(exchange))

    def _swap_over(self, exchange: bytes, reason: str | None) -> None:
        if call := self._calls.pop(exchange, None):
            for end in call.ends:
                self.done["swaps"] += reason is None
                self._handle(end, moves.SwapEnded(exchange, reason, applied=1))
