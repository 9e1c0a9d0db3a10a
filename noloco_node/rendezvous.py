"""A node that does not train: others find each other, and their run, through it."""

from noloco_node import runs
from noloco_node.config import NodeConfig
from noloco_node.resident import Report, Resident
from noloco_node.swarm import Swarm
from noloco_node.wire.peer_pb2_grpc import (
    add_RunsServicer_to_server,
)


class Rendezvous(Resident):
    """Others find each other, and their run, through it."""

    _is_rendezvous = True

    def __init__(self, config: NodeConfig, report: Report) -> None:
        super().__init__(config, report)
        self._runs = runs.Runs(keeps_announced=True)
        self._transport.serve(lambda server: add_RunsServicer_to_server(self._runs, server))
        self._swarm: Swarm | None = None

    async def _live(self) -> None:
        self._waiting_for = "the directory of peers"
        self._swarm = Swarm(self._transport.p2p, self._config.bootstrap)
        await self._swarm.start()
        self._state, self._waiting_for = "rendezvous", None
        for address in self._transport.addresses():
            self._report(f"others join with: noloco-node join --bootstrap {address}")
        await self._keep_network()

    async def _rejoin(self) -> None:
        if self._swarm:
            await self._swarm.rejoin(self._transport.p2p)

    async def _depart(self) -> None:
        if self._swarm:
            await self._swarm.close()
