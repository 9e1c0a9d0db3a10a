"""A node that does not train: others find each other, and their run, through it. It shows the runs it knows."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from noloco_node.base import periodic, places
from noloco_node.base.states import NodeState
from noloco_node.errors import NolocoError
from noloco_node.host.config import NodeConfig
from noloco_node.host.traffic import Traffic
from noloco_node.node.base import BaseNode, Report
from noloco_node.node.lifecycle import Signal
from noloco_node.peers import rows, run_registry
from noloco_node.peers.directory import Directory
from noloco_node.peers.record import PeerRecord
from noloco_node.run.invitation import COMMAND
from noloco_node.run.manifest import Signed
from noloco_node.views.peers import PeersView
from noloco_node.views.status import StatusView
from noloco_node.wire.peer_pb2_grpc import add_RunsServicer_to_server

LOOK_S = 10.0
"""How often peers are looked up. A presence record lives for a minute."""
LOOKS = 16
"""Runs that are looked up at a time, of each place one before any gives another. The most that are known (run_registry)
take half a minute, or a minute where all look-ups take as long as they may."""


class RendezvousNode(BaseNode):
    _is_rendezvous = True

    def __init__(self, config: NodeConfig, report: Report) -> None:
        super().__init__(config, report)
        self._traffic = Traffic()
        """Without a limit for all callers together: it is there for them."""
        caller, place = self._transport.caller, self._transport.place
        self._runs = run_registry.RunRegistry(caller, self._training, place, self._traffic)
        self._transport.serve(lambda server: add_RunsServicer_to_server(self._runs, server))
        self._swarm: Directory | None = None
        self._seen: dict[str, dict[str, PeerRecord]] = {}
        """By run id, the one looked up longest ago first."""

    async def _live(self) -> None:
        self.waits_for("the directory of peers")
        swarm = self._swarm = self._directory(self._traffic)
        await self._enter(swarm.start)
        self._handle(Signal.DIRECTORY_ENTERED)
        await periodic.every(lambda: LOOK_S, lambda: self._look(swarm), (NolocoError, OSError))

    def _join_lines(self) -> list[str]:
        entered = self._life.state is NodeState.RENDEZVOUS
        return [f"{COMMAND} --bootstrap {address}" for address in self._transport.addresses()] if entered else []

    async def _look(self, swarm: Directory) -> None:
        """By places, and together: many runs of one host whose look-ups last long would else make all other runs seem
        to have no peers."""
        await self._report_join_lines()
        where = self._runs.places
        unseen = [run for run in where if run not in self._seen]
        order = [*unseen, *(run for run in self._seen if run in where)]
        turn = places.in_turn({run: where[run] for run in order})[:LOOKS]
        self._seen = {run: self._seen.get(run, {}) for run in sorted(order, key=turn.__contains__)}
        await asyncio.gather(*(self._look_up(swarm, run) for run in turn))

    async def _look_up(self, swarm: Directory, run: str) -> None:
        with suppress(NolocoError, OSError):
            seen = self._seen[run] = (await swarm.peers_of(run)).peers
            self._transport.introduce({peer: record.addresses for peer, record in seen.items()})

    def _training(self, run_id: str) -> int:
        return rows.training(rows.living(self._seen.get(run_id, {}).values(), time.time()))

    def _run_seen(self, signed: Signed) -> rows.RunSeen:
        seen = self._seen.get(rows.verified(signed).run_id, {})
        return rows.run_seen(signed, seen, time.time(), self._transport.via)

    def status(self) -> StatusView:
        seen = self.peers()
        return replace(
            super().status(),
            peers_seen=len(seen.peers),
            peers_by_state=Counter(peer.state for peer in seen.peers),
            runs=seen.runs,
        )

    def peers(self) -> PeersView:
        return rows.peers_view(map(self._run_seen, run_registry.first_copies(self._runs.known)))

    async def _rejoin(self) -> None:
        if self._swarm:
            await self._swarm.rejoin(self._transport.p2p)

    async def _depart(self) -> None:
        if self._swarm:
            await self._swarm.close()
