"""One end of a stream between two processes on loopback: both send as many bytes, at the same time.

`exchange` is what a node's swap goes through, without its codec; the others leave parts of it out, one after the other.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio

from noloco_node.bench.exchange import PAYLOAD_BYTES
from noloco_node.bench.rivals.noloco_pair import Node
from noloco_node.bench.workers import Answer, serve
from noloco_node.core.codecs.codec import CodecStats, Payload
from noloco_node.rounds.service import answer_swaps, swap_over
from noloco_node.transport.grpc_bridge import BUFFER_BYTES, SERVER_OPTIONS, Streams, open_channel

PROTOCOL = "noloco/bench/1"
LOOPBACK = "127.0.0.1"


class Opaque:
    """An offer whose payloads are bytes that nobody codes. As a codec does, it answers from a thread of its own."""

    correction_bytes = 4

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self._payload = bytes(PAYLOAD_BYTES)
        self._thread = ThreadPoolExecutor(1)

    def settled(self) -> "Future[None]":
        return self._thread.submit(lambda: None)

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        return self._thread.submit(lambda: self._payload)

    def receive(self, index: int, payload: Payload) -> "Future[bytes | float]":
        return self._thread.submit(lambda: 1.0)

    def apply(self, index: int, scale: float) -> "Future[None]":
        return self._thread.submit(lambda: None)

    def stats(self) -> "Future[CodecStats]":
        return self._thread.submit(CodecStats)


class Exchange:
    """A swap: rounds/ over transport/."""

    async def start(self, count: int) -> str:
        self._node, self._count = Node(), count
        return await self._node.open(LOOPBACK, count)

    async def connect(self, addresses: Sequence[str], worker: int) -> None:
        self._node.connect(addresses)
        self._partner = 1 - worker

    async def step(self) -> None:
        self._node.round += 1
        await self._node.swap([self._partner], Opaque(self._count))


class Echo:
    """Sends as many payloads as it is sent."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.received = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        answer_swaps(server, self._swap)

    async def _swap(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        reading = asyncio.create_task(_read(requests))
        async for payload in payloads(self.count):
            yield payload
        await reading
        self.received.set()


async def payloads(count: int) -> AsyncIterator[bytes]:
    payload = bytes(PAYLOAD_BYTES)
    for _ in range(count):
        yield payload


async def _read(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass


class Grpc:
    """Messages as large as a swap's on a fast link, over plain gRPC."""

    async def start(self, count: int) -> str:
        self._echo = Echo(count)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._echo.add_to(self._server)
        port = self._server.add_insecure_port(f"{LOOPBACK}:0")
        await self._server.start()
        return f"{LOOPBACK}:{port}"

    async def connect(self, addresses: Sequence[str], worker: int) -> None:
        self._calls = worker == 0
        self._channel = open_channel(addresses[1])

    def channel(self) -> grpc.aio.Channel:
        return self._channel

    async def step(self) -> None:
        if self._calls:
            await _read(swap_over(self.channel(), payloads(self._echo.count)))
        else:
            await self._echo.received.wait()
            self._echo.received.clear()


class GrpcOverLibp2p(Grpc):
    """The same over our transport."""

    async def start(self, count: int) -> str:
        self._echo = Echo(count)
        self._node = Node()
        self._node.add_services = self._echo.add_to
        return await self._node.open(LOOPBACK, count)

    async def connect(self, addresses: Sequence[str], worker: int) -> None:
        self._calls = worker == 0
        self._node.connect(addresses)

    def channel(self) -> grpc.aio.Channel:
        return self._node.transport.channel(self._node.peers[1])


class Libp2p:
    """A stream of p2pd's, read and written by asyncio."""

    async def start(self, count: int) -> str:
        self._bytes = count * PAYLOAD_BYTES
        self._node = Node()
        address = await self._node.open(LOOPBACK, count)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-noloco-")
        listener = Path(self._folder.name, "streams.sock")
        self._came: asyncio.Queue[Streams] = asyncio.Queue()
        self._server = await asyncio.start_unix_server(
            lambda *stream: self._came.put_nowait(stream), listener, limit=BUFFER_BYTES
        )
        await self._control.hand_over_streams(PROTOCOL, listener)
        return address

    @property
    def _control(self) -> Any:
        return self._node.transport._session.control

    async def connect(self, addresses: Sequence[str], worker: int) -> None:
        self._node.connect(addresses)
        self._calls = worker == 0
        if self._calls:
            peer, address = self._node.peers[1], self._node.addresses[1]
            await self._control.connect(peer, [address])
            self._stream, _ = await self._control.open_stream(peer, PROTOCOL)
        else:
            self._stream = await self._came.get()
            await self._control.read_caller(self._stream[0])

    async def step(self) -> None:
        reader, writer = self._stream
        await asyncio.gather(_take(reader, self._bytes), _give(writer, self._bytes))


async def _give(writer: asyncio.StreamWriter, count: int) -> None:
    data = bytes(BUFFER_BYTES)
    for _ in range(count // len(data)):
        writer.write(data)
        await writer.drain()


async def _take(reader: asyncio.StreamReader, count: int) -> None:
    while count > 0:
        count -= len(await reader.read(BUFFER_BYTES))


VARIANTS: dict[str, Callable[[], Any]] = {
    "exchange": Exchange,
    "grpc over libp2p": GrpcOverLibp2p,
    "libp2p": Libp2p,
    "grpc": Grpc,
}


class Member:
    async def start(self, variant: str, count: int, worker: int) -> Answer:
        """`count`: payloads that each end sends."""
        self._worker, self._end = worker, VARIANTS[variant]()
        return {"address": await self._end.start(count)}

    async def connect(self, addresses: Sequence[str]) -> None:
        await self._end.connect(addresses, self._worker)

    async def step(self) -> None:
        await self._end.step()


if __name__ == "__main__":
    serve(Member())
