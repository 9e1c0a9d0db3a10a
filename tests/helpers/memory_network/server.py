"""The server's side of a call over a `MemoryNetwork`: finds the method, runs it, sends its replies and its status.

As grpc.aio does: a handler is cancelled when its caller cancels or dies or its time is up, and what it raises becomes a
status (`transport/interceptor.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import grpc.aio
from memory_network.stream import Status, Stream

from noloco_node.transport.interceptor import Handler, contained
from noloco_node.wire.messages import MAX_MESSAGE_BYTES

PEER_PREFIX = "memory:"


class Services:
    """The part of grpc.aio.Server that `add_…Servicer_to_server` uses: a table of methods."""

    def __init__(self) -> None:
        self._methods: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []

    def add_registered_method_handlers(self, service: str, methods: dict[str, Handler]) -> None:
        self._methods.update({f"/{service}/{name}": handler for name, handler in methods.items()})

    def add_generic_rpc_handlers(self, handlers: "Sequence[grpc.GenericRpcHandler[Any, Any]]") -> None:
        self._generic.extend(handlers)

    def find(self, name: str) -> Handler | None:
        details: Any = _Details(name)
        found = (handler.service(details) for handler in self._generic)
        return self._methods.get(name) or next((handler for handler in found if handler is not None), None)


class _Details(NamedTuple):
    method: str
    invocation_metadata: Sequence[Any] = ()


async def answer(
    handler: Handler | None, context: "MemoryContext", requests: Stream, replies: Stream, done: Callable[[Status], None]
) -> None:
    """Run one call; `done` is called at the caller's end when the status has arrived there."""
    status = Status(grpc.StatusCode.CANCELLED)
    try:
        async with asyncio.timeout(context.timeout_s), contained(context):
            await _run(handler, context, requests, replies)
        status = Status(grpc.StatusCode.OK)
    except grpc.aio.AbortError:
        status = context.aborted
    except TimeoutError:
        status = Status(grpc.StatusCode.DEADLINE_EXCEEDED)  # the caller's own timer says the same
    finally:
        context.finish()
        replies.post(lambda: done(status))


async def _run(handler: Handler | None, context: "MemoryContext", requests: Stream, replies: Stream) -> None:
    if handler is None:
        raise NotImplementedError

    async def read() -> AsyncIterator[Any]:
        while isinstance(request := await requests.receive(), bytes):
            yield handler.request_deserializer(request) if handler.request_deserializer else request

    async def reply(message: Any) -> None:
        data = handler.response_serializer(message) if handler.response_serializer else message
        if len(data) > MAX_MESSAGE_BYTES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        await replies.send(data)

    request = read() if handler.stream_stream else await anext(read())
    if handler.unary_unary:
        await reply(await handler.unary_unary(request, context))
        return
    async with aclosing((handler.stream_stream or handler.unary_stream)(request, context)) as messages:
        async for message in messages:
            await reply(message)


class MemoryContext:
    """The part of grpc.aio.ServicerContext that servicers here use."""

    def __init__(self, caller: str, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.aborted = Status(grpc.StatusCode.UNKNOWN)
        self._caller = caller
        self._ends_at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._callbacks: list[Callable[[Any], None]] = []
        self._done = False

    def peer(self) -> str:
        return PEER_PREFIX + self._caller

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.aborted = Status(code, details)
        raise grpc.aio.AbortError

    def set_code(self, code: grpc.StatusCode) -> None:
        """Generated servicers call this before they raise NotImplementedError, which says the same."""

    def set_details(self, details: str) -> None:
        """See `set_code`."""

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - asyncio.get_running_loop().time())

    def done(self) -> bool:
        return self._done

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def finish(self) -> None:
        self._done = True
        for callback in self._callbacks:
            callback(self)
