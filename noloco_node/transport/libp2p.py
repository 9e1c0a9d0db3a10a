"""gRPC carried on libp2p streams, which p2pd provides: the daemon in hivemind's wheel.

p2pd proves who is at the other end, encrypts, and finds a way through routers. This module starts it, again when it has
died (`transport/p2pd/session.py`), and joins its streams to a gRPC server and to channels, which outlive it
(`transport/grpc_bridge.py`). The connections of hivemind's DHT go through the same daemon: `p2p` is for
`peers/directory.py`.

The daemon is started here and not by hivemind's `P2P.create`, because it needs a session of its own, somebody who kills
it if need be, and errors that a user can act on. Streams are opened here too (`transport/p2pd/control.py`): hivemind's
calls leave a socket open when they fail, and its handlers run in tasks that nobody holds.
"""

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from noloco_node.base.addresses import announced, check_port, parse, parse_bootstrap, worth_telling
from noloco_node.base.identity import Identity
from noloco_node.errors import IdentityInUse, NolocoError, PeerLost, SwarmUnreachable
from noloco_node.transport.grpc_bridge import SERVER_OPTIONS, FarEnd, Inbound, Outbound, Streams
from noloco_node.transport.interceptor import Context, Interceptor
from noloco_node.transport.p2pd.cleanup import RuntimeDirectory
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.transport.p2pd.process import P2pdProcess, node_arguments, stranger_arguments
from noloco_node.transport.p2pd.session import CONTROL_S, Hivemind, P2pdSession, cancelled
from noloco_node.transport.reachability import AUTO, ONLY, OUTGOING, RELAYED, Reachability
from noloco_node.transport.relay import reserve
from noloco_node.transport.self_view import ClockSkew, SelfViewService
from noloco_node.wire.mirror_pb2_grpc import add_MirrorServicer_to_server

T = TypeVar("T")

_log = logging.getLogger(__name__)

PROTOCOL = "noloco/grpc/1"
"""The libp2p protocol id. What runs inside such a stream is HTTP/2."""

_STREAMS = "streams.sock"  # in our private directory: p2pd brings the streams of peers here
_DIAL_S = 15.0  # to open a stream to a peer: finding its addresses, several of which may lead nowhere
_CONNECT_S = 5.0  # of that for the addresses that the peer itself has given
_RETRY_S = 0.05  # a bootstrap peer is known about 0.1 s after the connection to it
_RELAY_TRIES = 4  # the first is nearly always enough
_MAX_KNOWN = 1024  # peers of which something is remembered, the latest
_MEET = 64  # of those that a new p2pd is connected to at once: the DHT and others' calls need a beginning
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
        relay: str = AUTO,
        serves_relay: bool = False,
    ) -> None:
        """`gone_with_us`: files elsewhere that are removed when this process ends, however that is. `relay`: whether to
        be called through one, AUTO, ONLY or OFF; `serves_relay`: whether to pass calls on to others."""
        self.peer_id = identity.peer_id
        self._identity = identity
        self._listen = listen
        self._announce = [announced(address, identity.peer_id) for address in announce]
        self._bootstrap = {address: parse_bootstrap(address).peer for address in bootstrap}
        self._startup_timeout_s = startup_timeout_s
        self._gone_with_us = gone_with_us
        self._services: list[Callable[[grpc.aio.Server], None]] = []
        self._relay = relay
        self._serves_relay = serves_relay
        helpers: dict[str, list[str]] = {}
        for address in self._others:
            helpers.setdefault(str(self._bootstrap[address]), []).append(address)
        self._reach = Reachability(self.peer_id, relay, helpers, lambda: reversed(self._introduced), self.channel)
        self.serve(lambda server: add_MirrorServicer_to_server(SelfViewService(self._far_end), server))
        self._ways: dict[str, str] = {}
        self._introduced: dict[str, Sequence[str]] = {}
        self._stack = AsyncExitStack()
        self._started: _Parts | None = None
        self._life: P2pdSession | None = None

    @property
    def p2p(self) -> Any:
        """hivemind's `P2P`, joined to our daemon; another one after `restart`."""
        return self._living.p2p

    def serve(self, add: Callable[[grpc.aio.Server], None]) -> None:
        self._services.append(add)

    async def start(self) -> None:
        try:
            with _foreign_errors():
                await self._start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._stack.aclose()

    def channel(self, peer: str) -> grpc.aio.Channel:
        return self._parts.outbound.channel(peer)

    def caller(self, context: Context) -> str:
        return self._far_end(context).peer

    def _far_end(self, context: Context) -> FarEnd:
        caller = self._parts.inbound.caller_of(context.peer())
        if caller is None:
            raise PeerLost("connection_lost")
        return caller

    def addresses(self) -> list[str]:
        own = self._announce or [f"{address}/p2p/{self.peer_id}" for address in worth_telling(self._found())]
        return self._reach.addresses(own)

    @property
    def reachable(self) -> str | None:
        """One of the verdicts of transport/reachability.py; None while it is not known."""
        return self._reach.verdict

    @property
    def skew(self) -> ClockSkew | None:
        """How far our clock is ahead of others', as far as that is beyond doubt."""
        return self._reach.skew

    @property
    def can_be_called(self) -> bool:
        """Without a relay, as far as is known."""
        return self._reach.verdict not in (RELAYED, OUTGOING)

    def via(self, peer: str) -> str | None:
        """How the last stream with a peer went, `direct` or `relayed`; None where there was none."""
        return self._ways.get(peer)

    def introduce(self, peers: Mapping[str, Sequence[str]]) -> None:
        """Where peers say that they can be reached, each address ending in /p2p/<its id>."""
        for peer, addresses in peers.items():
            _remember(self._introduced, peer, addresses)

    async def lost(self) -> str:
        """Returns when p2pd has died, saying how: from then on no call succeeds, until `restart`."""
        return await self._living.ended()

    async def restart(self) -> None:
        """Another p2pd in place of the one that was lost, with the same identity and port.

        Services, channels and whoever holds them stay. Nobody need be there: peers are called when they are wanted.
        """
        with _foreign_errors():
            self._listen = _same_port(self._listen, self._living.found)
            await self._living.end()
            await self._begin_life([])
        orders = self._living.orders
        latest = dict(list(self._introduced.items())[-_MEET:])
        known = {**latest, **self._reach.helpers}
        await asyncio.gather(*(_reconnect(orders, peer, addresses) for peer, addresses in known.items()))
        await self._reach.survey(orders, self._found())

    @property
    def _parts(self) -> "_Parts":
        if self._started is None:
            raise RuntimeError("the transport has not been started")
        return self._started

    @property
    def _living(self) -> P2pdSession:
        if self._life is None:
            raise RuntimeError("the transport has not been started")
        return self._life

    # The start: each part puts its own end on the stack, so that `close` undoes them in the opposite order.

    async def _start(self) -> None:
        check_port(parse(self._listen))
        hivemind = _import_hivemind()
        runtime = await RuntimeDirectory.open(*self._gone_with_us)
        self._stack.push_async_callback(runtime.close)
        await self._check_identity(runtime, hivemind)
        self._stack.push_async_callback(self._end_life)
        inbound = await self._start_server(runtime)
        outbound = Outbound(runtime.path, self._dial)
        self._stack.push_async_callback(outbound.close)
        self._started = _Parts(hivemind, runtime, inbound, outbound)
        await self._begin_life(self._others)
        await self._reach.begin(self._living.orders, self._found)
        keeping = asyncio.create_task(self._reach.keep(lambda: self._living.orders, self._found))
        self._stack.push_async_callback(cancelled, keeping)

    async def _begin_life(self, bootstrap: Sequence[str]) -> None:
        runtime = self._parts.runtime
        listen = None if self._relay == ONLY else self._listen
        announce = [address.partition("/p2p/")[0] for address in self._announce]
        arguments = node_arguments(self._identity.path, listen, announce, bootstrap, relays=self._serves_relay)
        for _ in range(_RELAY_TRIES):
            life = self._life = await P2pdSession.begin(
                runtime, arguments, self._parts.hivemind, self._startup_timeout_s
            )
            if not self._serves_relay or await self._is_a_relay(life):
                break
            await life.end()
        else:
            life = self._life = await P2pdSession.begin(
                runtime, arguments, self._parts.hivemind, self._startup_timeout_s
            )
            _log.warning("this node passes no calls on to those behind routers: p2pd did not become a relay")
        async with asyncio.timeout(CONTROL_S):
            await life.orders.hand_over_streams(PROTOCOL, runtime.path / _STREAMS)

    async def _is_a_relay(self, life: P2pdSession) -> bool:
        """p2pd always has a relay for 128 KiB a connection. The one that it is told to have replaces that or, by a race
        at the start, is replaced by it, and only another peer can see which of the two it became. It calls from here:
        what is announced may lead here from outside only, or once others know that we are ready."""
        async with self._stranger(self._parts.runtime, self._parts.hivemind, []) as orders:
            await _reconnect(orders, self.peer_id, _from_here(self._listen) or life.found)
            return await reserve(orders, self.peer_id)

    async def _end_life(self) -> None:
        if self._life:
            await self._life.end()

    async def _check_identity(self, runtime: RuntimeDirectory, hivemind: Hivemind) -> None:
        """Two nodes with one identity take each other's streams, so ask the swarm for ourselves, under another key."""
        if not self._bootstrap:
            return
        try:
            async with self._stranger(runtime, hivemind, list(self._bootstrap)) as orders:
                taken = await _answers(orders, self.peer_id)
        except SwarmUnreachable:
            if self._others:
                raise
            return  # the only address is our own, of an earlier start: this node is the first one
        if taken:
            raise IdentityInUse(
                f"the identity {self._identity.path} is in use by a node that is running. "
                "Stop that one, or give this one a NOLOCO_HOME of its own."
            )

    @asynccontextmanager
    async def _stranger(
        self, runtime: RuntimeDirectory, hivemind: Hivemind, bootstrap: Sequence[str]
    ) -> AsyncIterator[P2pdControl]:
        """Another p2pd for a moment, to see this node or the swarm as others do."""
        daemon = await P2pdProcess.launch(runtime.path / "look.sock", stranger_arguments(bootstrap))
        runtime.told(daemon.pid)
        try:
            await daemon.wait_ready(self._startup_timeout_s)
            yield P2pdControl(daemon.socket, hivemind.messages, hivemind.multiaddr)
        finally:
            await daemon.stop()
            daemon.socket.unlink(missing_ok=True)

    @property
    def _others(self) -> list[str]:
        return [address for address, peer in self._bootstrap.items() if peer != self.peer_id]

    async def _start_server(self, runtime: RuntimeDirectory) -> Inbound:
        async def admit(context: Context) -> None:
            if inbound.caller_of(context.peer()) is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "calls come through libp2p only")

        guard = Interceptor(admit)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard], maximum_concurrent_rpcs=_MAX_CALLS)
        for add in self._services:
            add(server)
        inbound = Inbound(server.add_insecure_port("127.0.0.1:0"), self._read_caller)
        self._stack.push_async_callback(inbound.close)
        self._stack.push_async_callback(_stop, server)
        await server.start()
        await inbound.listen(runtime.path / _STREAMS)
        return inbound

    def _found(self) -> Sequence[str]:
        return self._life.found if self._life else ()

    async def _read_caller(self, reader: asyncio.StreamReader) -> FarEnd:
        caller = await self._living.orders.read_caller(reader)
        self._note(caller)
        return caller

    def _note(self, far_end: FarEnd) -> None:
        _remember(self._ways, far_end.peer, "relayed" if far_end.relayed else "direct")

    async def _dial(self, peer: str) -> Streams:
        """A stream to a peer. Where it says that it is comes first; p2pd may know better."""
        orders = self._living.orders
        async with asyncio.timeout(_DIAL_S):
            if peer in self._introduced:
                await _reconnect(orders, peer, self._introduced[peer])
            stream, far_end = await orders.open_stream(peer, PROTOCOL)
        self._note(far_end)
        return stream


class _Parts(NamedTuple):
    """What lives as long as the transport, whatever becomes of p2pd."""

    hivemind: Hivemind
    runtime: RuntimeDirectory
    inbound: Inbound
    outbound: Outbound


def _import_hivemind() -> Hivemind:
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
    return Hivemind(P2P, Multiaddr, p2pd_pb2)


async def _answers(orders: P2pdControl, peer: str) -> bool:
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


def _remember(known: dict[str, T], peer: str, what: T) -> None:
    known.pop(peer, None)
    known[peer] = what
    if len(known) > _MAX_KNOWN:
        del known[next(iter(known))]


async def _reconnect(orders: P2pdControl, peer: str, addresses: Sequence[str]) -> None:
    """Be connected to a peer, if it is there."""
    with suppress(OSError):
        async with asyncio.timeout(_CONNECT_S):
            await orders.connect(peer, addresses)


def _from_here(listen: str) -> list[str]:
    """Where this machine itself reaches p2pd; nothing where the port is p2pd's choice."""
    if parse(listen).port == 0:
        return []
    return [listen.replace("/ip4/0.0.0.0/", "/ip4/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")]


def _same_port(listen: str, found: Sequence[str]) -> str:
    """What to listen on next time: a port that was free for the first p2pd is the one that others know."""
    way, _, port = listen.rpartition("/")
    hosts = (parse(listen).host, "127.0.0.1", "::1")
    ports = (words[4] for text in found if (words := text.split("/"))[2] in hosts and words[3] == "tcp")
    return listen if port != "0" else f"{way}/{next(ports, port)}"


@contextmanager
def _foreign_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError) as error:
        raise NolocoError(f"p2pd, the network daemon, broke off while starting ({error!r}). Try again.") from error


async def _stop(server: grpc.aio.Server) -> None:
    try:
        await asyncio.wait_for(server.stop(None), _STOP_S)
    except TimeoutError:
        _log.warning("a call that was being answered did not end when the transport closed")
