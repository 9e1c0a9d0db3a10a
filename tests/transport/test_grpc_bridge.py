"""Who is carried when more streams come in than the bridge may carry."""

import asyncio
import gc
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from patience import PATIENCE
from transport_peers import until

from noloco_node.base.identity import Identity
from noloco_node.transport import grpc_bridge
from noloco_node.transport.grpc_bridge import FarEnd, Inbound, Streams

STEP_S = 60.0
ON_ONE_HOST, ELSEWHERE = "8.8.8.8", "192.0.2.1"


def new_peer() -> str:
    return Identity(Ed25519PrivateKey.generate(), Path("nowhere")).peer_id


class Bridge:
    """An `Inbound` before a server that answers each byte; a caller names itself in the first line."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "streams"
        self.open: list[Streams] = []
        self.partners: set[str] = set()

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.inbound = Inbound(port, self._read_caller, self.partners.__contains__)
        await self.inbound.listen(self.path)

    async def close(self) -> None:
        for _, writer in self.open:
            writer.transport.abort()
        await self.inbound.close()
        self.server.close()

    async def call(self, peer: str, host: str) -> Streams:
        reader, writer = await asyncio.open_unix_connection(self.path)
        self.open.append((reader, writer))
        writer.write(f"{peer} {host}\n?".encode())
        return reader, writer

    async def is_carried(self, stream: Streams) -> bool:
        async with asyncio.timeout(STEP_S):
            return await stream[0].read(1) == b"!"

    async def flood(self, identities: int, connections: int, host: str) -> None:
        for peer in [new_peer() for _ in range(identities)]:
            streams = [await self.call(peer, host) for _ in range(connections)]
            for stream in streams:
                await self.is_carried(stream)

    def begin_calls(self) -> None:
        for name in self.inbound._carried:
            self.inbound.answering(name)

    async def _read_caller(self, reader: asyncio.StreamReader) -> FarEnd:
        peer, host = (await reader.readline()).decode().split()
        return FarEnd(peer, host)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(b"!")
        writer.close()


@pytest.fixture
async def bridge(tmp_path: Path) -> AsyncIterator[Bridge]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    bridge = Bridge(tmp_path)
    await bridge.start()
    yield bridge
    async with asyncio.timeout(STEP_S):
        await bridge.close()


@pytest.mark.parametrize("host", [ON_ONE_HOST, "127.0.0.1"])
@pytest.mark.parametrize("calling", [False, True])
async def test_33_identities_with_4_connections_each_keep_no_newcomer_out(
    bridge: Bridge, host: str, calling: bool
) -> None:
    partner = await bridge.call(new_peer(), "127.0.0.1")
    assert await bridge.is_carried(partner)
    bridge.begin_calls()
    await bridge.flood(33, 4, host)
    if calling:
        bridge.begin_calls()
    began = time.monotonic()
    assert await bridge.is_carried(await bridge.call(new_peer(), "127.0.0.1"))
    assert time.monotonic() - began < 5.0 * PATIENCE
    partner[1].write(b"?")
    assert await bridge.is_carried(partner), "a call under way goes on"
    assert len(bridge.inbound._carried) <= grpc_bridge._MAX_INBOUND


async def test_one_place_with_many_identities_that_call_leaves_room_for_another_place(bridge: Bridge) -> None:
    await bridge.flood(grpc_bridge._MAX_INBOUND, 1, ON_ONE_HOST)
    bridge.begin_calls()
    newcomers = [await bridge.call(new_peer(), ELSEWHERE) for _ in range(3)]
    for _ in range(2):  # they keep each other's connections, which have no calls yet
        assert [await bridge.is_carried(newcomer) for newcomer in newcomers] == [True] * 3
        for newcomer in newcomers:
            newcomer[1].write(b"?")
    assert not await bridge.is_carried(await bridge.call(new_peer(), ON_ONE_HOST)), "it has its share"


async def test_who_calls_nobody_makes_room(bridge: Bridge) -> None:
    await bridge.flood(grpc_bridge._MAX_INBOUND, 1, "127.0.0.1")
    assert await bridge.is_carried(await bridge.call(new_peer(), "127.0.0.1"))
    assert len(bridge.inbound._carried) <= grpc_bridge._MAX_INBOUND


async def test_a_peer_has_few_connections_and_a_stranger_two(bridge: Bridge) -> None:
    stranger, partner = new_peer(), new_peer()
    bridge.partners.add(partner)
    for peer, most in ((stranger, 2), (partner, 4)):
        carried = [await bridge.is_carried(await bridge.call(peer, ELSEWHERE)) for _ in range(6)]
        assert carried == [True] * most + [False] * (6 - most)


async def test_who_is_shut_out_has_no_stream_for_a_minute(bridge: Bridge) -> None:
    flooding, other = new_peer(), new_peer()
    there = [await bridge.call(peer, ELSEWHERE) for peer in (flooding, other)]
    assert [await bridge.is_carried(stream) for stream in there] == [True, True]
    bridge.inbound.shut_out(flooding)
    there[1][1].write(b"?")
    assert [await bridge.is_carried(stream) for stream in there] == [False, True]
    assert not await bridge.is_carried(await bridge.call(flooding, ELSEWHERE))
    bridge.inbound._shut_out[flooding] = asyncio.get_running_loop().time()
    assert await bridge.is_carried(await bridge.call(flooding, ELSEWHERE))


async def test_strangers_of_as_many_places_as_there_are_connections_leave_room_for_partners(bridge: Bridge) -> None:
    for number in range(grpc_bridge._MAX_INBOUND):
        await bridge.is_carried(await bridge.call(new_peer(), f"8.{number}.8.8"))
        bridge.begin_calls()
    partners = [new_peer() for _ in range(grpc_bridge._FOR_PARTNERS)]
    bridge.partners.update(partners)
    streams = [await bridge.call(partner, ELSEWHERE) for partner in partners]
    for _ in range(2):
        assert all([await bridge.is_carried(stream) for stream in streams])
        bridge.begin_calls()
        assert not await bridge.is_carried(await bridge.call(new_peer(), "9.9.9.9"))
        for stream in streams:
            stream[1].write(b"?")


async def no_way(peer: str) -> grpc_bridge.Streams:
    raise OSError(f"no way to {peer}")


def sockets(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def test_the_last_bytes_of_a_server_that_closes_reach_a_slow_caller(tmp_path: Path) -> None:
    size = 2 * grpc_bridge.BUFFER_BYTES + 30_000  # more than the sockets hold, and little enough to wait in the bridge

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(size))
        writer.close()

    async def read_caller(reader: asyncio.StreamReader) -> FarEnd:
        return FarEnd(new_peer(), ELSEWHERE)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    inbound = Inbound(server.sockets[0].getsockname()[1], read_caller)
    await inbound.listen(tmp_path / "streams")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "streams", limit=1 << 14)
    async with asyncio.timeout(STEP_S):
        await reader.readexactly(1)
        await until(lambda: not inbound._tasks)  # the server has closed, and the bridge is done
        assert len(await reader.read()) == size - 1
    writer.close()
    await inbound.close()
    server.close()


async def test_channels_that_nobody_has_wanted_for_long_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an hour of joins and hostile identities a node had kept one for each peer that it had ever called."""

    outbound = grpc_bridge.Outbound(tmp_path, no_way)
    for number in range(20):
        outbound.channel(f"peer {number}")
    assert sockets(tmp_path) == len(outbound._outlets) == 20
    monkeypatch.setattr(grpc_bridge, "_KEPT_S", -1.0)
    outbound.channel("another")
    assert list(outbound._outlets) == ["another"]
    await outbound.close()
    assert sockets(tmp_path) == 0


async def test_a_channel_to_a_peer_that_is_not_there_is_closed_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node calls some absent peers of its cache three times a minute, which kept a socket for each of them open."""

    outbound = grpc_bridge.Outbound(tmp_path, no_way)
    absent, unused = outbound.channel("absent"), outbound.channel("unused")
    with pytest.raises(grpc.aio.AioRpcError):
        await absent.unary_unary("/a/call")(b"")
    monkeypatch.setattr(grpc_bridge, "_KEPT_UNREACHED_S", -1.0)
    outbound.channel("another")
    assert list(outbound._outlets) == ["unused", "another"] and unused is outbound.channel("unused")
    await outbound.close()


async def test_a_channel_that_was_just_closed_may_be_wanted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several absent peers of the cache are called at the same time."""
    outbound = grpc_bridge.Outbound(tmp_path, no_way)
    for peer in ("one", "other"):
        outbound.channel(peer)
    await until(lambda: all(outlet.server.done() for outlet in outbound._outlets.values()))
    monkeypatch.setattr(grpc_bridge, "_KEPT_S", -1.0)
    outbound.channel("one")  # closes the other one, whose channel takes a moment to end
    monkeypatch.setattr(grpc_bridge, "_KEPT_S", 120.0)
    outbound.channel("other")
    await until(lambda: all(outlet.server.done() for outlet in outbound._outlets.values()))
    assert sockets(tmp_path) == len(outbound._outlets) == 2
    await outbound.close()
    assert sockets(tmp_path) == 0


async def test_a_channel_that_is_closed_as_its_connection_is_accepted_leaves_no_socket_open(tmp_path: Path) -> None:
    """asyncio forgets a connection that a server has accepted but not begun to serve when it closes."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def called(turns: int) -> None:
        outbound = grpc_bridge.Outbound(tmp_path, no_way)
        call = asyncio.ensure_future(outbound.channel("peer").unary_unary("/a/call")(b""))
        for _ in range(turns):
            await asyncio.sleep(0)
        await outbound.close()
        await asyncio.gather(call, return_exceptions=True)

    another = grpc_bridge.open_channel("unix:/nowhere")  # what gRPC opens once is open
    gc.collect()
    gc.disable()
    try:
        before = open_files()
        for turns in [*range(8)] * 4:
            await called(turns)
        await until(lambda: open_files() == before)
    finally:
        gc.enable()
    await another.close()


async def test_that_grpc_goes_on_trying_keeps_no_channel_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so without a call, every few seconds: with as many absent peers in its cache as it had channels, a node
    closed none of them."""
    tried = 0

    async def dial(peer: str) -> grpc_bridge.Streams:
        nonlocal tried
        tried += 1
        raise ConnectionError

    outbound = grpc_bridge.Outbound(tmp_path, dial)
    known = outbound.channel("known")
    with pytest.raises(grpc.aio.AioRpcError):
        await outbound.channel("absent").unary_unary("/a/call")(b"")
    called_at = outbound._outlets["absent"].used_at
    async with asyncio.timeout(STEP_S):
        while tried < 3 or outbound._outlets["absent"].connections:  # noqa: ASYNC110 - grpc does not say when it tries
            await asyncio.sleep(0.05)
    assert outbound._outlets["absent"].used_at == called_at
    monkeypatch.setattr(grpc_bridge, "_KEPT_UNREACHED_S", 0.0)
    assert outbound.channel("known") is known
    assert list(outbound._outlets) == ["known"], "also where no new channel is made"
    await outbound.close()
    assert sockets(tmp_path) == 0
