"""What the caller receives, and what is logged, when a servicer fails, over real gRPC."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from noloco_node.transport.interceptor import Interceptor

DEADLINE_S = 20.0


@asynccontextmanager
async def served(behaviour: Any) -> AsyncIterator[str]:
    """A server on loopback with one method, open to every caller."""

    async def anybody(context: Any) -> None:
        pass

    server = grpc.aio.server(interceptors=[Interceptor(anybody)])
    methods = {"Call": grpc.unary_unary_rpc_method_handler(behaviour)}
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
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["a servicer failed"]


async def test_a_refusal_of_a_call_that_was_cancelled_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    """As in a node that was frozen: its callers have cancelled when it wakes."""
    over = asyncio.Event()

    async def refuse_late(request: bytes, context: Any) -> None:
        time.sleep(1.0)  # noqa: ASYNC251 - the whole loop stands still
        try:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        finally:
            over.set()

    async with served(refuse_late) as address:
        assert await asyncio.to_thread(call, address, 0.3) == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(DEADLINE_S):
            await over.wait()
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
