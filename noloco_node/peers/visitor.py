"""A look at a swarm by somebody who is no part of it: `peers --bootstrap`, `ping --bootstrap`, `doctor --bootstrap`.

A visitor has a network daemon and an identity of the moment, tells nobody of itself, carries nobody's records, and
leaves nothing behind.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from noloco_node.base.identity import Identity
from noloco_node.errors import NolocoError, PeerFault, SwarmUnreachable
from noloco_node.peers import rows, run_registry
from noloco_node.peers.directory import Directory
from noloco_node.run.manifest import Signed
from noloco_node.transport.echo import echo
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.p2pd.cleanup import momentary_key
from noloco_node.transport.reachability import OFF
from noloco_node.views.peers import PeersView, PingView

QUIETLY = "/ip4/127.0.0.1/tcp/0"
"""Where a visitor listens that nobody has to call: no router is asked for a port."""
READS = 3
"""Of one run: the first tells how large it is, the others read a part of a large one."""
START_S = 60.0


class Visitor:
    """Made by `visiting`."""

    def __init__(self, transport: Libp2pTransport, bootstrap: Sequence[str]) -> None:
        self.transport = transport
        self._bootstrap = bootstrap
        self._directory: Directory | None = None

    async def runs(self) -> list[Signed]:
        """Those that the bootstrap nodes know, each once. Raises SwarmUnreachable where none of them answers."""
        helpers = dict.fromkeys(address.rpartition("/p2p/")[2] for address in self._bootstrap)
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
        return list({run.signed.manifest: run.signed for answer in answers for run in answer}.values())

    async def peers(self) -> PeersView:
        """Of every run that is known there."""
        known = await self.runs()
        if self._directory is None:
            self._directory = Directory(self.transport.p2p, self._bootstrap, carries=False)
            await self._directory.start()
        return rows.peers_view([await self._sight(self._directory, signed) for signed in known])

    async def close(self) -> None:
        if self._directory:
            await self._directory.close()

    async def _sight(self, directory: Directory, signed: Signed) -> rows.RunSeen:
        run_id = rows.verified(signed).run_id
        for _ in range(READS):
            seen = await directory.onlook(run_id)
        self.transport.introduce({peer: record.addresses for peer, record in seen.items()})
        return rows.sight(signed, seen, time.time())

    async def ping(self, peer: str, payload_bytes: int = 0) -> PingView:
        return await ping(self.transport, peer, payload_bytes)


@asynccontextmanager
async def visiting(bootstrap: Sequence[str], listen: str = QUIETLY, relay: str = OFF) -> AsyncIterator[Visitor]:
    """Raises SwarmUnreachable where nobody answers."""
    with momentary_key() as key:
        identity = Identity.load_or_create(key)
        transport = Libp2pTransport(identity, listen, bootstrap=bootstrap, relay=relay, gone_with_us=(key.parent,))
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
        seconds = await echo(transport, peer, payload_bytes)
    except PeerFault as fault:
        return PingView(peer, failure=fault.reason)
    return PingView(peer, seconds, transport.via(peer))
