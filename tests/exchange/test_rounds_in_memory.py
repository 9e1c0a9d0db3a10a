"""Whole exchanges over the in-memory network, in virtual time: many nodes, slow links, partitions, vanishing peers."""

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from noloco_node.errors import PeerMisbehaved
from noloco_node.events import Event, PeerFaulted, RoundCommitted, WentSolo
from noloco_node.exchange import Exchange, Terms
from noloco_node.transport.clock import run_virtual
from noloco_node.transport.memory import MemoryNetwork
from noloco_node.wire import messages as wire
from noloco_node.wire.peer_pb2_grpc import ExchangeStub, add_ExchangeServicer_to_server

FRAGMENTS = 3
TERMS = Terms(b"r" * 32, b"l" * 32, FRAGMENTS)
PAYLOAD = b"\0" * 1000


@dataclass
class Heard:
    say: bytes | None
    correction: Any


def done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Offer:
    """A vector of three numbers, one a fragment; a correction moves both towards their mean."""

    fragments = FRAGMENTS

    def __init__(self, node: "Node", round_: int) -> None:
        self.node, self.round, self.u = node, round_, list(node.x)

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        return done(struct.pack("<d", self.u[index]) + PAYLOAD)

    def hear(self, index: int, payload: bytes) -> "Future[Heard]":
        if len(payload) != 8 + len(PAYLOAD):
            raise PeerMisbehaved("bad_length")
        return done(Heard(None, (struct.unpack_from("<d", payload)[0] - self.u[index]) / 2))

    def apply(self, index: int, correction: Any) -> None:
        self.node.x[index] += correction


class Node:
    def __init__(self, network: MemoryNetwork, name: str, phase_s: float, seed: int) -> None:
        self.name, self.phase_s = name, phase_s
        self.rng = random.Random(seed)
        self.x = [self.rng.uniform(-1, 1) for _ in range(FRAGMENTS)]
        self.transport = network.join(name)
        self.events: list[Event] = []
        self.under_way = False
        self.steps = 0
        self.exchange = Exchange(self.transport, self.rng.randbytes(16), self.rng, self, self.events.append)
        self.transport.serve(lambda server: add_ExchangeServicer_to_server(self.exchange, server))

    def swapping(self, under_way: bool) -> None:
        self.under_way = under_way

    def round_over(self, round: int) -> None: ...

    async def train(self, rounds: int) -> None:
        """Phases of a fixed time; like the real thing, it waits for nobody."""
        await asyncio.sleep(self.rng.random() * self.phase_s)
        for k in range(1, rounds + 1):
            await asyncio.sleep(self.phase_s * self.rng.uniform(0.98, 1.02))
            self.steps += 1
            offer = None if self.under_way else Offer(self, k)
            self.exchange.boundary(k, self.phase_s, offer, None if offer else "swapping")

    @property
    def committed(self) -> list[RoundCommitted]:
        return [e for e in self.events if isinstance(e, RoundCommitted)]

    @property
    def solo(self) -> Counter[str]:
        return Counter(e.reason for e in self.events if isinstance(e, WentSolo))


class Town:
    def __init__(self, phases: list[float], seed: int = 1, **links: Any) -> None:
        self.network = MemoryNetwork(random.Random(seed), **{"delay_s": 0.05, **links})
        self.nodes = [Node(self.network, f"n{k:03}", phase, 1000 * seed + k) for k, phase in enumerate(phases)]

    async def run(self, rounds: int, *others: Coroutine[Any, Any, None]) -> None:
        everybody = frozenset(n.name for n in self.nodes)
        for node in self.nodes:
            await node.transport.start()
            node.exchange.begin(TERMS)
            node.exchange.candidates(everybody - {node.name})
        try:
            await asyncio.gather(*(node.train(rounds) for node in self.nodes), *others)
            for node in self.nodes:
                node.exchange.stop()
            async with asyncio.timeout(60):
                await asyncio.gather(*(node.exchange.settled() for node in self.nodes))
        finally:
            await self.close()

    async def close(self) -> None:
        for node in self.nodes:
            await node.exchange.close()
            await node.transport.close()

    def committed_share(self) -> float:
        return sum(len(n.committed) for n in self.nodes) / sum(n.steps for n in self.nodes)


def test_two_nodes_meet_each_round_and_their_mean_is_kept() -> None:
    town = Town([10.0, 10.0])
    before = [sum(n.x[k] for n in town.nodes) for k in range(FRAGMENTS)]
    run_virtual(town.run(20))
    assert town.committed_share() >= 0.9
    assert [sum(n.x[k] for n in town.nodes) for k in range(FRAGMENTS)] == pytest.approx(before, abs=1e-12)
    assert town.nodes[0].x == pytest.approx(town.nodes[1].x, abs=1e-9), "they have come together"
    assert all(len(n.events) == n.steps for n in town.nodes), "every round ended once"
    sent = town.nodes[0].committed[0].sent_bytes
    assert 3 * 1008 <= sent <= 3 * 1008 + 400


def test_sixty_four_nodes_meet_many_others_and_few_calls_are_made() -> None:
    town = Town([10.0] * 64)
    run_virtual(town.run(50))
    assert town.committed_share() >= 0.9
    assert min(len({e.partner for e in n.committed}) for n in town.nodes) >= 20
    calls = sum(n.exchange.tally.calls for n in town.nodes)
    assert calls / (sum(len(n.committed) for n in town.nodes) / 2) < 3
    spread = max(max(n.x) for n in town.nodes) - min(min(n.x) for n in town.nodes)
    assert spread < 0.5, "without any all-reduce the swarm has come together"


def test_the_same_seed_is_the_same_story() -> None:
    def story() -> list[list[Event]]:
        town = Town([10.0, 12.0, 15.0, 10.0], seed=7)
        run_virtual(town.run(8))
        return [n.events for n in town.nodes]

    assert story() == story()


def test_a_swap_of_three_phases_completes_and_the_rounds_between_say_so() -> None:
    town = Town([1.0, 1.0], bandwidth_bytes_s=1000.0)  # three fragments of about 1 kB: three seconds
    run_virtual(town.run(30))
    assert all(len(n.committed) >= 5 for n in town.nodes)
    assert all(n.solo["swapping"] >= 10 for n in town.nodes)


def test_a_partner_that_vanishes_in_the_middle_costs_its_deadline_and_no_more() -> None:
    town = Town([10.0, 10.0, 10.0], bandwidth_bytes_s=1000.0)

    async def vanish() -> None:
        while not town.nodes[0].under_way:  # noqa: ASYNC110 (in virtual time, where polling costs nothing)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)  # one fragment over, two to go
        town.network.vanish(town.nodes[0].name)

    run_virtual(town.run(40, vanish()))
    rest = town.nodes[1:]
    assert all(len(n.committed) >= 20 for n in rest)
    broken = [e for n in rest for e in n.events if isinstance(e, WentSolo) and e.partner == "n000" and e.applied]
    assert len(broken) <= 1
    assert all(e.one_sided <= 1 for e in broken)


def test_a_partition_lets_both_halves_go_on_and_heals() -> None:
    town = Town([5.0] * 6)
    names = [n.name for n in town.nodes]
    across: list[float] = []

    async def split() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(50)
        town.network.partition([names[:3], names[3:]])
        marks = [len(n.committed) for n in town.nodes]
        await asyncio.sleep(100)
        for node, mark in zip(town.nodes, marks, strict=True):
            new = node.committed[mark + 1 :]
            assert len(new) >= 8, "both halves go on"
            assert all((e.partner in names[:3]) == (node.name in names[:3]) for e in new)
        town.network.heal()
        healed = loop.time()
        while not across:
            await asyncio.sleep(1)
            if any((n.committed[-1].partner in names[:3]) != (n.name in names[:3]) for n in town.nodes):
                across.append(loop.time() - healed)

    run_virtual(town.run(60, split()))
    assert across[0] <= 60


def test_lost_messages_are_caught_by_deadlines() -> None:
    town = Town([20.0] * 8, loss=0.01)
    run_virtual(town.run(40))
    assert town.committed_share() >= 0.6
    assert all(len(n.events) == n.steps for n in town.nodes)


async def _ask(town: Town, *frames: wire.Frame) -> list[wire.Frame]:
    """Say these frames to node 0 as somebody else, and hear what comes back."""
    stranger = town.network.join("stranger")
    await stranger.start()

    async def say() -> Any:
        for frame in frames:
            yield wire.encode(frame)
        await asyncio.sleep(1)

    heard = []
    async for message in ExchangeStub(stranger.channel("n000")).Swap(say(), timeout=60):
        heard.append(wire.decode(message))
        if isinstance(heard[-1], wire.Refusal):
            break
    await stranger.close()
    return heard


OFFER = wire.Offer(1, b"r" * 32, b"l" * 32, b"x" * 16, b"b" * 16, 1, FRAGMENTS, 5.0)


@pytest.mark.parametrize(
    ("offer", "code"),
    [
        (wire.Offer(2, b"r" * 32, b"l" * 32, b"x" * 16, b"b" * 16, 1, FRAGMENTS, 5.0), wire.Code.INCOMPATIBLE),
        (wire.Offer(1, b"R" * 32, b"l" * 32, b"x" * 16, b"b" * 16, 1, FRAGMENTS, 5.0), wire.Code.INCOMPATIBLE),
        (wire.Offer(1, b"r" * 32, b"L" * 32, b"x" * 16, b"b" * 16, 1, FRAGMENTS, 5.0), wire.Code.INCOMPATIBLE),
        (wire.Offer(1, b"r" * 32, b"l" * 32, b"x" * 16, b"b" * 16, 1, FRAGMENTS + 1, 5.0), wire.Code.INCOMPATIBLE),
        (OFFER, wire.Code.BUSY),
    ],
)
def test_what_cannot_be_exchanged_with_is_refused_by_its_code(offer: wire.Offer, code: wire.Code) -> None:
    async def main() -> None:
        town = Town([10.0])
        await town.nodes[0].transport.start()
        town.nodes[0].exchange.begin(TERMS)
        assert await _ask(town, offer) == [wire.Refusal(code)]
        await town.close()

    run_virtual(main())


def test_a_replayed_exchange_is_refused() -> None:
    async def main() -> None:
        town = Town([10.0])
        node = town.nodes[0]
        await node.transport.start()
        node.exchange.begin(TERMS)
        assert await _ask(town, OFFER) == [wire.Refusal(wire.Code.BUSY)]
        assert await _ask(town, OFFER) == [wire.Refusal(wire.Code.STALE)]
        await town.close()

    run_virtual(main())


def test_a_caller_that_does_not_begin_with_an_offer_is_named() -> None:
    async def main() -> None:
        town = Town([10.0])
        node = town.nodes[0]
        await node.transport.start()
        node.exchange.begin(TERMS)
        assert await _ask(town, wire.Done()) == []
        assert node.events == [PeerFaulted("stranger", "unexpected_frame")]
        await town.close()

    run_virtual(main())
