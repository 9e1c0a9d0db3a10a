"""Reads a swarm without being a member: `peers --bootstrap`, `ping --bootstrap`, `doctor --bootstrap`.

A visitor has a temporary p2pd and identity; it publishes nothing, stores no records, and leaves no files behind.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from noloco_node.base.addresses import ANY_LOCAL_PORT, Address
from noloco_node.base.identity import Identity
from noloco_node.errors import NolocoError, PeerFault, SwarmUnreachable
from noloco_node.peers import rows, run_registry
from noloco_node.peers.directory import SILENT, Directory, Found
from noloco_node.run.manifest import Signed
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.p2pd.cleanup import temporary_key
from noloco_node.transport.reachability import OFF
from noloco_node.transport.self_view import round_trip
from noloco_node.views.peers import PeersView, PingView

READS = 3
"""Reads of one run: the first shows how large it is, the others read a part of a large one."""
START_S = 60.0


class Visitor:
    """Made by `visiting`."""

    def __init__(self, transport: Libp2pTransport, bootstrap: Sequence[Address]) -> None:
        self.transport = transport
        self._bootstrap = bootstrap
        self._directory: Directory | None = None

    async def runs(self) -> list[Signed]:
        """The runs that the bootstrap nodes know, each once. Raises SwarmUnreachable where none of them answers."""
        helpers = dict.fromkeys(address.peer for address in self._bootstrap)
        calls = (run_registry.ask(self.transport.channel(peer)) for peer in helpers)
        found = await asyncio.gather(*calls, return_exceptions=True)
        answers = [answer for answer in found if isinstance(answer, list)]
        for bug in (answer for answer in found if not isinstance(answer, list | NolocoError)):
            raise bug
        if not answers:
            raise SwarmUnreachable(
                "cannot reach the swarm: no bootstrap node says which runs it knows. "
                "Does it run a compatible version of noloco-node?"
            )
        return run_registry.first_copies(run.signed for answer in answers for run in answer)

    async def peers(self) -> PeersView:
        """The peers of every run that is known there. Raises SwarmUnreachable."""
        known = await self.runs()
        if self._directory is None:
            self._directory = Directory(self.transport.p2p, self._bootstrap, stores=False)
            await self._directory.start(refused_s=0.0)
        found = await asyncio.gather(*(self._look_up(self._directory, signed) for signed in known))
        why = next((run.unanswered for run in found if run.unanswered), None)
        if why and not any(run.peers for run in found):
            raise SwarmUnreachable(f"nobody says who is in a run: {why}. Try again later")
        seen = zip(known, found, strict=True)
        return rows.peers_view(rows.run_seen(signed, run.peers, time.time()) for signed, run in seen)

    async def close(self) -> None:
        if self._directory:
            await self._directory.close()

    async def _look_up(self, directory: Directory, signed: Signed) -> Found:
        run_id, found = rows.verified(signed).run_id, Found({}, SILENT)
        with suppress(OSError):  # a look-up takes too long: what was read before counts
            for _ in range(READS):
                found = await directory.peers_of(run_id)
        self.transport.introduce({peer: record.addresses for peer, record in found.peers.items()})
        return found

    async def ping(self, peer: str, payload_bytes: int = 0) -> PingView:
        return await ping(self.transport, peer, payload_bytes)


@asynccontextmanager
async def visiting(
    bootstrap: Sequence[Address], listen: Address = ANY_LOCAL_PORT, relay: str = OFF
) -> AsyncIterator[Visitor]:
    """`listen`: on loopback by default, so that no router is asked for a port. Raises SwarmUnreachable."""
    with temporary_key() as key:
        identity = Identity.load_or_create(key)
        transport = Libp2pTransport(identity, listen, bootstrap=bootstrap, relay=relay, remove_at_end=(key.parent,))
        try:
            async with asyncio.timeout(START_S):
                await transport.start()
        except TimeoutError:
            raise SwarmUnreachable(
                f"cannot reach the swarm: the network daemon was not ready within {START_S:.0f} s. "
                "Is this machine very busy? Try again"
            ) from None
        visit = Visitor(transport, bootstrap)
        try:
            yield visit
        finally:
            await visit.close()
            await transport.close()


async def ping(transport: Libp2pTransport, peer: str, payload_bytes: int) -> PingView:
    """One round trip, or why there was none."""
    try:
        seconds = await round_trip(transport.channel(peer), payload_bytes)
    except PeerFault as fault:
        return PingView(peer, failure=fault.reason)
    return PingView(peer, seconds, transport.via(peer))
