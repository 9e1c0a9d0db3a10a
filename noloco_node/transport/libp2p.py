"""gRPC carried on libp2p streams, which p2pd provides: the daemon in hivemind's wheel.

p2pd proves who is at the other end, encrypts, and finds a way through routers. This module starts it and joins its
streams to a gRPC server and to channels (`transport/bridge.py`). The connections of hivemind's DHT go through the same
daemon: `p2p` is for `swarm.py`.

The daemon is started here and not by hivemind's `P2P.create`, because it needs a session of its own, somebody who kills
it if need be, and errors that a user can act on. Streams are opened here too (`transport/orders.py`): hivemind's calls
leave a socket open when they fail, and its handlers run in tasks that nobody holds.
"""

import asyncio
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from noloco_node.errors import IdentityInUse, NolocoError, PeerLost, SwarmUnreachable
from noloco_node.identity import Identity
from noloco_node.transport.addresses import announced, check_port, parse, parse_bootstrap, worth_telling
from noloco_node.transport.bridge import SERVER_OPTIONS, Inbound, Outbound, Streams
from noloco_node.transport.daemon import Daemon, node_arguments, stranger_arguments
from noloco_node.transport.guard import Context, Guard
from noloco_node.transport.janitor import Runtime
from noloco_node.transport.orders import Orders

_log = logging.getLogger(__name__)

PROTOCOL = "noloco/grpc/1"
"""The libp2p protocol id. What runs inside such a stream is HTTP/2."""

_DIAL_S = 15.0  # to open a stream to a peer: finding its addresses, several of which may lead nowhere
_RETRY_S = 0.05  # a bootstrap peer is known about 0.1 s after the connection to it
_CONTROL_S = 5.0  # for p2pd to answer what it can answer by itself
_REFRESH_S = 15.0  # addresses change (a port is mapped, a relay is found), and this shows whether p2pd still answers
_MAX_CALLS = 256  # being answered at the same time, over all peers
_STOP_S = 2.0  # for calls that are being answered to end once they are cancelled


class Libp2pTransport:
    """See `transport/base.py` for what its methods promise."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        identity: Identity,
        listen: str,
        announce: Sequence[str] = (),
        bootstrap: Sequence[str] = (),
        startup_timeout_s: float = 60.0,
        gone_with_us: Sequence[Path] = (),
    ) -> None:
        """`gone_with_us`: files elsewhere that are removed when this process ends, however that is."""
        self.peer_id = identity.peer_id
        self._identity = identity
        self._listen = listen
        self._announce = [announced(address, identity.peer_id) for address in announce]
        self._bootstrap = {address: parse_bootstrap(address).peer for address in bootstrap}
        self._startup_timeout_s = startup_timeout_s
        self._gone_with_us = gone_with_us
        self._services: list[Callable[[grpc.aio.Server], None]] = []
        self._addresses: list[str] = []
        self._stack = AsyncExitStack()
        self._started: _Started | None = None

    @property
    def p2p(self) -> Any:
        """hivemind's `P2P`, joined to our daemon."""
        return self._parts.p2p

    def serve(self, add: Callable[[grpc.aio.Server], None]) -> None:
        self._services.append(add)

    async def start(self) -> None:
        try:
            self._started = await self._start()
        except (OSError, TimeoutError) as error:
            await self.close()
            raise NolocoError(f"p2pd, the network daemon, broke off while starting ({error!r}). Try again.") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._stack.aclose()

    def channel(self, peer: str) -> grpc.aio.Channel:
        return self._parts.outbound.channel(peer)

    def caller(self, context: Context) -> str:
        peer = self._parts.inbound.caller_of(context.peer())
        if peer is None:
            raise PeerLost("connection_lost")
        return peer

    def addresses(self) -> list[str]:
        return list(self._addresses)

    async def lost(self) -> str:
        """Returns when p2pd has died, saying how: from then on no call succeeds, and only a new transport helps."""
        return f"p2pd ended with status {await self._parts.daemon.exited()}"

    @property
    def _parts(self) -> "_Started":
        if self._started is None:
            raise RuntimeError("the transport has not been started")
        return self._started

    # The start: each part puts its own end on the stack, so that `close` undoes them in the opposite order.

    async def _start(self) -> "_Started":
        check_port(parse(self._listen))
        hivemind = _import_hivemind()
        runtime = await Runtime.open(*self._gone_with_us)
        self._stack.push_async_callback(runtime.close)
        await self._check_identity(runtime, hivemind)
        daemon = await self._start_daemon(runtime)
        orders = Orders(daemon.socket, hivemind.messages)
        p2p = await self._join_hivemind(runtime, daemon, hivemind)
        inbound = await self._start_server(runtime, orders, hivemind)
        outbound = Outbound(runtime.path, lambda peer: _dial(orders, peer))
        self._stack.push_async_callback(outbound.close)
        await self._refresh_addresses(orders, hivemind)
        watch = asyncio.create_task(self._watch(daemon, orders, hivemind))
        self._stack.push_async_callback(_cancelled, watch)
        return _Started(p2p, daemon, inbound, outbound)

    async def _check_identity(self, runtime: Runtime, hivemind: "_Hivemind") -> None:
        """Two nodes with one identity take each other's streams, so ask the swarm for ourselves, under another key."""
        if not self._bootstrap:
            return
        daemon = await Daemon.launch(runtime.path / "look.sock", stranger_arguments(list(self._bootstrap)))
        runtime.told(daemon.pid)
        try:
            await daemon.wait_ready(self._startup_timeout_s)
            if await _answers(Orders(daemon.socket, hivemind.messages), self.peer_id):
                raise IdentityInUse(
                    f"the identity {self._identity.path} is in use by a node that is running. "
                    "Stop that one, or give this one a NOLOCO_HOME of its own."
                )
        except SwarmUnreachable:
            if self._others:
                raise  # else the only address is our own, of an earlier start: this node is the first one
        finally:
            await daemon.stop()

    @property
    def _others(self) -> list[str]:
        return [address for address, peer in self._bootstrap.items() if peer != self.peer_id]

    async def _start_daemon(self, runtime: Runtime) -> Daemon:
        announce = [address.partition("/p2p/")[0] for address in self._announce]
        arguments = node_arguments(self._identity.path, self._listen, announce, self._others)
        daemon = await Daemon.launch(runtime.path / "p2pd.sock", arguments)
        self._stack.push_async_callback(daemon.stop)
        runtime.told(daemon.pid)
        await daemon.wait_ready(self._startup_timeout_s)
        return daemon

    async def _join_hivemind(self, runtime: Runtime, daemon: Daemon, hivemind: "_Hivemind") -> Any:
        ours = type("P2P", (hivemind.p2p,), {"_UNIX_SOCKET_PREFIX": f"/unix{runtime.path}/"})
        async with asyncio.timeout(_CONTROL_S):
            p2p = await ours.replicate(hivemind.multiaddr(f"/unix{daemon.socket}"))  # type: ignore[attr-defined]
        self._stack.push_async_callback(p2p.shutdown)
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(_seen)  # hivemind never looks, and asyncio would print a traceback when p2pd dies
        return p2p

    async def _start_server(self, runtime: Runtime, orders: Orders, hivemind: "_Hivemind") -> Inbound:
        async def admit(context: Context) -> None:
            if inbound.caller_of(context.peer()) is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "calls come through libp2p only")

        guard = Guard(admit)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard], maximum_concurrent_rpcs=_MAX_CALLS)
        for add in self._services:
            add(server)
        inbound = Inbound(server.add_insecure_port("127.0.0.1:0"), orders.read_caller)
        self._stack.push_async_callback(inbound.close)
        self._stack.push_async_callback(_stop, server)
        await server.start()
        path = runtime.path / "streams.sock"
        await inbound.listen(path)
        async with asyncio.timeout(_CONTROL_S):
            await orders.hand_over_streams(PROTOCOL, hivemind.multiaddr(f"/unix{path}").to_bytes())
        return inbound

    async def _watch(self, daemon: Daemon, orders: Orders, hivemind: "_Hivemind") -> None:
        """Keep the addresses fresh. A daemon that no longer answers is as good as dead, so it is made to be dead."""
        try:
            while True:
                await asyncio.sleep(_REFRESH_S)
                await self._refresh_addresses(orders, hivemind)
        except (OSError, TimeoutError) as error:
            _log.warning("p2pd, the network daemon, no longer answers: %r", error)
            await daemon.stop()

    async def _refresh_addresses(self, orders: Orders, hivemind: "_Hivemind") -> None:
        async with asyncio.timeout(_CONTROL_S):
            found = [str(hivemind.multiaddr(address)) for address in await orders.identify()]
        self._addresses = self._announce or [f"{address}/p2p/{self.peer_id}" for address in worth_telling(found)]


class _Started(NamedTuple):
    p2p: Any
    daemon: Daemon
    inbound: Inbound
    outbound: Outbound


class _Hivemind(NamedTuple):
    p2p: Any
    multiaddr: Any
    messages: Any


def _import_hivemind() -> _Hivemind:
    """It takes seconds and brings torch. That it renames a log level and adds a coloured handler is undone.

    Not in a thread, though it blocks the loop: the filters of warnings are the process's, and a second thread that
    imports torch meanwhile could find it half made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hivemind.p2p import P2P
        from hivemind.proto import p2pd_pb2
        from hivemind.utils.logging import use_hivemind_log_handler
        from hivemind.utils.multiaddr import Multiaddr
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    return _Hivemind(P2P, Multiaddr, p2pd_pb2)


async def _answers(orders: Orders, peer: str) -> bool:
    """Whether the swarm leads to a live peer of this id."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DIAL_S):
            while True:
                try:
                    await orders.connect(peer)
                    return True
                except OSError as error:
                    if "failed to find any peer in table" not in str(error):
                        return False
                await asyncio.sleep(_RETRY_S)  # p2pd is still getting to know the bootstrap peers, and cannot ask yet
    return False


async def _dial(orders: Orders, peer: str) -> Streams:
    async with asyncio.timeout(_DIAL_S):
        return await orders.open_stream(peer, PROTOCOL)


async def _stop(server: grpc.aio.Server) -> None:
    try:
        await asyncio.wait_for(server.stop(None), _STOP_S)
    except TimeoutError:
        _log.warning("a call that was being answered did not end when the transport closed")


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.debug("hivemind's connection to p2pd broke: %r", task.exception())


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
