"""What the tests of both transports share: servicers whose behaviour a test can choose, and networks to run them on."""

import asyncio
import os
import signal
from random import Random

import grpc
from memory_network.network import MemoryNetwork

from noloco_node.base.addresses import ANY_LOCAL_PORT
from noloco_node.base.identity import Identity
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.wire import peer_pb2, peer_pb2_grpc

STEP_S = 60.0  # no step of a test takes longer, on a busy machine either


class Exchange(peer_pb2_grpc.ExchangeServicer):
    """`swap` is an async generator function (requests, context)."""

    def __init__(self, swap):
        self.Swap = swap


class Runs(peer_pb2_grpc.RunsServicer):
    def __init__(self, list_runs):
        self.List = list_runs


class State(peer_pb2_grpc.StateServicer):
    def __init__(self, fetch):
        self.Fetch = fetch


ADD = {
    Exchange: peer_pb2_grpc.add_ExchangeServicer_to_server,
    Runs: peer_pb2_grpc.add_RunsServicer_to_server,
    State: peer_pb2_grpc.add_StateServicer_to_server,
}


async def echo(requests, context):
    async for request in requests:
        yield request


async def list_no_runs(request, context):
    return peer_pb2.RunsReply()


def fragment(payload=b"", index=0):
    return peer_pb2.SwapFrame(fragment=peer_pb2.Fragment(index=index, payload=payload))


async def failure_of(awaitable):
    """The status code with which a call fails."""
    try:
        async with asyncio.timeout(STEP_S):
            await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("the call succeeded")


async def drain(call):
    return [reply async for reply in call]


async def until(condition):
    async with asyncio.timeout(STEP_S):
        while not condition():  # noqa: ASYNC110 - what it looks at is another process, or code that sets no event
            await asyncio.sleep(0.01)


async def until_it(condition):
    """The same of a coroutine function."""
    async with asyncio.timeout(STEP_S):
        while not await condition():  # noqa: ASYNC110 - as of the DHT, which does not notify when a record has arrived
            await asyncio.sleep(0.1)


class Net:
    """Starts transports, and closes them all at the end of a test."""

    def __init__(self, directory):
        self.directory = directory
        self.transports = []

    async def start(self, *servicers, **settings):
        transport = self.make(**settings)
        for servicer in servicers:
            transport.serve(lambda server, servicer=servicer: ADD[type(servicer)](servicer, server))
        self.transports.append(transport)
        await transport.start()
        return transport

    async def close(self):
        for transport in self.transports:
            await transport.close()


class OverMemory(Net):
    def __init__(self, directory):
        super().__init__(directory)
        self.network = MemoryNetwork(Random(1))

    def make(self):
        return self.network.join(self.new_id())

    def new_id(self):
        return Identity.load_or_create(self.directory / f"{os.urandom(4).hex()}.key").peer_id

    def kill(self, transport):
        self.network.vanish(transport.peer_id)


class OverLibp2p(Net):
    def make(self, **settings):
        identity = Identity.load_or_create(self.directory / f"{len(self.transports)}.key")
        settings = {"bootstrap": self.transports[0].addresses() if self.transports else []} | settings
        listen = settings.pop("listen", ANY_LOCAL_PORT)
        return Libp2pTransport(identity, listen, **settings)

    def new_id(self):
        return Identity.load_or_create(self.directory / f"{os.urandom(4).hex()}.key").peer_id

    def kill(self, transport):
        """Kill its p2pd, so that its connections break as if the whole node had been killed."""
        os.kill(transport._session.process.pid, signal.SIGKILL)
