"""Whether a node can be called is found out again and again, whatever happens to it meanwhile."""

import asyncio
import errno
import random

import grpc.aio

from noloco_node.transport.clock import run_virtual
from noloco_node.transport.memory import MemoryNetwork
from noloco_node.transport.reach import KEEP_S, OFF, OUTGOING, RELAYED, Reach
from noloco_node.wire import mirror_pb2 as pb
from noloco_node.wire.mirror_pb2_grpc import MirrorServicer, add_MirrorServicer_to_server


class Mirror(MirrorServicer):
    """Could not reach anybody."""

    async def Look(self, request: pb.LookRequest, context: object) -> pb.LookReply:  # noqa: N802
        return pb.LookReply()


def test_a_machine_out_of_descriptors_looks_again_when_it_has_some() -> None:
    async def main() -> str | None:
        network = MemoryNetwork(random.Random(0))
        us, helper = network.join("us"), network.join("helper")
        helper.serve(lambda server: add_MirrorServicer_to_server(Mirror(), server))
        for member in (us, helper):
            await member.start()
        calls = iter(range(1_000))

        def channel(peer: str) -> grpc.aio.Channel:
            if next(calls) == 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return us.channel(peer)

        found = Reach("us", OFF, {"helper": []}, list, channel)
        found.verdict = RELAYED
        keeping = asyncio.create_task(found.keep(lambda: None, lambda: ["/ip4/10.0.0.2/tcp/4001"]))
        await asyncio.sleep(15 * KEEP_S)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.wait([keeping])
        for member in (us, helper):
            await member.close()
        return found.verdict

    assert run_virtual(main()) == OUTGOING
