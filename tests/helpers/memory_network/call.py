"""The client's side of a call over a `MemoryNetwork`: what generated stubs create and their callers read.

As grpc.aio does: a call that is cancelled raises `CancelledError` in its reader, messages that arrived before a status
are read first, and a deadline ends the call at once, whatever the network does.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # grpc-stubs 1.53 forgot it
from memory_network.server import MemoryContext, answer
from memory_network.stream import Carry, Status, Stream

from noloco_node.transport.interceptor import Handler
from noloco_node.wire.messages import MAX_REQUEST_BYTES

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


class Network(Protocol):
    def carrier(self, source: str, target: str) -> Carry: ...
    def open(self, call: "Call") -> None: ...
    def closed(self, call: "Call") -> None: ...


class Channel:
    """The part of grpc.aio.Channel that generated stubs use. Options of a call other than its timeout are ignored."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network, self._source, self._target = network, source, target

    def unary_unary(
        self,
        method: str,
        request_serializer: Serializer | None = None,
        response_deserializer: Deserializer | None = None,
        _registered_method: bool = False,
    ) -> "Method":
        codecs = request_serializer or _same, response_deserializer or _same
        return Method(self._network, self._source, self._target, method, *codecs)

    unary_stream = unary_unary  # what distinguishes them is what is passed to the call and read from it
    stream_stream = unary_unary


@dataclass(frozen=True, slots=True)
class Method:
    """What a stub's attribute (`stub.Swap`) is: calling it begins a call."""

    network: Network
    source: str
    target: str
    name: str
    serialize: Serializer
    deserialize: Deserializer

    def __call__(self, requests: Any = None, timeout: float | None = None, **_: Any) -> "Call":
        return Call(self, requests, timeout)


class Call:
    """`async for reply in call`, `await call`, `cancel`, `code`: a call as its client sees it."""

    def __init__(self, method: Method, requests: Any, timeout_s: float | None) -> None:
        self.source, self.target, self.method = method.source, method.target, method.name
        self._codecs, self._network = method, method.network
        self._requests = Stream(self._network.carrier(self.source, self.target))
        self._replies = Stream(self._network.carrier(self.target, self.source))
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[Status] = self._loop.create_future()
        self._timeout_s = timeout_s
        self._timers: list[asyncio.TimerHandle] = []
        self._feeder: asyncio.Task[None] | None = None
        self._server: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        if timeout_s is not None:
            self.expire_in(timeout_s, grpc.StatusCode.DEADLINE_EXCEEDED)
        self._network.open(self)
        if not self.done():
            self._feeder = self._loop.create_task(self._feed(requests))

    async def _feed(self, requests: Any) -> None:
        """Send one request, or those of an async iterator as the stream has room for them."""
        try:
            async for request in requests if isinstance(requests, AsyncIterable) else _once(requests):
                message = self._codecs.serialize(request)
                if len(message) > MAX_REQUEST_BYTES:
                    self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED)
                    return
                await self._requests.send(message)
        except Exception:  # noqa: BLE001 - as in grpc: a request iterator that breaks cancels its call, whatever broke it
            self.cancel()
        self._requests.post(lambda: self._requests.end(None))

    # For callers.

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only_reply().__await__()

    async def _only_reply(self) -> Any:
        reply = await self.read()
        if reply is not EOF and await self.read() is EOF:
            return reply
        raise _error(Status(grpc.StatusCode.INTERNAL, "not exactly one reply"))

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (reply := await self.read()) is not EOF:
            yield reply

    async def wait_for_connection(self) -> None:
        """There is nothing to connect: an unknown peer's call has ended already."""
        if self.done() and (status := self._status.result()).code is not grpc.StatusCode.OK:
            raise _error(status)

    async def read(self) -> Any:
        try:
            reply = await self._replies.receive()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(reply, bytes):
            return self._codecs.deserialize(reply)
        status = self._status.result()
        if status.code is grpc.StatusCode.OK:
            return EOF
        if status.code is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        raise _error(status)

    def cancel(self) -> bool:
        return self.fail(grpc.StatusCode.CANCELLED)

    def cancelled(self) -> bool:
        return self.done() and self._status.result().code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._status.done()

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status)).code

    async def details(self) -> str:
        return (await asyncio.shield(self._status)).details

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    # For the network.

    def serve(self, handler: Handler | None) -> asyncio.Task[None]:
        """Begin to answer the call, in a task that belongs to the peer that was called."""
        context = MemoryContext(self.source, self._timeout_s)
        self._server = self._loop.create_task(answer(handler, context, self._requests, self._replies, self._settle))
        return self._server

    def expire_in(self, seconds: float, code: grpc.StatusCode) -> None:
        self._timers.append(self._loop.call_later(seconds, self.fail, code))

    def fail(self, code: grpc.StatusCode) -> bool:
        """End the call from the client's side: at once here, and on the server after the delay of the link."""
        if self.done():
            return False
        self._requests.post(self._stop_server)
        self._settle(Status(code), at_once=True)
        return True

    def break_off(self, dead: str) -> None:
        """A process at one end was killed: its end stops now, the other when it notices the broken connection."""
        if dead == self.source:
            self.fail(grpc.StatusCode.UNAVAILABLE)
            return
        self._stop_server()
        self._replies.post(lambda: self._settle(Status(grpc.StatusCode.UNAVAILABLE), at_once=True))

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.cancel()

    def _settle(self, status: Status, at_once: bool = False) -> None:
        if self.done():
            return
        self._status.set_result(status)
        self._replies.end(status, at_once)
        for timer in self._timers:
            timer.cancel()
        if self._feeder is not None and self._feeder is not asyncio.current_task(self._loop):
            self._feeder.cancel()
        self._network.closed(self)
        for callback in self._callbacks:
            callback(self)


def _same(message: bytes) -> bytes:
    return message


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(), status.details, "")
