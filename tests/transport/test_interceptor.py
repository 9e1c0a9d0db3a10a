"""What the caller receives, and what is logged, when a servicer fails, over real gRPC."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import raw_http2 as http2
from hypothesis import given
from hypothesis import strategies as st
from raw_http2 import frame

from noloco_node.errors import PeerLost
from noloco_node.transport import base, interceptor
from noloco_node.transport.grpc_bridge import open_channel
from noloco_node.transport.interceptor import Admit, Interceptor
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire import peer_pb2, varint

DEADLINE_S = 60.0
REFUSALS = 5


def raw_call(stream: int, **more: str) -> bytes:
    call = {**http2.REQUEST, ":path": "/test.Service/Call", **http2.GRPC, **more}
    return http2.headers(stream, http2.fields(call.items())) + frame(http2.DATA, 1, stream, bytes(5))


UNREAD = (
    http2.PREFACE
    + frame(4, 0, 0, (4).to_bytes(2, "big") + (2**31 - 1).to_bytes(4, "big"))
    + frame(8, 0, 0, (2**31 - 1 - 65535).to_bytes(4, "big"))
    + raw_call(1)
    + b"".join(raw_call(3 + 2 * number, kind="refuse") for number in range(REFUSALS))
)
"""One call, whose answer fills all that lies between, and some more; nothing is read."""


async def anybody(context: Any) -> None:
    pass


async def same(request: bytes, context: Any) -> bytes:
    return request


@asynccontextmanager
async def served(behaviour: Any, admit: Admit = anybody, reads: Any = None) -> AsyncIterator[str]:
    """A server on loopback with one method."""
    server = grpc.aio.server(interceptors=[Interceptor(admit)])
    methods = {"Call": grpc.unary_unary_rpc_method_handler(behaviour, reads)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def call(address: str, timeout_s: float) -> grpc.StatusCode:
    """From a thread, because the loop of the server is blocked."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failed:
        grpc.channel_ready_future(channel).result(DEADLINE_S)  # what it takes to connect is not the call's time
        channel.unary_unary("/test.Service/Call")(b"", timeout=timeout_s)
    code = failed.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


@pytest.mark.parametrize("kind", [RuntimeError, grpc.aio.InternalError])
async def test_of_a_bug_only_a_code_is_sent(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise kind("a secret")

    async with served(fail) as address:
        assert await asyncio.to_thread(call, address, DEADLINE_S) == grpc.StatusCode.INTERNAL
    ours = [record for record in caplog.records if record.name.startswith("noloco_node")]  # asyncio's are gRPC's own
    assert [record.message for record in ours if record.levelno >= logging.ERROR] == ["a servicer failed"]


async def test_a_caller_that_has_gone_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody could fill the log with tracebacks: who hangs up right behind its request is not known as a caller any
    more when the servicer begins."""

    async def fail(request: bytes, context: Any) -> bytes:
        raise PeerLost("connection_lost")

    async with served(fail) as address:
        assert await asyncio.to_thread(call, address, DEADLINE_S) == grpc.StatusCode.UNAVAILABLE
    assert not [record for record in caplog.records if record.name.startswith("noloco_node")]


async def test_a_request_that_does_not_come_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc would wait for it for ever, and each such call takes one of the places for calls."""
    monkeypatch.setattr(interceptor, "REQUEST_S", 0.2)
    async with served(same) as address, grpc.aio.insecure_channel(address) as channel:
        silent = channel.stream_unary("/test.Service/Call")(timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await silent
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert failed.value.details() == "", "it is the server that ended it"
        monkeypatch.setattr(interceptor, "REQUEST_S", DEADLINE_S)
        assert await channel.unary_unary("/test.Service/Call")(b"?", timeout=DEADLINE_S) == b"?"


async def test_a_reply_that_nobody_reads_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger than what may be under way, so it would stay in memory, and the call would keep its place."""
    monkeypatch.setattr(base, "TAKEN_S", 0.5)
    calls: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()

    async def answer(request: bytes, context: Any) -> bytes:
        calls.put_nowait(asyncio.current_task())
        return bytes(32 << 20)

    async with served(answer) as address, grpc.aio.insecure_channel(address) as channel:
        silent = channel.unary_stream("/test.Service/Call")(b"?", timeout=DEADLINE_S)
        await silent.wait_for_connection()
        assert (call := await calls.get()) is not None
        assert (await asyncio.wait({call}, timeout=DEADLINE_S / 2))[0]
        silent.cancel()


async def test_a_caller_is_refused_before_its_request_is_read() -> None:
    async def nobody(context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")

    async with served(same, nobody) as address, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.stream_unary("/test.Service/Call")(timeout=DEADLINE_S)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unknown_method_is_counted_and_refused_like_a_known_one() -> None:
    admitted = 0

    async def admit(context: Any) -> None:
        nonlocal admitted
        admitted += 1
        if admitted > 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")

    async with served(same, admit) as address, grpc.aio.insecure_channel(address) as channel:
        for code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary("/no.Such/Method")(b"?", timeout=DEADLINE_S)
            assert failed.value.code() is code
    assert admitted == 2


async def test_a_refusal_that_nobody_reads_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer fills the connection of a caller that reads nothing; what refuses its other calls stays behind it."""
    monkeypatch.setattr(interceptor, "REFUSED_S", 0.3)
    refused: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
    answering: list[asyncio.Task[Any] | None] = []

    async def admit(context: Any) -> None:
        if "kind" in dict(context.invocation_metadata()):
            refused.put_nowait(asyncio.current_task())
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "x" * (1 << 20))

    async def answer(request: bytes, context: Any) -> bytes:
        answering.append(asyncio.current_task())
        return bytes(32 << 20)

    async with served(answer, admit) as address:
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as line:
            line.sendall(UNREAD)
            calls = [await asyncio.wait_for(refused.get(), DEADLINE_S) for _ in range(REFUSALS)]
            assert (await asyncio.wait([call for call in calls if call], timeout=DEADLINE_S))[1] == set()
        await asyncio.wait([call for call in answering if call], timeout=DEADLINE_S)


async def test_bytes_that_are_no_message_are_one_without_fields(caplog: pytest.LogCaptureFixture) -> None:
    """In a request and in an answer: no traceback, and no None for the caller."""

    async def answer(request: pb.WhenceRequest, context: Any) -> bytes:
        assert request == pb.WhenceRequest()
        return b"\xff\xff\xff"

    async with served(answer, reads=pb.WhenceRequest.FromString) as address, open_channel(address) as channel:
        call = channel.unary_unary("/test.Service/Call", response_deserializer=pb.WhenceReply.FromString)
        assert await call(b"\xff\xff\xff", timeout=DEADLINE_S) == pb.WhenceReply()
    assert not caplog.records


async def test_a_refusal_of_a_call_that_was_cancelled_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    """As in a node that was frozen: its callers have cancelled when it wakes."""
    began, over = asyncio.Event(), asyncio.Event()

    async def refuse_late(request: bytes, context: Any) -> None:
        began.set()
        time.sleep(1.0)  # noqa: ASYNC251 - the whole loop stands still
        try:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        finally:
            over.set()

    async with served(refuse_late) as address:
        async with asyncio.timeout(DEADLINE_S):
            code = None
            # again, where the machine stood still: the call did not come here, or was refused in time
            while not began.is_set() or code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                began.clear()
                code = await asyncio.to_thread(call, address, 0.3)
            await over.wait()
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@given(st.binary(max_size=200))
def test_fields_are_counted_in_any_bytes(data: bytes) -> None:
    assert varint.has_few_fields(data, 8) <= varint.has_few_fields(data)


def test_a_message_of_very_many_fields_is_read_as_one_without_any() -> None:
    """An answer of 8 MB with four million empty runs took 400 MB; compressed it is 8 kB to send."""
    read = base.lenient(peer_pb2.RunsReply.FromString)
    assert read is not None
    runs = [peer_pb2.SignedManifest(manifest=b"{}" * 2000)] * 64
    honest = peer_pb2.RunsReply(runs=runs, training=range(64))
    assert read(honest.SerializeToString()) == honest
    assert read(b"\x0a\x00" * 100_000) == peer_pb2.RunsReply()
