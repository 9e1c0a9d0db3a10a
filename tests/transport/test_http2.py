"""What a peer that is no gRPC may send inside a stream, and what gRPC must not be given of it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import raw_http2 as http2
from transport_peers import until

from noloco_node.base.identity import peer_id_of
from noloco_node.transport.grpc_bridge import BUFFER_BYTES, SERVER_OPTIONS, FarEnd, Inbound, Outbound, Streams
from noloco_node.transport.interceptor import Interceptor

STEP_S = 60.0
CALL = http2.fields([*http2.REQUEST.items(), (":path", "/test.Service/Call"), *http2.GRPC.items()])
FIELDS = 100_000
BOMB = http2.fields([("a", "")]) * FIELDS
ONE_FRAME = http2.fields([("a", "")]) * 4000
"""As many as fit into one."""
SETTINGS, ACK = http2.frame(http2.SETTINGS, 0, 0), http2.frame(http2.SETTINGS, http2.ACK, 0)
ONE_MESSAGE = http2.frame(http2.DATA, 0, 1, bytes(5))
OK = http2.headers(1, http2.fields([("grpc-status", "0")]), http2.END_OF_STREAM)


class Served:
    """A real server behind the bridge; `met`: how many fields the headers of each call had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.met: list[int] = []

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[Interceptor(self._admit)])
        self._inbound = Inbound(self._server.add_insecure_port("127.0.0.1:0"), self._read_caller)
        await self._server.start()
        await self._inbound.listen(self.path)

    async def close(self) -> None:
        await self._inbound.close()
        await self._server.stop(0)

    async def _admit(self, context: Any) -> None:
        self.met.append(len(context.invocation_metadata()))

    async def _read_caller(self, reader: asyncio.StreamReader) -> FarEnd:
        return FarEnd(peer_id_of(bytes(32)), "127.0.0.1")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path / "streams")
    await served.start()
    yield served
    async with asyncio.timeout(STEP_S):
        await served.close()


async def ended(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(STEP_S):
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


async def test_a_caller_without_an_end_to_its_headers_is_not_read(served: Served) -> None:
    """It had not acknowledged gRPC's settings, so gRPC took half a million fields, 110 MB, for each call."""
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(http2.PREFACE + SETTINGS + http2.headers(1, CALL + BOMB))
    await ended(reader)
    assert not served.met
    writer.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_who_acknowledges_is_read_in_whichever_pieces_it_comes(served: Served, size: int) -> None:
    _, writer = await asyncio.open_unix_connection(served.path)
    said = http2.PREFACE + SETTINGS + ACK + http2.headers(1, CALL)
    async with asyncio.timeout(STEP_S):
        for at in range(0, len(said), size):
            writer.write(said[at : at + size])
            await asyncio.sleep(0)
        await until(lambda: len(served.met) == 1)
        writer.write(http2.headers(3, CALL + ONE_FRAME))
        await until(lambda: len(served.met) == 2)
    assert served.met[1] < FIELDS / 100, "gRPC's own limit holds"
    writer.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_headers_that_go_on_in_another_frame_are_not_read(served: Served, size: int) -> None:
    """gRPC read on for ever: one such stream took a core, and 500 MB in 5 s."""
    reader, writer = await asyncio.open_unix_connection(served.path)
    said = http2.PREFACE + SETTINGS + ACK + http2.headers(1, CALL) + http2.frame(http2.DATA, 0, 1, bytes(9000))
    said += http2.headers(3, CALL + BOMB[:20_000])
    for at in range(0, len(said), size):
        if not reader.at_eof():
            writer.write(said[at : at + size])
            await asyncio.sleep(0)
    await ended(reader)
    writer.close()


async def test_who_sends_much_and_acknowledges_nothing_is_not_read_for_long(served: Served) -> None:
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(http2.PREFACE + SETTINGS * 1000)
    await ended(reader)
    writer.close()


async def test_pings_are_answered_and_end_no_connection(served: Served) -> None:
    """gRPC closed it; where the caller read nothing, it did not come to that, and each further ping took longer."""
    pings = 1000
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(http2.PREFACE + SETTINGS + ACK + http2.frame(http2.PING, 0, 0, b"12345678") * pings)
    said = b""
    async with asyncio.timeout(STEP_S):
        while said.count(b"12345678") < pings:
            more = await reader.read(1 << 16)
            assert more, "the connection ended"
            said += more
        writer.write(http2.headers(1, CALL))
        await until(lambda: bool(served.met))
    writer.close()


async def test_who_sends_many_frames_of_nothing_is_not_read_for_long(served: Served) -> None:
    """15 MB/s of them took a core."""
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(http2.PREFACE + SETTINGS + ACK + http2.frame(0xFA, 0, 0) * 5000)
    await ended(reader)
    writer.close()
    another, writer = await asyncio.open_unix_connection(served.path)
    large = http2.frame(0xFA, 0, 0, bytes(1 << 10))
    writer.write(http2.PREFACE + SETTINGS + ACK + large * 5000 + http2.headers(1, CALL))
    await until(lambda: bool(served.met))
    assert not another.at_eof()
    writer.close()


@pytest.mark.parametrize("acknowledges", [False, True])
async def test_a_called_peer_without_an_end_to_its_headers_is_not_read(tmp_path: Path, acknowledges: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SETTINGS + (ACK if acknowledges else b""))
        await reader.readuntil(b"/test.Service/Call")
        block = http2.fields([(":status", "200"), *http2.GRPC.items()])
        writer.write(http2.headers(1, block if acknowledges else block + BOMB) + ONE_MESSAGE + OK)
        ends.append(writer)

    async def dial(peer: str) -> Streams:
        return await asyncio.open_unix_connection(tmp_path / "peer", limit=BUFFER_BYTES)

    ends: list[asyncio.StreamWriter] = []
    peer = await asyncio.start_unix_server(answer, tmp_path / "peer")
    (tmp_path / "channels").mkdir()
    outbound = Outbound(tmp_path / "channels", dial)
    call = outbound.channel("peer").unary_unary("/test.Service/Call")(b"", timeout=STEP_S)
    if acknowledges:
        assert await call == b""
    else:
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert len(await call.initial_metadata() or ()) < FIELDS / 100
    await outbound.close()
    for writer in ends:
        writer.close()
    peer.close()


async def test_a_called_peer_does_not_learn_where_this_machine_keeps_its_files(tmp_path: Path) -> None:
    """A call names the host that it is for, which for gRPC is the path of the unix socket."""

    async def dial(peer: str) -> Streams:
        near, far = socket.socketpair()
        ends.append(await asyncio.open_unix_connection(sock=far, limit=BUFFER_BYTES))
        ends[0][1].write(SETTINGS + ACK)
        return await asyncio.open_unix_connection(sock=near, limit=BUFFER_BYTES)

    ends: list[Streams] = []
    outbound = Outbound(tmp_path, dial)
    call = outbound.channel("peer").unary_unary("/test.Service/Call")(b"", timeout=STEP_S)
    async with asyncio.timeout(STEP_S):
        await until(lambda: bool(ends))
        said = await ends[0][0].readuntil(b"content-type")
    assert b":authority" in said and tmp_path.name.encode() not in said
    call.cancel()
    await outbound.close()
    ends[0][1].close()
