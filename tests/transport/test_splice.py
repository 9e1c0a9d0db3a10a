"""What the bridge does between two connections, on each kind of event loop."""

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from transport_peers import until

from noloco_node.transport import grpc_bridge
from noloco_node.transport.grpc_bridge import BUFFER_BYTES, Streams, splice

STEP_S = 60.0
Test = Callable[[Streams, Streams, Streams, Streams], Coroutine[Any, Any, None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Test], None]]:
    """Runs a test with two connections, from `left` to `near` and from `far` to `right`."""
    with asyncio.Runner(loop_factory=request.param) as runner:

        async def in_time(test: Test) -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
            streams = *await pair(), *await pair()
            try:
                async with asyncio.timeout(STEP_S):
                    await test(*streams)
            finally:
                for _, writer in streams:
                    writer.transport.abort()
            assert not logged

        logged: list[dict[str, Any]] = []

        yield lambda test: runner.run(in_time(test))


async def pair() -> tuple[Streams, Streams]:
    """Two ends of one connection."""
    one, other = socket.socketpair()
    a = await asyncio.open_unix_connection(sock=one, limit=BUFFER_BYTES)
    return a, await asyncio.open_unix_connection(sock=other, limit=BUFFER_BYTES)


async def read_slowly(reader: asyncio.StreamReader, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        read += await reader.read(50_000)
        await asyncio.sleep(0)
    return bytes(read)


def test_all_bytes_arrive_in_their_order_both_ways_at_once(run):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        carrying = asyncio.create_task(splice(near, far))
        sent = [random.Random(seed).randbytes(5 << 20) for seed in (1, 2)]
        left[1].write(sent[0])
        right[1].write(sent[1])
        came = await asyncio.gather(read_slowly(right[0], 5 << 20), read_slowly(left[0], 5 << 20))
        assert came == sent
        assert not carrying.done()
        left[1].close()
        await carrying
        assert await right[0].read() == b""

    run(test)


def test_what_came_before_arrives_too(run):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        left[1].write(b"head" + bytes(3 * BUFFER_BYTES))  # more than a reader takes
        assert await near[0].readexactly(4) == b"head"
        left[1].write(b"tail")
        carrying = asyncio.create_task(splice(near, far))
        assert await right[0].readexactly(3 * BUFFER_BYTES + 4) == bytes(3 * BUFFER_BYTES) + b"tail"
        right[1].close()
        await carrying

    run(test)


def test_an_end_that_came_before_ends_it(run):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        left[1].write(b"headrest")
        left[1].write_eof()
        assert await near[0].readexactly(4) == b"head"
        await until(lambda: near[0]._eof)
        await splice(near, far)
        assert await right[0].read() == b"rest"

    run(test)


def test_a_side_that_reads_nothing_ends_it_and_one_that_reads_does_not(run, monkeypatch):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        carrying = asyncio.create_task(splice(near, far))
        size = 4 << 20
        for _ in range(2):  # it waits for the reader, and then goes on
            left[1].write(bytes(size))
            await right[0].readexactly(size)
        monkeypatch.setattr(grpc_bridge, "TAKEN_S", 0.5)
        await asyncio.sleep(0.6)
        assert not carrying.done()
        left[1].write(bytes(size))
        await carrying
        assert left[1].transport.get_write_buffer_size()  # type: ignore[attr-defined]

    run(test)


def test_little_is_buffered_for_a_side_that_reads_nothing_whatever_came_before(run):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        left[1].write(bytes(16 << 20))
        await until(lambda: near[0]._paused)  # it has what a reader takes
        far[1].write(bytes(2 * BUFFER_BYTES))
        carrying = asyncio.create_task(splice(near, far))
        await asyncio.sleep(0.5)
        assert far[1].transport.get_write_buffer_size() < 8 * BUFFER_BYTES
        assert left[1].transport.get_write_buffer_size() > 12 << 20  # type: ignore[attr-defined]
        assert not any(await read_slowly(right[0], (16 << 20) + 2 * BUFFER_BYTES))
        carrying.cancel()
        await asyncio.wait([carrying])

    run(test)


def test_an_end_that_is_lost_while_the_other_sends_on_ends_it_quietly(run):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        carrying = asyncio.create_task(splice(near, far))
        left[1].write(bytes(8 << 20))
        await right[0].readexactly(1 << 20)
        right[1].transport.abort()  # with bytes that it has not read
        await carrying

    for _ in range(20):
        run(test)


@pytest.mark.parametrize("lost", range(2))
@pytest.mark.parametrize("turns", range(4))
def test_an_end_that_was_lost_before_ends_it(run, turns, lost):
    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        for writer in (left[1], right[1]):
            writer.write(b"hello")
        await until(lambda: near[0]._buffer and far[0]._buffer)
        (near, far)[lost][1].transport.abort()
        for _ in range(turns):
            await asyncio.sleep(0)
        await splice(near, far)

    run(test)


def test_one_end_is_lost_at_the_beginning(run):
    """What waits at its reader is written to the other end, which has just been closed by its peer."""

    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        right[1].write(b"hello")
        await until(lambda: far[0]._buffer)
        left[1].transport.abort()
        await splice(near, far)

    for _ in range(20):
        run(test)


@pytest.mark.parametrize("before", [True, False])
def test_nothing_passes_after_what_may_not(run, before):
    """gRPC got what a peer sent behind a refused frame."""

    def may_pass(data: bytes) -> bool:
        asked.append(data[:7])
        return data[:7] != b"refused"

    async def test(left: Streams, near: Streams, far: Streams, right: Streams) -> None:
        if before:  # more than a reader takes, so it waits wherever bytes may wait
            left[1].write(b"refused" + bytes(4 * BUFFER_BYTES))
            await until(lambda: near[0]._paused)
        reads = near[1].transport.get_protocol()
        carrying = asyncio.create_task(splice(near, far, may_pass=may_pass))
        if not before:
            await until(lambda: near[1].transport.get_protocol() is not reads)
            for data in (b"refused", b"and more"):  # in one turn of the loop
                near[1].transport.get_protocol().data_received(data)
        await carrying
        assert asked == [b"refused"]
        assert await right[0].read() == b""

    asked: list[bytes] = []
    run(test)
