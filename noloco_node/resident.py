"""What every node has: an identity, a transport, a control socket, and an order of starting and stopping.

The two kinds of node, rendezvous.py and trainer.py, say what they live for (`_live`) and how they take their leave
(`_depart`). Knows nothing of training or of rounds.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from noloco_node import names, outlook
from noloco_node.config import NodeConfig
from noloco_node.control.api import serving
from noloco_node.control.views import Health, PeersView, StatusView
from noloco_node.errors import NolocoError
from noloco_node.home import Home
from noloco_node.identity import Identity
from noloco_node.outages import Outages
from noloco_node.transport.addresses import is_loopback
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.reach import OFF
from noloco_node.version import VERSION

log = logging.getLogger(__name__)

Report = Callable[[str], None]


class Resident:
    """What every node has: an identity, a transport, the runs it knows, and a control socket that shows them."""

    _is_rendezvous = False

    def __init__(self, config: NodeConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._home = Home(config.home)
        self._identity = Identity.load_or_create(self._home.identity)
        first = self._is_rendezvous or not config.bootstrap  # others join by it
        self._transport = Libp2pTransport(
            self._identity,
            config.listen,
            config.announce,
            config.bootstrap,
            gone_with_us=(self._home.socket,),
            relay=config.relay,
            serves_relay=first and config.relay != OFF and not is_loopback(config.listen),
        )
        self._started = time.monotonic()
        self._leaving = asyncio.Event()
        self._state = "starting"
        self._waiting_for: str | None = "the network daemon"
        self._last_error: str | None = None
        self._outages = Outages()

    async def run(self) -> None:
        async with serving(self._home, self):
            try:
                await self._transport.start()
                outlook.check(self._transport.skew_s)
                if advice := outlook.advice(self._transport.reachable):
                    self._report(advice)
                await self._unless_leaving(self._live())
            finally:
                self._state, self._waiting_for = "leaving", None
                await self._depart()
                await self._transport.close()

    def leave(self) -> None:
        self._leaving.set()

    def pause(self) -> None:
        """There is nothing to pause, where nothing is trained."""

    def resume(self) -> None:
        """See `pause`."""

    def status(self) -> StatusView:
        return StatusView(**self._common_status(), health=self._health())

    def peers(self) -> PeersView:
        return PeersView()

    async def _live(self) -> None:
        raise NotImplementedError

    async def _depart(self) -> None:
        raise NotImplementedError

    async def _unless_leaving(self, life: Coroutine[Any, Any, None]) -> None:
        """Run `life` until it ends, or until this node is told to leave."""
        living = asyncio.create_task(life)
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({living, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            ended = living.done()
            living.cancel()
            await asyncio.wait({living})
        if ended:
            try:
                living.result()
            except BaseExceptionGroup as group:
                raise _first(group) from group

    async def _keep_network(self) -> None:
        """p2pd may die; this node goes on with another one."""
        while True:
            how: str | None = await self._transport.lost()
            while how:
                log.warning("the network daemon is lost: %s", how)
                await asyncio.sleep(self._outages.died(how, time.monotonic()))
                how = await self._restart_network()
            self._outages.over()
            log.info("the network daemon is back")

    async def _restart_network(self) -> str | None:
        """Returns why it did not succeed, if it did not."""
        try:
            await self._transport.restart()
            await self._rejoin()
        except (NolocoError, OSError) as error:
            return str(error).rstrip(".") or type(error).__name__
        return None

    async def _rejoin(self) -> None:
        """Take part in the DHT again, over another p2pd."""
        raise NotImplementedError

    def _health(self) -> tuple[Health, ...]:
        transport = self._transport
        return (*self._outages.health(time.monotonic()), *outlook.health(transport.reachable, transport.skew_s))

    def _common_status(self) -> dict[str, Any]:
        return {
            "peer_id": self._identity.peer_id,
            "name": names.name_of(self._identity.peer_id),
            "version": VERSION,
            "state": self._state,
            "waiting_for": self._waiting_for,
            "uptime_s": time.monotonic() - self._started,
            "reachable": self._transport.reachable,
            "addresses": tuple(self._transport.addresses()),
            "last_error": self._last_error,
        }


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
