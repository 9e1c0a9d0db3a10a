"""Whole rounds over the in-memory network, in virtual time: many nodes, slow links, partitions, vanishing peers."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import virtual_nodes
from memory_network.network import MemoryNetwork
from virtual_clock import run_virtual
from virtual_nodes import FRAGMENTS, TERMS, Node, Offer, VirtualSwarm

from noloco_node.base.events import Event, PeerFaulted, TakenBack, WentSolo
from noloco_node.core.standing import Standing
from noloco_node.core.verdict import Verdict
from noloco_node.errors import PeerFault
from noloco_node.host.traffic import Traffic
from noloco_node.rounds.link import Link
from noloco_node.rounds.service import MAX_CALLERS, _Caller
from noloco_node.transport.base import TAKEN_S
from noloco_node.wire import messages as wire
from noloco_node.wire.peer_pb2_grpc import ExchangeStub


def test_two_nodes_swap_each_round_and_their_mean_is_kept() -> None:
    swarm = VirtualSwarm([10.0, 10.0])
    before = [sum(n.x[k] for n in swarm.nodes) for k in range(FRAGMENTS)]
    run_virtual(swarm.run(20))
    assert swarm.committed_share() >= 0.9
    assert [sum(n.x[k] for n in swarm.nodes) for k in range(FRAGMENTS)] == pytest.approx(before, abs=1e-12)
    assert swarm.nodes[0].x == pytest.approx(swarm.nodes[1].x, abs=1e-9), "they have come together"
    assert all(len(n.events) == n.steps for n in swarm.nodes), "every round ended once"
    sent = swarm.nodes[0].committed[0].sent_bytes
    assert 3 * 1008 <= sent <= 3 * 1008 + 400


def test_the_same_seed_gives_the_same_events() -> None:
    def story() -> list[list[Event]]:
        swarm = VirtualSwarm([10.0, 12.0, 15.0, 10.0], seed=7)
        run_virtual(swarm.run(8))
        return [n.events for n in swarm.nodes]

    assert story() == story()


def test_a_swap_of_three_phases_completes_and_the_rounds_between_say_so() -> None:
    swarm = VirtualSwarm([1.0, 1.0], bandwidth_bytes_s=1000.0)  # three fragments of about 1 kB: three seconds
    run_virtual(swarm.run(30))
    assert all(len(n.committed) >= 5 for n in swarm.nodes)
    assert all(n.solo["swapping"] >= 10 for n in swarm.nodes)
    assert all(len(n.sources) >= 5 and len({*n.sources}) == 1 and n.sources[0] for n in swarm.nodes)


def test_a_partner_that_vanishes_in_the_middle_costs_its_deadline_and_no_more() -> None:
    swarm = VirtualSwarm([10.0, 10.0, 10.0], bandwidth_bytes_s=1000.0)

    async def vanish() -> None:
        while not swarm.nodes[0].under_way:  # noqa: ASYNC110 (in virtual time, where polling costs nothing)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)  # one fragment over, two to go
        swarm.network.vanish(swarm.nodes[0].name)

    run_virtual(swarm.run(40, vanish()))
    rest = swarm.nodes[1:]
    assert all(len(n.committed) >= 20 for n in rest)
    broken = [e for n in rest for e in n.events if isinstance(e, WentSolo) and e.partner == "n000" and e.applied]
    assert len(broken) <= 1
    assert all(e.one_sided <= 1 for e in broken)


def test_a_partition_lets_both_halves_go_on_and_heals() -> None:
    swarm = VirtualSwarm([5.0] * 6)
    names = [n.name for n in swarm.nodes]
    across: list[float] = []

    async def split() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(50)
        swarm.network.partition([names[:3], names[3:]])
        marks = [len(n.committed) for n in swarm.nodes]
        await asyncio.sleep(100)
        for node, mark in zip(swarm.nodes, marks, strict=True):
            new = node.committed[mark + 1 :]
            assert len(new) >= 8, "both halves go on"
            assert all((e.partner in names[:3]) == (node.name in names[:3]) for e in new)
        swarm.network.heal()
        healed = loop.time()
        while not across:
            await asyncio.sleep(1)
            if any((n.committed[-1].partner in names[:3]) != (n.name in names[:3]) for n in swarm.nodes):
                across.append(loop.time() - healed)

    run_virtual(swarm.run(60, split()))
    assert across[0] <= 60


@pytest.mark.parametrize("finder", [0, 1])
def test_a_diverged_swap_is_known_at_both_ends(monkeypatch: pytest.MonkeyPatch, finder: int) -> None:
    """Whichever finds it."""
    receive = Offer.receive

    def stray(offer: Offer, index: int, payload: bytes) -> Any:
        if offer.node is swarm.nodes[finder]:
            raise PeerFault("diverged")
        return receive(offer, index, payload)

    monkeypatch.setattr(Offer, "receive", stray)
    swarm = VirtualSwarm([10.0, 10.0])
    run_virtual(swarm.run(30))
    for node in swarm.nodes:
        found = "diverged" if node is swarm.nodes[finder] else "partner_diverged"
        assert node.solo[found] >= 5, node.solo
        assert not (node.committed or node.solo["hung_up"] or node.solo["silent"]), node.solo


def test_a_fault_of_our_own_in_a_swap_is_logged_whoever_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Offer, "receive", lambda *_: 1 / 0)
    run_virtual(VirtualSwarm([10.0, 10.0]).run(3))
    said = {record.message for record in caplog.records if record.exc_info}
    assert said == {"a call ended by a fault of our own", "an answer ended by a fault of our own"}


def test_a_partner_whose_codec_hangs_is_alive_and_given_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Offer.receive
    hung: list[Future[Any]] = []

    def hang(offer: Offer, index: int, payload: bytes) -> Any:
        if offer.node is not swarm.nodes[0]:
            return receive(offer, index, payload)
        hung.append(Future())
        return hung[-1]

    async def come_back() -> None:
        await asyncio.sleep(4200)
        for future in hung:
            if not future.done():
                future.set_exception(PeerFault("late"))

    monkeypatch.setattr(Offer, "receive", hang)
    swarm = VirtualSwarm([100.0] * 5)
    run_virtual(swarm.run(40, come_back()))
    assert not swarm.nodes[0].committed and swarm.nodes[0].solo["swapping"], "it holds on to whom it has"
    for node in swarm.nodes[1:]:
        assert len(node.committed) >= 34, node.solo


def test_what_is_sent_is_counted_as_it_goes_and_in_vain_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_nodes, "PAYLOAD", b"\0" * 1_000_000)
    swarm = VirtualSwarm([100.0, 100.0], paces={0: Traffic(upload_bytes_s=32_000.0, day=lambda: "2031-12-24")})
    node, other = swarm.nodes
    counted: list[int] = []

    async def watch() -> None:
        while len(counted) < 5:
            await asyncio.sleep(5)
            if node.under_way:
                tally = node.exchange.tally
                counted.append(tally.sent_bytes)
                assert 0 <= tally.sent_bytes - tally.unsettled_bytes < 1000, "what went into calls alone"
        swarm.vanish(other)

    run_virtual(swarm.run(4, watch()))
    assert all(120_000 <= later - before <= 300_000 for before, later in pairwise(counted))
    assert not node.committed and node.exchange.tally.sent_bytes >= counted[-1]
    assert node.exchange.tally.unsettled_bytes == 0, "a swap that broke counts for those that do not"


def test_lost_messages_are_caught_by_deadlines() -> None:
    swarm = VirtualSwarm([20.0] * 8, loss=0.01)
    run_virtual(swarm.run(40))
    assert swarm.committed_share() >= 0.6
    assert all(len(n.events) == n.steps for n in swarm.nodes)


@asynccontextmanager
async def _alone(*, offers: bool = False) -> AsyncIterator[tuple[VirtualSwarm, Node]]:
    """A node alone, perhaps with an open offer of its first round."""
    swarm = VirtualSwarm([10.0])
    (node,) = swarm.nodes
    await node.transport.start()
    node.exchange.begin(TERMS)
    if offers:
        node.exchange.boundary(1, 10.0, Offer(node, 1), None)
    yield swarm, node
    await swarm.close()


async def _ask(swarm: VirtualSwarm, *frames: wire.Frame, name: str = "caller") -> list[wire.Frame]:
    """Send these frames to node 0 from another node; returns what it answers, up to an acceptance or a refusal."""
    caller = swarm.network.join(name)
    await caller.start()

    async def say() -> Any:
        for frame in frames:
            yield wire.encode(frame)
        await asyncio.sleep(1)

    received = []
    async for message in ExchangeStub(caller.channel("n000")).Swap(say(), timeout=60):
        received.append(wire.decode(message))
        match received[-1]:
            case wire.Accept():
                break
            case wire.Refusal(code) if code is not wire.Code.APPOINTMENT:
                break
    await caller.close()
    return received


OFFER = wire.Offer(1, b"r" * 32, b"l" * 32, b"x" * 16, FRAGMENTS, 5.0)


@pytest.mark.parametrize(
    ("offer", "code"),
    [
        (wire.Offer(2, b"r" * 32, b"l" * 32, b"x" * 16, FRAGMENTS, 5.0), wire.Code.INCOMPATIBLE),
        (wire.Offer(1, b"R" * 32, b"l" * 32, b"x" * 16, FRAGMENTS, 5.0), wire.Code.INCOMPATIBLE),
        (wire.Offer(1, b"r" * 32, b"L" * 32, b"x" * 16, FRAGMENTS, 5.0), wire.Code.INCOMPATIBLE),
        (wire.Offer(1, b"r" * 32, b"l" * 32, b"x" * 16, FRAGMENTS + 1, 5.0), wire.Code.INCOMPATIBLE),
        (OFFER, wire.Code.BUSY),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_by_its_code(offer: wire.Offer, code: wire.Code) -> None:
    async def main() -> None:
        async with _alone() as (swarm, node):
            assert await _ask(swarm, offer) == [wire.Refusal(code)]
            counted = [event.reason for event in node.events if isinstance(event, PeerFaulted)]
            assert counted == ([] if code is wire.Code.BUSY else [code.reason])

    run_virtual(main())


@pytest.mark.parametrize("known", [True, False])
def test_callers_that_say_nothing_keep_nobody_out(known: bool) -> None:
    async def hold(swarm: VirtualSwarm, name: str) -> None:
        crowd = swarm.network.join(name)
        await crowd.start()

        async def nothing() -> Any:
            await asyncio.sleep(100)
            yield wire.encode(OFFER)

        async for _ in ExchangeStub(crowd.channel("n000")).Swap(nothing(), timeout=60):
            pass
        await crowd.close()

    async def main() -> None:
        async with _alone() as (swarm, node):
            node.exchange.candidates({"caller": "127.0.0.1"} if known else {})
            silent = [asyncio.create_task(hold(swarm, f"silent {k}")) for k in range(3 * MAX_CALLERS)]
            await asyncio.sleep(1)
            assert len(node.exchange._callers) == MAX_CALLERS
            for k in range(20):
                offer = replace(OFFER, exchange_id=bytes([k]) * 16)
                assert await _ask(swarm, offer) == [wire.Refusal(wire.Code.BUSY)], "of the machine, with its time"
            assert node.exchange._machine.log[-1][1].exchange == offer.exchange_id
            await asyncio.gather(*silent)
            assert not node.exchange._callers

    run_virtual(main())


async def test_a_crowd_of_one_place_sends_its_own_away_first() -> None:
    service = VirtualSwarm([10.0]).nodes[0].exchange
    for k in range(MAX_CALLERS):
        service._callers[f"crowd {k}"] = _Caller("a host", False, Link())
    for name, place, known in (("stranger", "elsewhere", False), ("candidate", "a host", True)):
        service._callers[name] = _Caller(place, known, Link())
        service._send_one_away()
    assert {"stranger", "candidate"} <= service._callers.keys() and not {"crowd 0", "crowd 1"} & service._callers.keys()


def test_a_replayed_exchange_is_refused() -> None:
    async def main() -> None:
        async with _alone() as (swarm, node):
            assert await _ask(swarm, OFFER) == [wire.Refusal(wire.Code.BUSY)]
            assert await _ask(swarm, OFFER) == [wire.Refusal(wire.Code.STALE)]
            assert [event.reason for event in node.events if isinstance(event, PeerFaulted)] == ["stale"]
            assert node.exchange.standing("caller").refused == 1

    run_virtual(main())


def test_an_exchange_id_that_is_in_use_is_refused_and_its_caller_goes_on_waiting() -> None:
    async def main() -> None:
        async with _alone() as (swarm, node):
            node.exchange.boundary(1, 10.0, None, "nonfinite")
            offer = replace(OFFER, patience_s=20.0)
            first = asyncio.create_task(_ask(swarm, offer))
            await asyncio.sleep(1)
            assert await _ask(swarm, offer, name="another") == [wire.Refusal(wire.Code.STALE)]
            await asyncio.sleep(5)
            node.exchange.boundary(2, 10.0, Offer(node, 2), None)
            appointed, accepted = await first
            assert isinstance(appointed, wire.Refusal) and appointed.code is wire.Code.APPOINTMENT
            assert isinstance(accepted, wire.Accept)

    run_virtual(main())


@pytest.mark.parametrize(("said", "reason"), [([], "caller_gone"), ([wire.Alive()], "hung_up")])
def test_a_caller_that_goes_before_it_says_anything_broke_no_swap(said: list[wire.Frame], reason: str) -> None:
    """It may have accepted another one while it waited."""

    async def main() -> None:
        async with _alone(offers=True) as (swarm, node):
            (accepted,) = await _ask(swarm, OFFER, *said)
            assert isinstance(accepted, wire.Accept)
            await asyncio.sleep(1)
            node.exchange.boundary(2, 10.0, None, "nonfinite")
            assert node.solo == {reason: 1, "nonfinite": 1}

    run_virtual(main())


def test_an_exchange_id_of_an_earlier_swap_is_refused_from_anybody() -> None:
    """Else the verdict on that swap would go to the second caller."""

    async def main() -> None:
        async with _alone(offers=True) as (swarm, node):
            (accepted,) = await _ask(swarm, OFFER)
            assert isinstance(accepted, wire.Accept)
            await asyncio.sleep(100)  # it says nothing more
            assert await _ask(swarm, OFFER, name="another") == [wire.Refusal(wire.Code.STALE)]
            node.exchange.judged(OFFER.exchange_id, Verdict(0.5, True, True), 2.0, 1.0)
            assert node.exchange.standing("caller").taken_back == 1

    run_virtual(main())


def test_the_connection_of_a_partner_that_is_found_to_lie_ends_before_its_swap_does() -> None:
    async def main() -> None:
        async with _alone(offers=True) as (swarm, node):
            exchange = node.exchange
            caller = swarm.network.join("caller")
            await caller.start()

            async def say() -> Any:
                yield wire.encode(OFFER)
                await asyncio.sleep(60)

            call = ExchangeStub(caller.channel("n000")).Swap(say())
            assert isinstance(wire.decode(await anext(aiter(call))), wire.Accept)
            assert exchange.partner == "caller"
            exchange.judged(OFFER.exchange_id, Verdict(0.5, True, True), 2.0, 1.0)
            await asyncio.sleep(0.1)
            assert exchange.partner is None
            standing = exchange.standing("caller")
            assert (standing.taken_back, standing.failed, standing.why) == (1, 0, "taken_back")
            exchange.boundary(2, 10.0, None, "nonfinite")
            assert node.solo == {"taken_back": 1, "nonfinite": 1}
            await caller.close()

    run_virtual(main())


def test_a_caller_that_reads_nothing_after_its_swap_does_not_keep_its_call() -> None:
    async def main() -> None:
        async def requests() -> AsyncIterator[bytes]:
            yield wire.to_bytes(OFFER)
            await asyncio.sleep(1e6)

        async def holds() -> None:
            async for _ in node.exchange._answer_stream(requests(), Context()):
                await asyncio.sleep(1e6)

        async with _alone() as (_, node):
            call = asyncio.create_task(holds())
            await asyncio.sleep(1.2 * TAKEN_S)
            assert call.cancelled()

    class Context:
        def peer(self) -> str:
            return "caller"

    run_virtual(main())


def test_a_node_that_comes_back_and_repeats_its_rounds_is_no_replay() -> None:
    """A replay is known by the exchange, never by the round: a node that resumed from a checkpoint repeats its
    rounds."""

    async def story() -> list[Node]:
        network = MemoryNetwork(random.Random(1), delay_s=0.05)
        stays = await begin(network, "stays", 1)
        training = asyncio.create_task(stays.train(20))
        lives = []
        for seed in (2, 3):
            lives.append(life := await begin(network, "returns", seed))
            await life.train(8)
            await end(life)
        await training
        await end(stays)
        return [stays, *lives]

    async def begin(network: MemoryNetwork, name: str, seed: int) -> Node:
        node = Node(network, name, 10.0, seed, None)
        await node.transport.start()
        node.exchange.begin(TERMS, 1)
        node.exchange.candidates(dict.fromkeys({"stays", "returns"} - {name}, ""))
        return node

    async def end(node: Node) -> None:
        await node.exchange.close()
        await node.transport.close()

    for node in run_virtual(story()):
        assert node.solo["stale"] == 0
        assert len(node.committed) >= 6, node.solo
        assert not [event for event in node.events if isinstance(event, PeerFaulted)]


def test_a_correction_that_was_taken_back_is_counted_against_its_partner() -> None:
    swarm = VirtualSwarm([10.0, 10.0])
    node = swarm.nodes[0]

    async def verdict() -> None:
        await asyncio.sleep(55)
        exchange, (round_, partner) = next(reversed(node.exchange._partners.items()))
        node.exchange.judged(exchange, Verdict(1.2, True, True), 5.5, 2.5)
        node.exchange.judged(b"never seen", Verdict(1.2, True, True), 5.5, 2.5)
        assert node.events[-1] == TakenBack(round_, "n001", 5.5, 2.5) and partner == "n001"
        standing = node.exchange.standing("n001")
        assert (standing.taken_back, standing.why, standing.quarantined_s) == (1, "taken_back", 80.0)
        assert node.exchange.standings() == {"n001": standing} and standing.committed >= 3
        assert node.exchange.standing("nobody") == Standing()

    run_virtual(swarm.run(20, verdict()))
    assert node.solo["all_quarantined"] >= 5 and swarm.nodes[1].solo["quarantined"] >= 1, node.solo
    assert 8 <= len(node.committed) <= 13, "it comes back"


def test_the_latest_events_can_be_read_as_lines() -> None:
    async def main() -> None:
        swarm = VirtualSwarm([10.0])
        exchange = swarm.nodes[0].exchange
        exchange.begin(TERMS, 2)
        await asyncio.sleep(2.5)
        exchange.boundary(1, 10.0, None, "nonfinite")
        await asyncio.sleep(0.5)
        exchange.candidates({f"peer {k}": "" for k in range(100)})
        settings, boundary, candidates = exchange.event_log()
        assert settings == "   -3.000 s  Settings(swaps=2, blocking=False)"
        assert boundary == "   -0.500 s  Boundary(round=1, phase_s=10.0, closed='nonfinite', progress=None)"
        assert len(candidates) == 200, "cut"
        await swarm.close()

    run_virtual(main())


def test_a_caller_that_does_not_begin_with_an_offer_is_named() -> None:
    async def main() -> None:
        async with _alone() as (swarm, node):
            assert await _ask(swarm, wire.Done()) == []
            assert node.events == [PeerFaulted("caller", "unexpected_frame")]

    run_virtual(main())
