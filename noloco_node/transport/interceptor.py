"""Around every method of every servicer: refuses unknown callers, limits how long a request may take to come, and
keeps the text of a bug on this machine.

This is done here once, so that no servicer can forget it. How a caller is proved is not known here: `admit` does it,
before a byte of the request is read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from noloco_node.errors import PeerLost
from noloco_node.transport.base import lenient, taken, taken_to_the_end

REQUEST_S = 40.0
"""For a whole request: the largest one takes 33 s at the slowest rate that a volunteer can set (host/limits.py). The
messages of a swap have deadlines of their own."""

REFUSED_S = 10.0
"""How long a caller may take to read that its call is refused."""

Context = Any  # grpc.aio.ServicerContext, or that of tests/helpers/memory_network
Handler = Any  # grpc.RpcMethodHandler, whose attributes the type stubs do not know
Admit = Callable[[Context], Awaitable[None]]

_log = logging.getLogger(__name__)


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes no arguments at run time
    """Puts `guarded` around every method of a grpc.aio server."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        return guarded(await continuation(details) or _UNKNOWN, self._admit)


def guarded(handler: Handler, admit: Admit) -> Handler:
    """The same method after `admit`, which aborts the calls of unknown callers."""

    async def answer(requests: AsyncIterator[Any], given: Context) -> Any:
        context = _Context(given)
        async with contained(context):
            await admit(context)
            reply = await handler.unary_unary(await _only(requests, context), context)
        taken_to_the_end(asyncio.current_task())  # it goes on until the caller has read the reply
        return reply

    async def stream(requests: AsyncIterator[Any], given: Context) -> AsyncIterator[Any]:
        context = _Context(given)
        async with contained(context):
            await admit(context)
            if handler.stream_stream:
                behaviour = handler.stream_stream(requests, context)
            else:
                behaviour = handler.unary_stream(await _only(requests, context), context)
            async with aclosing(behaviour) as replies:
                async for reply in replies:
                    yield reply

    codecs = lenient(handler.request_deserializer), handler.response_serializer
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)
    return grpc.stream_unary_rpc_method_handler(answer, *codecs)


class _Context:
    """grpc's own, but that an abort waits for nobody: one that cannot be sent, as the caller reads nothing, held the
    call's place for ever."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, *status: Any) -> None:
        with taken(REFUSED_S):
            await self._context.abort(*status)


async def _unknown(request: bytes, context: Context) -> None:
    raise NotImplementedError


_UNKNOWN: Handler = grpc.unary_unary_rpc_method_handler(_unknown)
"""A method that no servicer has: its calls are counted and refused as all others, which grpc itself would not do."""


async def _only(requests: AsyncIterator[Any], context: Context) -> Any:
    """The one request of a call. For a method that takes one, grpc itself would read it first and wait for ever."""
    try:
        async with asyncio.timeout(REQUEST_S):
            return await anext(aiter(requests))
    except (TimeoutError, StopAsyncIteration):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")


@asynccontextmanager
async def contained(context: Context) -> AsyncIterator[None]:
    """Send the caller only a status code: grpc would send the text of the exception."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except NotImplementedError:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
    except PeerLost:  # as who hangs up right behind its request: its connection is gone before its call is
        await context.abort(grpc.StatusCode.UNAVAILABLE, "")
    except Exception as error:  # a bug in a servicer ends one call, not the node
        if _hung_up(error):
            raise
        _log.exception("a servicer failed")
        await context.abort(grpc.StatusCode.INTERNAL, "")


def _hung_up(error: Exception) -> bool:
    """Whether the caller has gone: a subclass of InternalError without a public name, which `abort` itself raises, and
    which grpc does not report further."""
    return isinstance(error, grpc.aio.InternalError) and type(error) is not grpc.aio.InternalError
