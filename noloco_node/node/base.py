"""What every node has: an identity, a transport, a control socket, and an order of starting and stopping.

The two kinds of node, node/rendezvous.py and node/trainer.py, add what they do (`_live`) and how they leave
(`_depart`). Knows nothing of training or of rounds.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from noloco_node.base import peer_names
from noloco_node.base.identity import Identity
from noloco_node.base.states import NodeState
from noloco_node.control.socket_server import serving
from noloco_node.errors import NolocoError
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.host.traffic import Traffic
from noloco_node.node import lifecycle
from noloco_node.observe import health
from noloco_node.observe.health import NetworkOutages
from noloco_node.observe.log_tail import LogTail
from noloco_node.observe.waiting import WaitingLines
from noloco_node.peers.answering import Answering
from noloco_node.peers.directory import Directory
from noloco_node.peers.visitor import ping
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.reachability import OFF
from noloco_node.version import VERSION
from noloco_node.views.gather import GatherView
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeersView, PingView
from noloco_node.views.status import Health, StatusView
from noloco_node.web.server import page

log = logging.getLogger(__name__)

Report = Callable[[str], None]

NOTICED_S = 0.5
"""By then the end of a killed p2pd has been noticed."""


class BaseNode:
    _is_rendezvous = False

    def __init__(self, config: NodeConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._home = Home(config.home)
        self._identity = Identity.load_or_create(self._home.identity)
        first = self._is_rendezvous or not config.ways_in  # others use it as their bootstrap
        self._transport = Libp2pTransport(
            self._identity,
            config.listen,
            config.announce,
            config.bootstrap,
            config.seen,
            remove_at_end=(self._home.socket,),
            relay=config.relay,
            serves_relay=first and config.relay != OFF and not config.listen.is_loopback,
            last_port=config.last_port,
        )
        self._started = time.monotonic()
        self._leaving = asyncio.Event()
        self._life = lifecycle.Lifecycle()
        self._last_error: str | None = None
        self._outages = NetworkOutages()
        self._network = asyncio.Event()
        """Set while p2pd runs, as far as is known, and this node, if it ever entered the directory, is in it."""
        self._network.set()
        self._restarts = 0  # of p2pd
        self._lines = LogTail()
        self._waiting = WaitingLines()
        self._web: str | None = None
        self._reported: list[str] = []
        """The lines to join with that the user has read."""

    async def run(self) -> None:
        with self._lines.attached():
            async with serving(self._home, self), self._page():
                try:
                    await self._unless_leaving(self._start_and_live())
                finally:
                    self._handle(lifecycle.Signal.LEAVE)
                    await self._depart()
                    await self._transport.close()

    async def _start_and_live(self) -> None:
        await self._transport.start()
        if not self._config.seen:  # nobody chose those: two of them could keep this node out
            health.check(self._transport.skew)
        for sentence in (health.doubt(self._transport.skew), health.advice(self._transport.reachable)):
            if sentence:
                self._report(sentence)
        await self._supervised(self._live())

    def _handle(self, event: lifecycle.Event) -> None:
        for action in self._life.handle(event):
            self._perform(action)

    def _perform(self, action: lifecycle.Action) -> None:
        """A node that does not train has nothing to pause and nothing to stop."""

    def waits_for(self, what: str | None) -> None:
        self._handle(lifecycle.WaitsFor(what))
        self._waiting.waits_for(what, time.monotonic())

    def leave(self) -> None:
        self._leaving.set()

    async def pause(self) -> None:
        """A node that does not train has nothing to pause."""

    async def resume(self) -> None:
        """See `pause`."""

    def round_events(self) -> list[str]:
        return []

    def log_level(self, level: str) -> None:
        logging.getLogger("noloco_node").setLevel(level.upper())
        log.info("the log level is %s from now on", level)

    async def ping(self, peer: str, payload_bytes: int) -> PingView:
        return await ping(self._transport, peer, payload_bytes)

    async def gather(self, _peers: int) -> AsyncGenerator[GatherView, None]:
        yield GatherView(failure="this node does not train and has no weights: name the home of one that does")

    def status(self) -> StatusView:
        skew, state = self._transport.skew, self._life.state
        return StatusView(
            peer_id=self._identity.peer_id,
            name=peer_names.name_of(self._identity.peer_id),
            version=VERSION,
            state=NodeState.TRAINING if state is NodeState.SOLO else state,
            waiting_for=self._life.waiting_for,
            uptime_s=time.monotonic() - self._started,
            reachable=self._transport.reachable,
            network_restarts=self._restarts,
            addresses=tuple(map(str, self._transport.addresses())),
            join=next(iter(self._join_lines()), None),
            web=self._web,
            skew_s=skew.ahead_s if skew else None,
            skew_witnesses=skew.witnesses if skew else 0,
            last_error=self._last_error,
            health=self._health(),
        )

    def peers(self) -> PeersView:
        return PeersView()

    def history(self) -> HistoryView:
        return HistoryView(said=self._lines.last())

    @asynccontextmanager
    async def _page(self) -> AsyncIterator[None]:
        if self._config.web is None:
            yield
            return
        token = self._home.web_token
        async with page(self._config.web, self, token) as self._web:
            log.info("web page: %s (to control the node there, add #token= and the content of %s)", self._web, token)
            yield

    def _join_lines(self) -> list[str]:
        """What others join with at this moment, each of them enough. This machine's addresses change: the provider
        gives it another one, its router maps a port, its network is up after the node."""
        return []

    async def _report_join_lines(self) -> None:
        """Once, and again where they have changed."""
        if (lines := self._join_lines()) == self._reported:
            return
        self._reported = lines
        for line in lines:
            self._report(f"others join with: {line}")
        for found in self._only_here():
            self._report(f"{found.text}: {found.remedy}")

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

    async def _supervised(self, life: Coroutine[Any, Any, None]) -> None:
        """Restarts p2pd meanwhile, which may die at any time."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keep_network())
            await life
            keeping.cancel()

    def _directory(
        self, traffic: Traffic, identity: Identity | None = None, run_id: str = "", *, stores: bool = True
    ) -> Directory:
        return Directory(
            self._transport.p2p,
            self._config.ways_in,
            identity,
            run_id,
            stores=stores,
            place_of=self._transport.place_seen,
            may_answer=self._transport.may_answer,
            answering=Answering(self._transport),
            traffic=traffic,
        )

    async def _enter(self, directory: Callable[[], Awaitable[None]]) -> None:
        """Enter a directory of peers. If p2pd dies meanwhile, `_rejoin` does it over the next one."""
        p2p = self._transport.p2p
        try:
            await directory()
        except (NolocoError, OSError):
            await asyncio.sleep(NOTICED_S)
            if self._network.is_set() and self._transport.p2p is p2p:
                raise
            await self._network.wait()

    async def _keep_network(self) -> None:
        while True:
            how: str | None = await self._transport.lost()
            said = None
            self._network.clear()
            while how:
                if how != said:  # a port that another program has is tried every half minute, perhaps for days
                    log.warning("the network daemon is lost: %s", how)
                said = how
                await asyncio.sleep(self._outages.died(how, time.monotonic()))
                self._restarts += 1
                how = await self._restart_network()
            self._outages.over()
            self._network.set()
            log.info("the network daemon is back")

    async def _restart_network(self) -> str | None:
        """Returns why it failed, or None."""
        try:
            await self._transport.restart()
            await self._rejoin()
        except (NolocoError, OSError) as error:
            return str(error).rstrip(".") or type(error).__name__
        return None

    async def _rejoin(self) -> None:
        """Enter the DHT again, over another p2pd."""
        raise NotImplementedError

    def _health(self) -> tuple[Health, ...]:
        transport = self._transport
        network = (*health.health(transport.reachable, transport.skew), *self._only_here())
        return (*self._outages.health(time.monotonic()), *network)

    def _only_here(self) -> tuple[Health, ...]:
        return () if self._config.listen.is_loopback else health.only_here(self._transport.addresses())


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
