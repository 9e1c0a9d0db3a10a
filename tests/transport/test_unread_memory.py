"""How much memory callers can make a node hold with requests that it has not read."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from noloco_node.host import memory
from noloco_node.transport.call_limits import OF_PLACE
from noloco_node.transport.grpc_bridge import SERVER_OPTIONS
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import ExchangeServicer, ExchangeStub, add_ExchangeServicer_to_server

CONNECTIONS = 4
MORE_BYTES = 80 << 20
"""What one place may send ahead, 40 MiB, and gRPC's own beside it; without a limit it was 300 MiB."""
STEP_S = 60.0


class Waits(ExchangeServicer):
    """Reads the first message of a call and no other."""

    async def Swap(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await anext(aiter(requests))
        yield pb.SwapFrame()
        await asyncio.sleep(3600)


async def serve() -> None:
    """A server; then, for each line that comes, how much memory was taken at most."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_ExchangeServicer_to_server(Waits(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)  # noqa: T201
    await server.start()
    while await asyncio.to_thread(sys.stdin.readline):
        print(memory.peak_bytes(), flush=True)  # noqa: T201


async def test_calls_that_are_not_read_take_little_memory() -> None:
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:  # noqa: ASYNC220
        assert server.stdin is not None and server.stdout is not None
        lines, ask = server.stdout, server.stdin

        async def peak() -> int:
            ask.write("\n")
            ask.flush()
            return int(await asyncio.to_thread(lines.readline))

        port = int(await asyncio.to_thread(lines.readline))
        before, sent = await peak(), 0

        async def flood(channel: grpc.aio.Channel) -> None:
            nonlocal sent

            async def pieces() -> AsyncIterator[pb.SwapFrame]:
                nonlocal sent
                while True:
                    yield pb.SwapFrame(piece=pb.Piece(data=bytes(256 << 10), more=True))
                    sent += 1

            async for _ in ExchangeStub(channel).Swap(pieces()):
                pass

        # An option that differs keeps gRPC from using one connection for all.
        options = [[("grpc.use_local_subchannel_pool", 1), ("number", n)] for n in range(CONNECTIONS)]
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=each) for each in options]
        calls = [asyncio.create_task(flood(channels[n % CONNECTIONS])) for n in range(OF_PLACE)]
        seen = -1
        async with asyncio.timeout(STEP_S):
            while sent < OF_PLACE or seen != sent:
                seen = sent
                await asyncio.sleep(0.5)
        more = await peak() - before
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
        server.kill()
    assert more < MORE_BYTES, f"{more >> 20} MiB"


if __name__ == "__main__":
    asyncio.run(serve())
