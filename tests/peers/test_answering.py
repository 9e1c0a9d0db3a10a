"""A peer counts once it has answered, and those that never do cost others little time."""

import asyncio
from collections.abc import Sequence
from random import Random

from virtual_clock import in_virtual_time

from noloco_node.base.addresses import Address
from noloco_node.peers.answering import ANSWER_S, AT_ONCE, CHECK_S, MAX_REMEMBERED, PATIENCE_S, Answering
from noloco_node.peers.record import PeerRecord

FOREVER = 1e9


class Peers:
    """A transport on which some peers answer after so many seconds; the others swallow every call."""

    def __init__(self, **answer_s: float) -> None:
        self.answer_s = answer_s
        self.met: dict[str, float] = {}
        self.called: list[str] = []
        self.under_way = self.most = 0

    async def reaches(self, peer: str, addresses: Sequence[Address], within_s: int) -> bool:
        self.called.append(peer)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            async with asyncio.timeout(within_s):
                await asyncio.sleep(self.answer_s.get(peer, FOREVER))
            return True
        except TimeoutError:
            return False
        finally:
            self.under_way -= 1

    def met_at(self, peer: str) -> float | None:
        return self.met.get(peer)


def at(peer: str, host: str = "192.0.2.1") -> PeerRecord:
    return PeerRecord(
        state="training",
        round=3,
        step=9,
        loss=2.0,
        tokens_per_s=1.0,
        addresses=(Address("ip4", host, 4001, peer),),
        peer_id=peer,
        boot=bytes(16),
        time=0.0,
        version="1",
        peers=1,
        expires=FOREVER,
    )


def records(*peers: str, host: str = "192.0.2.1") -> dict[str, PeerRecord]:
    return {peer: at(peer, host) for peer in peers}


def made_up(count: int) -> dict[str, PeerRecord]:
    """Each at a place of its own, as the records say."""
    return {f"fake {n}": at(f"fake {n}", f"10.0.{n // 250}.{n % 250}") for n in range(count)}


def clock() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_the_first_peers_are_called_at_once_and_counted_when_they_answer() -> None:
    peers = Peers(anna=0.3, bob=0.2, carol=0.4)
    answering, began = Answering(peers, Random(1)), clock()
    await answering.ask({"": records("anna", "bob", "carol")})
    seconds, there = clock() - began, {peer for peer in ("anna", "bob", "carol") if answering.answered(peer)}
    assert there == {"anna", "bob", "carol"} and seconds < 0.5


@in_virtual_time
async def test_a_look_up_waits_only_a_little_for_those_that_do_not_answer() -> None:
    answering, began = Answering(Peers(anna=0.1), Random(1)), clock()
    await answering.ask({"": records("anna", "nobody")})
    assert clock() - began == PATIENCE_S
    assert answering.answered("anna") and not answering.answered("nobody")


@in_virtual_time
async def test_a_caller_has_answered_without_being_called() -> None:
    peers = Peers()
    peers.met["anna"] = clock()
    answering = Answering(peers, Random(1))
    await answering.ask({"": records("anna")})
    assert answering.answered("anna") and not peers.called


@in_virtual_time
async def test_made_up_records_of_one_node_of_the_dht_hardly_delay_those_that_others_tell_of() -> None:
    answering, began = Answering(Peers(anna=0.2), Random(1)), clock()
    told = {"hostile": made_up(500), "honest": made_up(8) | records("anna")}
    while not answering.answered("anna"):
        await answering.ask(told)
    assert clock() - began <= 2 * ANSWER_S


@in_virtual_time
async def test_500_addresses_that_swallow_calls_are_through_within_a_minute_and_a_bounded_number_at_a_time() -> None:
    peers = Peers(anna=0.2)
    answering, began = Answering(peers, Random(1)), clock()
    told = {"": made_up(500) | records("anna")}
    while set(peers.called) != set(told[""]):
        await answering.ask(told)
    seconds, before = clock() - began, len(asyncio.all_tasks())
    await asyncio.sleep(ANSWER_S + 1)
    answering.close()
    assert seconds < 60 and peers.most == AT_ONCE and before <= AT_ONCE + 1
    await asyncio.sleep(0)
    assert peers.under_way == 0


@in_virtual_time
async def test_who_does_not_answer_is_called_later_and_later_and_who_did_seldom() -> None:
    peers = Peers(anna=0.1)
    answering = Answering(peers, Random(1))
    while clock() < CHECK_S + 30:
        await answering.ask({"": records("anna", "nobody")})
        await asyncio.sleep(5)
    assert answering.answered("anna")
    assert peers.called.count("anna") == 2
    assert peers.called.count("nobody") <= 9


@in_virtual_time
async def test_a_peer_that_is_gone_when_it_is_checked_does_not_count_until_it_is_met_again() -> None:
    peers = Peers(anna=0.1)
    answering = Answering(peers, Random(1))
    await answering.ask({"": records("anna")})
    peers.answer_s.clear()
    await asyncio.sleep(CHECK_S + 1)
    assert answering.answered("anna")
    await answering.ask({"": records("anna")})
    await asyncio.sleep(ANSWER_S)
    assert not answering.answered("anna")
    peers.met["anna"] = clock()
    assert answering.answered("anna")


@in_virtual_time
async def test_what_is_remembered_is_bounded_and_who_is_asked_for_stays() -> None:
    peers = Peers(anna=0.0, **dict.fromkeys((f"{n}" for n in range(2 * MAX_REMEMBERED)), 0.0))
    answering = Answering(peers, Random(1))
    for first in range(0, 2 * MAX_REMEMBERED, 100):
        await answering.ask({"": records("anna", *map(str, range(first, first + 20)))})
    assert len(answering._known) <= MAX_REMEMBERED and answering.answered("anna")
