"""A bootstrap node says where those are that come over it; all others that come over a relay are in one place."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import cycle
from random import Random
from typing import Any

import grpc
import pytest
from memory_network.network import MemoryNetwork, started
from virtual_clock import run_virtual

from noloco_node.base.places import RELAYED
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.relayed_places import RelayedPlaces
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, add_MirrorServicer_to_server

REFUSED = "refused"


class Relay(MirrorServicer):
    def __init__(self, says: Iterator[str]) -> None:
        self.says = says
        self.asked = 0

    async def Whence(self, request: pb.WhenceRequest, context: Any) -> pb.WhenceReply:  # noqa: N802
        self.asked += 1
        if (says := next(self.says)) == REFUSED:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        return pb.WhenceReply(place=says)


async def places(
    says: Sequence[str], peers: int, bootstrap: Sequence[str] = ("relay",), *, looks: int = 1, every_s: float = 5.0
) -> tuple[list[str], int]:
    """Of so many peers that come over a relay, each of which is looked at so often, and how often it was asked."""
    network, said = MemoryNetwork(Random(1), delay_s=0.1), Relay(cycle(says))
    us, relay = network.join("us"), network.join("relay")
    relay.serve(lambda server: add_MirrorServicer_to_server(said, server))
    known = RelayedPlaces(us.channel, bootstrap)
    found = []
    async with started(us, relay):
        for number in range(peers):
            far_end = FarEnd(f"peer {number}", "8.8.8.8", "relay")
            for look in range(looks):
                known.met(far_end)
                assert look or known.place(far_end) == RELAYED, "as long as the relay has not answered"
                await asyncio.sleep(every_s)
                found.append(known.place(far_end))
        known.close()
    return found, said.asked


def test_who_comes_over_a_bootstrap_relay_stands_where_it_saw_it_come_from() -> None:
    said = ["9.9.9.0/24", "10.0.0.7"]
    assert run_virtual(places(said, 2)) == (said, 2)


def test_a_relay_is_asked_again_after_a_minute_and_what_it_said_counts_while_it_does_not_answer() -> None:
    says = ["9.9.9.0/24", REFUSED, "10.0.0.7", ""]
    seen = [says[0], says[0], says[2], RELAYED]
    assert run_virtual(places(says, 1, looks=4, every_s=61.0)) == (seen, 4)
    assert run_virtual(places(says, 1, looks=8, every_s=30.5)) == ([place for place in seen for _ in range(2)], 4)


@pytest.mark.parametrize("nonsense", ["", "here", "relay 9.9.9.0/24", "9.9.9.9/24", "x" * 1000])
def test_nonsense_says_nothing(nonsense: str) -> None:
    assert run_virtual(places([nonsense], 1)) == ([RELAYED], 1)


def test_a_relay_that_nobody_chose_is_not_asked() -> None:
    """It is free to run one beside a crowd, and to make up a network for each identity: so a host would be many."""
    made_up = [f"9.9.{n}.0/24" for n in range(20)]
    assert run_virtual(places(made_up, 20, bootstrap=["another"])) == ([RELAYED] * 20, 0)


def test_all_other_relays_are_one_place_wherever_they_are() -> None:
    known = RelayedPlaces(lambda _: None, ())  # type: ignore[arg-type, return-value]
    ends = [FarEnd("peer", f"8.8.{n}.8", f"relay {n}") for n in range(20)]
    assert {known.place(far_end) for far_end in ends} == {RELAYED}


async def test_a_direct_peer_is_where_it_is() -> None:
    known = RelayedPlaces(lambda _: None, ())  # type: ignore[arg-type, return-value]
    far_end = FarEnd("peer", "8.8.8.8")
    known.met(far_end)
    assert known.place(far_end) == "8.8.8.0/24"
