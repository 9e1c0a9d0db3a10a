"""One call over a `MemoryNetwork`: the client's side that stubs see, the server's side, the two streams between them.

It behaves as grpc.aio does where that matters to the code above: a call that is cancelled raises `CancelledError` in its
reader, messages that arrived before a status are read first, and a deadline ends the call on both sides, each by its own
clock. Links, delay and loss are known here only as `Network`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # grpc-stubs 1.53 forgot it

from noloco_node.transport.base import MAX_MESSAGE_BYTES
from noloco_node.transport.guard import Handler, contained

_WINDOW = 4
"""Messages of one stream that may be under way or unread; then the sender waits. HTTP/2 bounds the same by bytes."""

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


class Network(Protocol):
    def send(self, source: str, target: str, size_bytes: int, arrive: Callable[[], None]) -> bool: ...
    def open(self, call: "Call") -> None: ...
    def closed(self, call: "Call") -> None: ...


class Status(NamedTuple):
    code: grpc.StatusCode
    details: str = ""


class _Stream:
    """One direction of one call: in order, bounded, and silent for good once a message is lost.

    Its end is the last thing that is read from it, as often as one asks: `None` after the requests, a `Status` after the
    replies.
    """

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._network, self._source, self._target = network, source, target
        self._unread: deque[bytes] = deque()
        self._end: tuple[Status | None] | None = None
        self._outstanding = 0
        self._silent = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def send(self, message: bytes) -> None:
        while self._outstanding >= _WINDOW:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        self._outstanding += 1
        self.post(len(message), lambda: self._arrived(message))

    def post(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        if not self._silent:
            self._silent = not self._network.send(self._source, self._target, size_bytes, arrive)

    def _arrived(self, message: bytes) -> None:
        if self._end is None:
            self._unread.append(message)
            _wake(self._reader)

    def end(self, last: Status | None, at_once: bool = False) -> None:
        """Nothing more will be read after what is there; `at_once` drops that too."""
        if at_once:
            self._unread.clear()
        if self._end is None:
            self._end = (last,)
        _wake(self._reader)

    async def receive(self) -> bytes | Status | None:
        while not self._unread:
            if self._end is not None:
                return self._end[0]
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._outstanding -= 1
        _wake(self._writer)
        return self._unread.popleft()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


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
    """A call as its client sees it (`async for reply in call`, `await call`, `cancel`, `code`), and its server's task."""

    def __init__(self, method: Method, requests: Any, timeout_s: float | None) -> None:
        self.source, self.target, self.method = method.source, method.target, method.name
        self._codecs = method
        self._network = method.network
        self._requests = _Stream(self._network, self.source, self.target)
        self._replies = _Stream(self._network, self.target, self.source)
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

    # The client's side.

    async def _feed(self, requests: Any) -> None:
        """Send one request, or those of an async iterator as the stream has room for them."""
        try:
            async for request in requests if isinstance(requests, AsyncIterable) else _once(requests):
                message = self._codecs.serialize(request)
                if len(message) > MAX_MESSAGE_BYTES:
                    self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED)
                    return
                await self._requests.send(message)
        except Exception:  # noqa: BLE001 - as in grpc: a request iterator that breaks cancels its call, whatever broke it
            self.cancel()
        self._requests.post(0, lambda: self._requests.end(None))

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

    # How a call ends.

    def expire_in(self, seconds: float, code: grpc.StatusCode) -> None:
        self._timers.append(self._loop.call_later(seconds, self.fail, code))

    def fail(self, code: grpc.StatusCode) -> bool:
        """End the call from the client's side: at once here, and on the server when word of it arrives there."""
        if self.done():
            return False
        self._requests.post(0, self._stop_server)
        self._settle(Status(code), at_once=True)
        return True

    def break_off(self, dead: str) -> None:
        """A process at one end died: its own end stops now, the other when the broken connection is seen there."""
        if dead == self.source:
            self.fail(grpc.StatusCode.UNAVAILABLE)
            return
        self._stop_server()
        self._replies.post(0, lambda: self._settle(Status(grpc.StatusCode.UNAVAILABLE), at_once=True))

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

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.cancel()

    # The server's side.

    def serve(self, handler: Handler | None) -> asyncio.Task[None]:
        """Answer the call in a task of the peer that was called, which owns it."""
        self._server = self._loop.create_task(self._run(handler))
        return self._server

    async def _run(self, handler: Handler | None) -> None:
        context = _Context(self.source, self._timeout_s)
        status = Status(grpc.StatusCode.CANCELLED)
        try:
            async with asyncio.timeout(self._timeout_s), contained(context):
                await self._answer(handler, context)
            status = Status(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            status = context.aborted
        except TimeoutError:
            status = Status(grpc.StatusCode.DEADLINE_EXCEEDED)  # the client's own timer says the same
        finally:
            context.finish()
            self._replies.post(0, lambda: self._settle(status))

    async def _answer(self, handler: Handler | None, context: "_Context") -> None:
        if handler is None:
            raise NotImplementedError
        requests = self._read_requests(handler.request_deserializer or _same)
        request = requests if handler.stream_stream else await anext(requests)
        if handler.unary_unary:
            await self._reply(await handler.unary_unary(request, context), handler, context)
            return
        async with aclosing((handler.stream_stream or handler.unary_stream)(request, context)) as replies:
            async for reply in replies:
                await self._reply(reply, handler, context)

    async def _reply(self, reply: Any, handler: Handler, context: "_Context") -> None:
        message = (handler.response_serializer or _same)(reply)
        if len(message) > MAX_MESSAGE_BYTES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        await self._replies.send(message)

    async def _read_requests(self, deserialize: Deserializer) -> AsyncIterator[Any]:
        while isinstance(request := await self._requests.receive(), bytes):
            yield deserialize(request)


class _Context:
    """The part of grpc.aio.ServicerContext that servicers here use."""

    def __init__(self, caller: str, timeout_s: float | None) -> None:
        self._caller = caller
        self._ends_at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._callbacks: list[Callable[[Any], None]] = []
        self._done = False
        self.aborted = Status(grpc.StatusCode.UNKNOWN)

    def peer(self) -> str:
        return f"memory:{self._caller}"

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
    ) -> Method:
        codecs = request_serializer or _same, response_deserializer or _same
        return Method(self._network, self._source, self._target, method, *codecs)

    unary_stream = unary_unary  # what distinguishes them is what is passed to the call and read from it
    stream_stream = unary_unary


def _same(message: bytes) -> bytes:
    return message


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(), status.details, "")
