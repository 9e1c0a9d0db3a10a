"""A second p2pd for a moment, under a temporary key: what others see of this node, which its own p2pd cannot know."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from noloco_node.base.addresses import Address
from noloco_node.transport.p2pd.cleanup import RuntimeDirectory
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.transport.p2pd.process import P2pdProcess, observer_arguments
from noloco_node.transport.p2pd.session import Hivemind
from noloco_node.transport.relay import reserve

_SEARCH_S = 15.0  # to find a peer by its id: the DHT may name several addresses that lead nowhere
_RETRY_S = 0.05  # a bootstrap peer is known about 0.1 s after the connection to it


class Observer:
    def __init__(self, runtime: RuntimeDirectory, hivemind: Hivemind) -> None:
        self._runtime = runtime
        self._hivemind = hivemind

    async def finds(self, peer: str, bootstrap: Sequence[Address]) -> bool:
        """Whether a peer of this id answers in the swarm. Raises SwarmUnreachable."""
        async with self._running(bootstrap) as control:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SEARCH_S):
                    while True:
                        try:
                            await control.connect(peer)
                            return True
                        except OSError as error:
                            if "failed to find any peer in table" not in str(error):
                                return False
                        await asyncio.sleep(_RETRY_S)  # it is still connecting to the bootstrap peers
        return False

    async def has_relay(self, peer: str, addresses: Sequence[Address]) -> bool:
        """Whether a peer at these addresses is a relay.

        p2pd always has a relay for 128 KiB a connection. The one that it is started with replaces that or, by a race at
        the start, is replaced by it, and only another peer can see which of the two it became.
        """
        async with self._running([]) as control:
            await control.try_connect(peer, addresses)
            return await reserve(control, peer)

    @asynccontextmanager
    async def _running(self, bootstrap: Sequence[Address]) -> AsyncIterator[P2pdControl]:
        arguments = observer_arguments(bootstrap)
        process = await P2pdProcess.start(self._runtime, "observer.sock", arguments)
        try:
            yield P2pdControl(process.socket, self._hivemind.messages, self._hivemind.multiaddr)
        finally:
            await process.stop()
            process.socket.unlink(missing_ok=True)
