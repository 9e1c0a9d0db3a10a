"""A process with one transport, to be killed: `libp2p_node.py KEY BOOTSTRAP [fork]`. Streams, prints its pids."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from noloco_node.base.addresses import ANY_LOCAL_PORT, parse
from noloco_node.base.identity import Identity
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.wire import peer_pb2
from noloco_node.wire.peer_pb2_grpc import ExchangeStub


async def flood():
    while True:
        yield peer_pb2.SwapFrame(fragment=peer_pb2.Fragment(payload=bytes(1 << 20)))


def forked_worker():
    """What a data loader does: a copy of this process, which inherits every file descriptor and outlives its parent."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


async def main(key, bootstrap, fork):
    transport = Libp2pTransport(Identity.load_or_create(Path(key)), ANY_LOCAL_PORT, bootstrap=bootstrap)
    await transport.start()
    daemon = transport._session.process
    worker = forked_worker() if fork else None
    (peer,) = (address.peer for address in bootstrap)
    received = 0
    async for frame in ExchangeStub(transport.channel(peer)).Swap(flood(), timeout=60.0):
        received += len(frame.fragment.payload)
        if received == 4 << 20:
            pids = {"daemon": daemon.pid, "worker": worker}
            print(json.dumps({**pids, "directory": str(daemon.socket.parent)}), flush=True)  # noqa: T201


asyncio.run(main(sys.argv[1], [parse(sys.argv[2])], sys.argv[3:] == ["fork"]))
