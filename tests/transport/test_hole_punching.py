"""Who may have whom dialled, and when it is tried again. tests/system/faults/test_nat.py does it through routers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import grpc
import pytest
from memory_network.network import MemoryNetwork, MemoryTransport
from transport_peers import failure_of
from virtual_clock import run_virtual

from noloco_node.base.addresses import Address, parse
from noloco_node.base.identity import peer_id_of
from noloco_node.transport.grpc_bridge import FarEnd
from noloco_node.transport.hole_punching import AGAIN_S, DIAL_S, MOST_DIALS, MOST_OF_PLACE, HolePunching
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import HolePunchingStub, add_HolePunchingServicer_to_server

QUIC = "/ip4/203.0.113.{}/udp/4001/quic-v1"
HOME = parse("/ip4/192.168.1.2/tcp/4001")


class Control:
    """A p2pd whose routers let dials in or not."""

    def __init__(self) -> None:
        self.connections: dict[str, FarEnd] = {}
        self.dialled: list[tuple[str, list[str]]] = []
        self.closed: list[str] = []
        self.lets_in = True
        self.takes_s = 0.0
        """A dial at a relay's word."""

    async def find_connected(self, peer: str) -> FarEnd | None:
        return self.connections.get(peer)

    async def connect(self, peer: str, addresses: Sequence[Address], within_s: int) -> None:
        self.dialled.append((peer, list(map(str, addresses))))
        if not self.lets_in:
            await asyncio.sleep(within_s)
            raise ConnectionError("failed to dial")

    async def try_connect(self, peer: str, addresses: Sequence[Address]) -> bool:
        self.dialled.append((peer, list(map(str, addresses))))
        await asyncio.sleep(self.takes_s)
        return False

    async def disconnect(self, peer: str) -> None:
        self.closed.append(peer)
        del self.connections[peer]


class Three:
    """Two nodes behind routers and their relay, which sees both over QUIC."""

    def __init__(self) -> None:
        network = MemoryNetwork(Random(1))
        self.a, self.b, self.relay = (network.join(peer_id_of(bytes([number]) * 32)) for number in range(3))
        members = self.a, self.b, self.relay
        at = {member.peer_id: QUIC.format(number) for number, member in enumerate(members)}
        self.ends = {peer: FarEnd(peer, parse(text).host, quic=parse(text)) for peer, text in at.items()}
        self.controls = {member.peer_id: Control() for member in members}
        self.controls[self.relay.peer_id].connections = self.ends
        self.punching = {member.peer_id: self._serve(member) for member in members}
        self.at_relay = Address("ip4", "203.0.113.2", 4001, self.b.peer_id, self.relay.peer_id)

    def _serve(self, member: MemoryTransport) -> HolePunching:
        punching = HolePunching(
            [self.relay.peer_id],
            member.channel,
            lambda context: self.ends[member.caller(context)],
            lambda: self.controls[member.peer_id],  # type: ignore[arg-type, return-value]
        )
        member.serve(lambda server: add_HolePunchingServicer_to_server(punching, server))
        return punching

    async def connect(self, idle: bool = True) -> None:
        """From a to b."""
        punching = self.punching[self.a.peer_id]
        await punching.connect(self.b.peer_id, self.at_relay, [HOME], idle=idle)

    def dialled(self, who: MemoryTransport) -> list[tuple[str, list[str]]]:
        """Without the relay."""
        return [dial for dial in self.controls[who.peer_id].dialled if dial[0] != self.relay.peer_id]


def among_three(test: Callable[[Three], Awaitable[None]]) -> None:
    async def main() -> None:
        three = Three()
        members = three.a, three.b, three.relay
        for member in members:
            await member.start()
        try:
            await test(three)
        finally:
            for punching in three.punching.values():
                punching.close()
            for member in members:
                await member.close()

    run_virtual(main())


def test_both_dial_where_the_relay_sees_the_other() -> None:
    async def test(three: Three) -> None:
        await three.connect()
        assert three.dialled(three.a) == [(three.b.peer_id, [str(HOME), QUIC.format(1)])]
        assert three.dialled(three.b) == [(three.a.peer_id, [QUIC.format(0)])]
        relay = three.controls[three.a.peer_id].dialled[0]
        assert relay == (three.relay.peer_id, ["/ip4/203.0.113.2/tcp/4001", QUIC.format(2)])

    among_three(test)


def test_routers_that_let_nothing_in_are_tried_again_later() -> None:
    async def test(three: Three) -> None:
        three.controls[three.a.peer_id].lets_in = False
        began = asyncio.get_running_loop().time()
        await three.connect()
        assert asyncio.get_running_loop().time() - began == pytest.approx(DIAL_S, abs=0.5)
        await three.connect()
        assert len(three.dialled(three.a)) == 1
        await asyncio.sleep(AGAIN_S)
        await three.connect()
        assert len(three.dialled(three.a)) == 2

    among_three(test)


@pytest.mark.parametrize("idle", [True, False])
def test_a_relayed_connection_is_closed_for_it_unless_it_is_in_use(idle: bool) -> None:
    async def test(three: Three) -> None:
        control = three.controls[three.a.peer_id]
        control.connections[three.b.peer_id] = FarEnd(three.b.peer_id, "203.0.113.2", three.relay.peer_id)
        await three.connect(idle)
        assert control.closed == ([three.b.peer_id] if idle else [])
        assert bool(three.dialled(three.a)) is idle

    among_three(test)


def test_a_direct_connection_is_left_as_it_is() -> None:
    async def test(three: Three) -> None:
        control = three.controls[three.a.peer_id]
        control.connections[three.b.peer_id] = FarEnd(three.b.peer_id, "192.168.1.2")
        await three.connect()
        assert not control.dialled and not control.closed

    among_three(test)


def test_a_relay_that_does_not_see_both_over_quic_arranges_nothing() -> None:
    async def test(three: Three) -> None:
        for who in (three.a.peer_id, three.b.peer_id):
            seen = three.ends[who]
            for other in (seen._replace(quic=None), seen._replace(quic=None, relay=three.relay.peer_id)):
                three.ends[who] = other
                await three.connect()
                assert not three.dialled(three.a) and not three.dialled(three.b)
            three.ends[who] = seen
        del three.ends[three.b.peer_id]  # it has gone
        await three.connect()
        assert not three.dialled(three.a)

    among_three(test)


@pytest.mark.parametrize(
    "nonsense",
    ["", "here", "/ip4/203.0.113.9/tcp/22", "/dns4/victim.example/udp/53/quic-v1", "/ip4/203.0.113.9/udp/53"],
)
def test_no_other_address_than_one_of_quic_is_dialled_at_a_relays_word(nonsense: str) -> None:
    async def test(three: Three) -> None:
        relay = HolePunchingStub(three.relay.channel(three.b.peer_id))
        told = pb.DialRequest(peer=three.a.peer_id, address=nonsense)
        assert await failure_of(relay.Dial(told, timeout=5.0)) is grpc.StatusCode.INVALID_ARGUMENT
        assert not three.dialled(three.b)

    among_three(test)


def test_a_stranger_has_nobody_dialled() -> None:
    async def test(three: Three) -> None:
        stranger = HolePunchingStub(three.a.channel(three.b.peer_id))
        told = pb.DialRequest(peer=three.a.peer_id, address=QUIC.format(9))
        assert await failure_of(stranger.Dial(told, timeout=5.0)) is grpc.StatusCode.PERMISSION_DENIED
        assert not three.dialled(three.b)

    among_three(test)


def test_a_relay_has_few_dialled_at_a_time() -> None:
    async def test(three: Three) -> None:
        three.controls[three.b.peer_id].takes_s = 5.0
        relay = HolePunchingStub(three.relay.channel(three.b.peer_id))
        told = pb.DialRequest(peer=three.a.peer_id, address=QUIC.format(0))
        for _ in range(MOST_DIALS):
            await relay.Dial(told, timeout=5.0)
        assert await failure_of(relay.Dial(told, timeout=5.0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.sleep(6.0)
        await relay.Dial(told, timeout=5.0)

    among_three(test)


def test_one_place_cannot_keep_a_relay_busy() -> None:
    async def test(three: Three) -> None:
        never = asyncio.Event()

        async def hangs(_: str) -> None:
            await never.wait()

        three.controls[three.relay.peer_id].find_connected = hangs  # type: ignore[method-assign]
        ask = HolePunchingStub(three.a.channel(three.relay.peer_id)).Arrange
        about = pb.ArrangeRequest(peer=three.b.peer_id)
        waiting = [asyncio.create_task(failure_of(ask(about, timeout=5.0))) for _ in range(MOST_OF_PLACE)]
        await asyncio.sleep(1.0)
        assert await failure_of(ask(about, timeout=5.0)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert set(await asyncio.gather(*waiting)) == {grpc.StatusCode.DEADLINE_EXCEEDED}

    among_three(test)
