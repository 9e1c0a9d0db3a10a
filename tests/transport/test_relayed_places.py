"""A relay says where those are that come over it, and is believed for few places."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import cycle
from random import Random

import pytest
from memory_network.network import MemoryNetwork
from virtual_clock import run_virtual

from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.relayed_places import MAX_PLACES, RelayedPlaces
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, add_MirrorServicer_to_server


class Relay(MirrorServicer):
    def __init__(self, says: Iterator[str]) -> None:
        self.says = says

    async def Whence(self, request: pb.WhenceRequest, context: object) -> pb.WhenceReply:  # noqa: N802
        return pb.WhenceReply(place=next(self.says))


async def places(
    says: Sequence[str], peers: int, trusted: Sequence[str] = (), relays: Sequence[str] = ("relay",)
) -> list[str]:
    """Of so many peers that come over relays of one place, in turn."""
    network, said = MemoryNetwork(Random(1), delay_s=0.1), cycle(says)
    us, *others = (network.join(name) for name in ("us", *relays))
    for relay in others:
        relay.serve(lambda server: add_MirrorServicer_to_server(Relay(said), server))
    for member in (us, *others):
        await member.start()
    known = RelayedPlaces(us.channel, trusted)
    found = []
    for number in range(peers):
        far_end = FarEnd(f"peer {number}", "8.8.8.8", relays[number % len(relays)])
        known.met(far_end)
        assert known.place(far_end) == "relay 8.8.8.0/24", "as long as the relay has not answered"
        await asyncio.sleep(5.0)
        found.append(known.place(far_end))
    known.close()
    for member in (us, *others):
        await member.close()
    return found


def test_who_comes_over_a_relay_stands_where_the_relay_saw_it_come_from() -> None:
    said = ["9.9.9.0/24", "10.0.0.7"]
    assert run_virtual(places(said, 2, trusted=["relay"])) == said
    assert run_virtual(places(said, 2)) == [f"{place}, as relay 8.8.8.0/24 says" for place in said], (
        "which is nobody's real place: else a relay could use up another peer's share"
    )


@pytest.mark.parametrize("nonsense", ["", "here", "relay 9.9.9.0/24", "9.9.9.9/24", "x" * 1000])
def test_nonsense_leaves_it_with_the_relay(nonsense: str) -> None:
    assert run_virtual(places([nonsense], 1)) == ["relay 8.8.8.0/24"]


def test_a_relay_that_makes_up_places_is_believed_for_few() -> None:
    made_up = [f"9.9.{n}.0/24" for n in range(20)]
    assert len(set(run_virtual(places(made_up, 20)))) == MAX_PLACES + 1
    assert run_virtual(places(made_up, 20, trusted=["relay"])) == made_up


def test_many_relays_of_one_place_are_believed_for_no_more_than_one() -> None:
    made_up = [f"9.9.{n}.0/24" for n in range(20)]
    relays = [f"relay {n}" for n in range(5)]
    assert len(set(run_virtual(places(made_up, 20, relays=relays)))) == MAX_PLACES + 1


def test_a_relay_with_two_addresses_leaves_its_place_to_no_other() -> None:
    """20 ids of one host, each seen at a second address once it has named four places."""

    async def main() -> int:
        network, said = MemoryNetwork(Random(1), delay_s=0.1), (f"9.{n // 250}.{n % 250}.0/24" for n in range(1000))
        us = network.join("us")
        await us.start()
        known, found = RelayedPlaces(us.channel, ()), set[str]()
        members = [us]
        for number in range(20):
            relay = network.join(f"relay {number}")
            relay.serve(lambda server: add_MirrorServicer_to_server(Relay(said), server))
            await relay.start()
            members.append(relay)
            for peer in range(MAX_PLACES + 1):
                host = "8.8.4.4" if peer == MAX_PLACES else "8.8.8.8"
                far_end = FarEnd(f"peer {number} {peer}", host, f"relay {number}")
                known.met(far_end)
                await asyncio.sleep(5.0)
                found.add(known.place(far_end))
        known.close()
        for member in members:
            await member.close()
        return len({place for place in found if not place.startswith("relay")})

    assert run_virtual(main()) <= 2 * MAX_PLACES


def test_a_direct_peer_is_where_it_is() -> None:
    async def main() -> str:
        known = RelayedPlaces(lambda _: None, ())  # type: ignore[arg-type, return-value]
        far_end = FarEnd("peer", "8.8.8.8")
        known.met(far_end)
        return known.place(far_end)

    assert run_virtual(main()) == "8.8.8.0/24"
