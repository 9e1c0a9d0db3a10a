"""A member of a memory network that knows runs, as a rendezvous does."""

from collections.abc import Callable

from memory_network.network import MemoryTransport

from noloco_node.peers.run_registry import RunRegistry
from noloco_node.run.manifest import Signed
from noloco_node.wire.peer_pb2_grpc import add_RunsServicer_to_server


def knows(member: MemoryTransport, *runs: Signed, training: Callable[[str], int] = lambda _: 0) -> RunRegistry:
    """`training`: how many train in the run of an id."""
    registry = RunRegistry(member.caller, training)
    for run in runs:
        registry.add(run)
    member.serve(lambda server: add_RunsServicer_to_server(registry, server))
    return registry
