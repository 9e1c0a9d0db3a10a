"""A swarm of nodes for tests: real swaps over the in-memory network, in virtual time, with three numbers for a
model."""

import asyncio
import math
import random
import struct
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from memory_network.network import MemoryNetwork

from noloco_node.base.events import Event, RoundCommitted, WentSolo
from noloco_node.core.codecs.codec import CodecStats, Payload
from noloco_node.core.verdict import SOMEBODY
from noloco_node.errors import PeerMisbehaved
from noloco_node.host.traffic import Traffic
from noloco_node.rounds.service import RoundService, RoundTerms

FRAGMENTS = 3
TERMS = RoundTerms(b"r" * 32, b"l" * 32, FRAGMENTS)
PAYLOAD = b"\0" * 1000


def done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Offer:
    """A vector of three numbers, one a fragment; a correction moves both towards their mean."""

    fragments = FRAGMENTS
    correction_bytes = 8

    def __init__(self, node: "Node", round_: int) -> None:
        self.node, self.round, self.u = node, round_, node.vector()
        self.corrections: dict[int, float] = {}

    def settled(self) -> "Future[None]":
        return done(None)

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        return done(struct.pack("<d", self.u[index]) + PAYLOAD)

    def receive(self, index: int, payload: Payload) -> "Future[float]":
        if len(payload) != 8 + len(PAYLOAD):
            raise PeerMisbehaved("bad_length")
        self.corrections[index] = (struct.unpack_from("<d", payload)[0] - self.u[index]) / 2
        return done(1.0)

    def apply(self, index: int, scale: float) -> "Future[None]":
        correction = self.corrections.pop(index)
        self.node.correct(index, correction, self.round)
        self.u[index] += correction
        return done(None)

    def stats(self) -> "Future[CodecStats]":
        return done(CodecStats())


class Node:
    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        phase_s: float,
        seed: int,
        step_s: float | None,
        *,
        pace: Traffic | None = None,
    ) -> None:
        self.name, self.phase_s, self.step_s = name, phase_s, step_s
        self.gone = False
        self.rng = random.Random(seed)
        self.x = [self.rng.uniform(-1, 1) for _ in range(FRAGMENTS)]
        self.transport = network.join(name)
        self.events: list[Event] = []
        self.under_way = False
        self.sources: list[frozenset[str]] = []
        """Where its partners were from."""
        self.steps = 0
        self.exchange = RoundService(self.transport, self.rng, self, self.events.append, pace=pace)
        self.transport.serve(self.exchange.add_to)

    def swapping(self, under_way: bool, source: frozenset[str] = SOMEBODY) -> None:
        self.under_way = under_way
        if under_way:
            self.sources.append(source)

    def round_over(self, round: int) -> None: ...

    async def train(self, rounds: int) -> None:
        """Phases of a fixed time; like the real thing, it waits for nobody."""
        await asyncio.sleep(self.rng.random() * self.phase_s)
        overrun = 0.0
        for k in range(1, rounds + 1):
            length = self.phase_s * self.rng.uniform(0.98, 1.02)
            if self.step_s:  # a phase by time: whole steps, and what is too long counts for the next one
                length = math.ceil((self.phase_s - overrun) / self.step_s) * self.step_s
                overrun += length - self.phase_s
            await asyncio.sleep(length)
            if self.gone:
                return
            self.steps += 1
            self.end_phase()
            offer = None if self.under_way else Offer(self, k)
            self.exchange.boundary(k, self.phase_s, offer, None if offer else "swapping")

    def end_phase(self) -> None:
        """What training has done to `x`: nothing."""

    def vector(self) -> list[float]:
        """What is offered after a phase."""
        return list(self.x)

    def correct(self, index: int, correction: float, offered_round: int) -> None:
        self.x[index] += correction

    @property
    def committed(self) -> list[RoundCommitted]:
        return [e for e in self.events if isinstance(e, RoundCommitted) and e.swap == 1]

    @property
    def solo(self) -> Counter[str]:
        return Counter(e.reason for e in self.events if isinstance(e, WentSolo))


class VirtualSwarm:
    """`steps_s`: how long a step of each node takes; given, phases go by time. `swaps`: partners in a round."""

    def __init__(
        self,
        phases: list[float],
        seed: int = 1,
        steps_s: list[float] | None = None,
        swaps: int | None = 1,
        *,
        paces: dict[int, Traffic] | None = None,
        kind: type[Node] = Node,
        **links: Any,
    ) -> None:
        self.network = MemoryNetwork(random.Random(seed), **{"delay_s": 0.05, **links})
        self.swaps = swaps
        self.nodes = [
            kind(
                self.network,
                f"n{k:03}",
                phase,
                1000 * seed + k,
                steps_s[k] if steps_s else None,
                pace=(paces or {}).get(k),
            )
            for k, phase in enumerate(phases)
        ]

    async def run(self, rounds: int, *others: Coroutine[Any, Any, None]) -> None:
        everybody = {n.name: self.network.places.get(n.name, "127.0.0.1") for n in self.nodes}
        for node in self.nodes:
            await node.transport.start()
            node.exchange.begin(TERMS, self.swaps)
            rest = {n: place for n, place in everybody.items() if n != node.name}
            node.exchange.candidates(rest, everybody[node.name])
        try:
            await asyncio.gather(*(node.train(rounds) for node in self.nodes), *others)
            for node in self.nodes:
                node.exchange.stop()
            async with asyncio.timeout(60 + 10 * max(n.phase_s for n in self.nodes)):  # a swap may take eight phases
                await asyncio.gather(*(node.exchange.settled() for node in self.nodes))
        finally:
            await self.close()

    async def close(self) -> None:
        for node in self.nodes:
            await node.exchange.close()
            await node.transport.close()

    def vanish(self, node: Node) -> None:
        """Its process dies."""
        node.gone = True
        self.network.vanish(node.name)

    def committed_share(self) -> float:
        rest = [n for n in self.nodes if not n.gone]
        return sum(len(n.committed) for n in rest) / sum(n.steps for n in rest)

    def calls_per_pair(self) -> float:
        pairs = sum(isinstance(e, RoundCommitted) for n in self.nodes for e in n.events) / 2
        return sum(n.exchange.tally.calls for n in self.nodes) / pairs
