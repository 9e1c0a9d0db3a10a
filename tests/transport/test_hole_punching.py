"""Who may have whom dialled, and when it is tried again. tests/system/faults/test_nat.py does it through routers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import wraps
from random import Random

import grpc
import pytest
from memory_network.network import MemoryNetwork, MemoryTransport, started
from transport_peers import failure_of
from virtual_clock import in_virtual_time

from noloco_node.base.addresses import Address, parse
from noloco_node.base.identity import peer_id_of
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.hole_punching import (
    AGAIN_S,
    AN_HOUR,
    ARRANGED_OF_PLACE,
    ASK_AGAIN_S,
    MOST_DIALS,
    OF_PLACE,
    OF_PLACE_AN_HOUR,
    PLACE_S,
    WITHIN_S,
    HolePunching,
    _InVain,
)
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import HolePunchingStub, add_HolePunchingServicer_to_server

QUIC = "/ip4/8.8.0.{}/udp/4001/quic-v1"
HOME = parse("/ip4/192.168.1.2/tcp/4001")


class Control:
    """A p2pd whose routers let dials in or not."""

    def __init__(self) -> None:
        self.connections: dict[str, FarEnd] = {}
        self.dialled: list[tuple[str, list[str]]] = []
        self.lets_in = True

    async def find_connected(self, peer: str) -> FarEnd | None:
        return self.connections.get(peer)

    async def connect(self, peer: str, addresses: Sequence[Address], within_s: int) -> None:
        self.dialled.append((peer, list(map(str, addresses))))
        if not self.lets_in:
            await asyncio.sleep(within_s)
            raise ConnectionError("failed to dial")


class Three:
    """Two nodes behind routers and their relay, each of which sees the others over QUIC if it is connected to them."""

    def __init__(self) -> None:
        network = MemoryNetwork(Random(1), delay_s=0.01)
        self.members = members = [network.join(peer_id_of(bytes([number]) * 32)) for number in range(3)]
        self.a, self.b, self.relay = members
        at = {member.peer_id: parse(QUIC.format(number)) for number, member in enumerate(members)}
        self.ends = {peer: FarEnd(peer, address.host, quic=address) for peer, address in at.items()}
        self.at = {member.peer_id: Control() for member in members}
        self.at[self.relay.peer_id].connections = self.ends
        for member in (self.a, self.b):
            self.at[member.peer_id].connections = {self.relay.peer_id: self.ends[self.relay.peer_id]}
        self.punching = {member.peer_id: self._serve(member) for member in members}
        self.known = [HOME, Address("ip4", "8.8.0.2", 4001, self.b.peer_id, self.relay.peer_id)]

    def _serve(self, member: MemoryTransport) -> HolePunching:
        punching = HolePunching(
            [self.relay.peer_id],
            member.channel,
            lambda context: self.ends[member.caller(context)],
            lambda: self.at[member.peer_id],  # type: ignore[arg-type, return-value]
        )
        member.serve(lambda server: add_HolePunchingServicer_to_server(punching, server))
        return punching

    async def connect(self) -> float:
        """From a to b. The seconds that it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.punching[self.a.peer_id].connect(self.b.peer_id, self.known)
        return loop.time() - began

    def dialled(self, who: MemoryTransport) -> list[tuple[str, list[str]]]:
        return self.at[who.peer_id].dialled

    async def told(self, by: MemoryTransport, address: str, peer: str = "") -> grpc.StatusCode | None:
        """How b answers who tells it to dial."""
        request = pb.DialRequest(peer=peer or self.a.peer_id, address=address)
        try:
            await HolePunchingStub(by.channel(self.b.peer_id)).Dial(request, timeout=5.0)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return None


@pytest.fixture
def three() -> Three:
    return Three()


def among_three(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The three are started for it, in simulated time."""

    @in_virtual_time
    @wraps(test)
    async def run(three: Three, **given: str) -> None:
        async with started(*three.members):
            await test(three, **given)

    return run


@among_three
async def test_both_dial_where_the_relay_sees_the_other(three: Three) -> None:
    await three.connect()
    assert three.dialled(three.a) == [(three.b.peer_id, [str(HOME), QUIC.format(1)])]
    assert three.dialled(three.b) == [(three.a.peer_id, [QUIC.format(0)])]


@among_three
async def test_routers_that_let_nothing_in_are_tried_again_later(three: Three) -> None:
    three.at[three.a.peer_id].lets_in = False
    assert await three.connect() == pytest.approx(WITHIN_S, abs=0.1)
    assert await three.connect() == 0
    await asyncio.sleep(AGAIN_S)
    await three.connect()
    assert len(three.dialled(three.a)) == 2


@pytest.mark.parametrize("relay", ["", "relay"])
@among_three
async def test_a_connection_that_is_there_is_left_as_it_is(three: Three, relay: str) -> None:
    three.at[three.a.peer_id].connections[three.b.peer_id] = FarEnd(three.b.peer_id, "8.8.0.2", relay)
    assert await three.connect() == 0
    assert not three.dialled(three.a) and not three.dialled(three.b)


@among_three
async def test_a_relay_that_does_not_see_both_over_quic_arranges_nothing(three: Three) -> None:
    for who in (three.a.peer_id, three.b.peer_id):
        seen = three.ends[who]
        for other in (seen._replace(quic=None), seen._replace(quic=None, relay=three.relay.peer_id)):
            three.ends[who] = other
            await three.connect()
            await asyncio.sleep(ASK_AGAIN_S)
        three.ends[who] = seen
    del three.ends[three.b.peer_id]  # it has gone
    await three.connect()
    assert not three.dialled(three.a) and not three.dialled(three.b)


@among_three
async def test_a_relay_that_does_not_answer_costs_one_short_wait(three: Three) -> None:
    async def hangs(_: str) -> None:
        await asyncio.Event().wait()

    three.at[three.relay.peer_id].find_connected = hangs  # type: ignore[method-assign]
    assert await three.connect() == pytest.approx(WITHIN_S, abs=0.1)
    assert await three.connect() == 0


@among_three
async def test_no_relay_is_dialled_for_it(three: Three) -> None:
    """A peer's record may name any as its relay, such as one whose own record names the first."""
    three.at[three.a.peer_id].connections.clear()
    assert await three.connect() == 0
    three.known[1] = replace(three.known[1], relay=three.b.peer_id)
    assert await three.connect() == 0
    stranger = peer_id_of(bytes([9]) * 32)
    three.known[1] = replace(three.known[1], relay=stranger)
    three.at[three.a.peer_id].connections[stranger] = FarEnd(stranger, "8.8.0.9", quic=parse(QUIC.format(9)))
    assert await three.connect() == 0, "one that is connected, and not this node's relay"
    assert not three.dialled(three.a)


NOWHERE = [
    "",
    "here",
    "/ip4/8.8.0.9/tcp/22",
    "/ip4/8.8.0.9/udp/53",
    "/dns4/victim.example/udp/53/quic-v1",
    "/ip4/127.0.0.1/udp/53/quic-v1",
    "/ip4/192.168.1.1/udp/53/quic-v1",
    "/ip4/255.255.255.255/udp/53/quic-v1",
    "/ip4/224.0.0.1/udp/53/quic-v1",
    "/ip6/fe80::1/udp/53/quic-v1",
]


@pytest.mark.parametrize("nowhere", NOWHERE)
@among_three
async def test_what_no_relay_sees_is_not_dialled_at_its_word(three: Three, nowhere: str) -> None:
    assert await three.told(three.relay, nowhere) is grpc.StatusCode.INVALID_ARGUMENT
    assert not three.dialled(three.b)


@among_three
async def test_in_a_private_network_a_relay_sees_private_addresses(three: Three) -> None:
    three.ends[three.relay.peer_id] = FarEnd(three.relay.peer_id, "192.168.1.9")
    assert await three.told(three.relay, "/ip4/192.168.1.1/udp/4001/quic-v1") is None
    assert await three.told(three.relay, "/ip4/127.0.0.1/udp/4001/quic-v1") is grpc.StatusCode.INVALID_ARGUMENT


@among_three
async def test_a_stranger_has_nobody_dialled(three: Three) -> None:
    assert await three.told(three.a, QUIC.format(9)) is grpc.StatusCode.PERMISSION_DENIED
    assert not three.dialled(three.b)


@among_three
async def test_a_place_is_dialled_few_times_whatever_ids_it_makes_up(three: Three) -> None:
    """Each dial in vain brings p2pd nearer to taking UDP for blocked."""
    three.at[three.b.peer_id].lets_in = False
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    ids = [peer_id_of(bytes([100 + number]) * 32) for number in range(30)]
    answers = [await three.told(three.relay, QUIC.format(5), peer) for peer in ids]
    assert answers == [None] * OF_PLACE + [full] * (30 - OF_PLACE)
    assert await three.told(three.relay, "/ip4/9.9.9.9/udp/4001/quic-v1") is None, "another place"
    await asyncio.sleep(PLACE_S)
    assert await three.told(three.relay, QUIC.format(5), ids[0]) is None


def test_one_place_leaves_most_of_an_hours_dials_to_others() -> None:
    dials, address = _InVain(), parse(QUIC.format(5))
    made = [dials.begin(address, 60.0 * minute) for minute in range(60)]
    assert len([dial for dial in made if dial]) == OF_PLACE_AN_HOUR
    assert dials.begin(parse("/ip4/9.9.9.9/udp/4001/quic-v1"), 3599.0)


@among_three
async def test_peers_of_one_place_that_let_nothing_in_are_dialled_few_times(three: Three) -> None:
    three.at[three.a.peer_id].lets_in = False
    for _ in range(3 * OF_PLACE):
        three.punching[three.a.peer_id]._not_before.clear()  # as if each had another id
        await three.connect()
    assert len(three.dialled(three.a)) == OF_PLACE


@among_three
async def test_many_places_have_few_dialled_in_vain(three: Three) -> None:
    three.at[three.b.peer_id].lets_in = False
    taken = 0
    for number in range(3 * AN_HOUR):
        taken += await three.told(three.relay, f"/ip4/9.{number}.9.9/udp/4001/quic-v1") is None
        await asyncio.sleep(WITHIN_S)
    assert taken == AN_HOUR


@among_three
async def test_dials_that_reach_somebody_are_not_counted(three: Three) -> None:
    for _ in range(3 * AN_HOUR):
        assert await three.told(three.relay, QUIC.format(5)) is None
        await asyncio.sleep(1.0)


@among_three
async def test_few_are_dialled_at_the_same_time(three: Three) -> None:
    three.at[three.b.peer_id].lets_in = False
    hosts = [f"/ip4/9.{number}.9.9/udp/4001/quic-v1" for number in range(MOST_DIALS)]
    assert [await three.told(three.relay, host) for host in hosts] == [None] * MOST_DIALS
    assert await three.told(three.relay, QUIC.format(0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.sleep(WITHIN_S)
    assert await three.told(three.relay, QUIC.format(0)) is None


@among_three
async def test_one_place_cannot_keep_a_relay_busy(three: Three) -> None:
    async def hangs(_: str) -> None:
        await asyncio.Event().wait()

    three.at[three.relay.peer_id].find_connected = hangs  # type: ignore[method-assign]
    ask = HolePunchingStub(three.a.channel(three.relay.peer_id)).Arrange
    about = pb.ArrangeRequest(peer=three.b.peer_id)
    waiting = [asyncio.create_task(failure_of(ask(about, timeout=5.0))) for _ in range(ARRANGED_OF_PLACE)]
    await asyncio.sleep(1.0)
    assert await failure_of(ask(about, timeout=5.0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert set(await asyncio.gather(*waiting)) == {grpc.StatusCode.DEADLINE_EXCEEDED}
