"""gRPC over libp2p streams, which p2pd provides: the daemon in hivemind's wheel.

p2pd proves the peer's id, encrypts, and finds a way through routers. This module starts it, again when it has ended
(`transport/p2pd/session.py`), and joins its streams to a gRPC server and to channels, which outlive it
(`transport/grpc_bridge.py`). The connections of hivemind's DHT go through the same daemon: `p2p` is for
`peers/directory.py`.

hivemind's `P2P.create` would start the daemon in our POSIX session, would not kill one that hangs, and has errors that
a user cannot act on. Nor are streams opened through hivemind (but by `transport/p2pd/control.py`): its calls leave a
socket open when they fail, and its handlers run in tasks that nothing keeps or cancels.
"""

import asyncio
import importlib.util
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import grpc
import grpc.aio

from noloco_node.base.addresses import Address, for_others
from noloco_node.base.identity import Identity
from noloco_node.base.latest import remember
from noloco_node.base.places import GONE, claimed
from noloco_node.errors import IdentityInUse, NolocoError, PeerLost, PortInUse, SwarmUnreachable, UsageError
from noloco_node.transport.call_limits import CallLimits
from noloco_node.transport.grpc_bridge import MAX_RPCS, SERVER_OPTIONS, FarEnd, Inbound, Outbound, Streams
from noloco_node.transport.hole_punching import HolePunching
from noloco_node.transport.interceptor import Context, Interceptor
from noloco_node.transport.observer import Observer
from noloco_node.transport.p2pd.cleanup import RuntimeDirectory
from noloco_node.transport.p2pd.process import START_S, node_arguments
from noloco_node.transport.p2pd.session import CONTROL_S, Hivemind, P2pdSession, cancelled, unless_broken
from noloco_node.transport.probe import check_port, free_port, is_free_for_udp, probe
from noloco_node.transport.reachability import AUTO, ONLY, OUTGOING, RELAYED, Reachability
from noloco_node.transport.relayed_places import RelayedPlaces
from noloco_node.transport.self_view import ClockSkew, SelfViewService
from noloco_node.wire.mirror_pb2_grpc import add_HolePunchingServicer_to_server, add_MirrorServicer_to_server

_log = logging.getLogger(__name__)

PROTOCOL = "noloco/grpc/1"
"""The libp2p protocol id. What runs inside such a stream is HTTP/2."""

_STREAMS = "streams.sock"  # in our private directory: p2pd connects to it for each stream from a peer
_DIAL_S = 15.0  # to open a stream to a peer: finding its addresses, several of which may lead nowhere
_PROBE_S = 2.0  # less than a ping of the directory may take
_RELAY_STARTS = 5  # of p2pd; the first one nearly always becomes a relay
_MAX_KNOWN = 4096  # peers of which something is remembered, the latest: twice what a directory knows of a run. One that
# is forgotten counts as a place of its own, of which a host with many identities would then have as many as it likes
_PLACE_S = 60.0  # for so long a peer is believed to be where it was: identities may go round many places once
_RECONNECT = 64  # of those that a new p2pd is connected to at once: the DHT and others' calls need a few
_STOP_S = 2.0  # for calls that are being answered to end once they are cancelled


class Libp2pTransport:
    """See `transport/base.py` for what its methods promise."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        identity: Identity,
        listen: Address,
        announce: Sequence[Address] = (),
        bootstrap: Sequence[Address] = (),
        seen: Sequence[Address] = (),
        remove_at_end: Sequence[Path] = (),
        relay: str = AUTO,
        serves_relay: bool = False,
        last_port: int = 0,
    ) -> None:
        """`seen`: peers to join and to be relayed through too, which nobody chose. So they are not believed in where
        others are, or whom to dial, and one alone not in where this node can be called. `remove_at_end`: files
        elsewhere that are removed when this process ends, even by `kill -9`. `relay`: whether to be called through one,
        AUTO, ONLY or OFF; `serves_relay`: whether to be one. `last_port`: where any port will do, this one if it is
        free."""
        self._hivemind = _import_hivemind()
        self.peer_id = identity.peer_id
        self._identity = identity
        self._any_port = not listen.port
        self._listen = replace(listen, port=listen.port or last_port)
        self._announce = [self._named(address) for address in announce]
        self._bootstrap = tuple(dict.fromkeys((*bootstrap, *seen)))
        self._remove_at_end = remove_at_end
        self._services: list[Callable[[grpc.aio.Server], None]] = []
        self.is_partner: Callable[[str], bool] = lambda _: False
        """For whom places are kept. Set before `start`."""
        self._relay = relay
        self._serves_relay = serves_relay
        helpers: dict[str, list[Address]] = {}
        for address in self._others:
            helpers.setdefault(address.peer, []).append(address)
        chosen = helpers.keys() & {address.peer for address in bootstrap}
        others = lambda: reversed(self._introduced)  # noqa: E731
        self._reach = Reachability(
            self.peer_id, relay, helpers, chosen, others, self.channel, self.place_of, self.may_answer
        )
        self_view = SelfViewService(self._far_end, self._find_connected)
        self.serve(lambda server: add_MirrorServicer_to_server(self_view, server))
        relays = chosen if relay == AUTO else ()
        self._punching = HolePunching(relays, self.channel, self._far_end, lambda: self._session.control)
        self.serve(lambda server: add_HolePunchingServicer_to_server(self._punching, server))
        self._relayed = RelayedPlaces(self.channel, chosen)
        self._call_limits = CallLimits()
        self._far_ends: dict[str, FarEnd] = {}
        """Of the last stream with each peer."""
        self._met_at: dict[str, float] = {}
        self._connected: dict[str, tuple[str, float]] = {}
        """The places of peers that p2pd was asked about, and when."""
        self._introduced: dict[str, Sequence[Address]] = {}
        self._stack = AsyncExitStack()
        self._started: _Parts | None = None
        self._latest: P2pdSession | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._has_quic = False
        """Whether p2pd listens for QUIC."""

    @property
    def p2p(self) -> Any:
        """hivemind's `P2P`, joined to our daemon; another one after `restart`."""
        return self._session.p2p

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

    def give_back(self, context: Context) -> None:
        """A call was worth what it cost: it does not count for the caller's minute."""
        peer = self.caller(context)
        self._call_limits.give_back(peer, self.place(context), self.is_partner(peer))

    def place(self, context: Context) -> str:
        """Where the caller is, as coarse as shares are counted (base/places.py)."""
        return self._relayed.place(self._far_end(context))

    def place_of(self, peer: str) -> str:
        """Where the last stream with a peer went; without one, where the peer says that it is, or its id. Of this node
        itself: where others can call it without a relay, which strangers share."""
        if peer == self.peer_id:
            return claimed(peer, [address for address in self.addresses() if not address.relay])
        if peer in self._far_ends:
            return self._relayed.place(self._far_ends[peer])
        return claimed(peer, self._introduced.get(peer, ()))

    def _far_end(self, context: Context) -> FarEnd:
        caller = self._parts.inbound.caller_of(context.peer())
        if caller is None:
            raise PeerLost("connection_lost")
        return caller

    def addresses(self) -> list[Address]:
        """Where others can call this node, each with its peer id."""
        own = self._announce or [replace(address, peer=self.peer_id) for address in for_others(self._found())]
        return self._reach.addresses(own)

    @property
    def listening_port(self) -> int:
        """On this machine, whichever port its router has for it. 0: not known, as in a node that does not listen."""
        return _same_port(self._listen, self._found()).port

    @property
    def reachable(self) -> str | None:
        """One of the verdicts of transport/reachability.py; None while it is not known."""
        return self._reach.verdict

    @property
    def skew(self) -> ClockSkew | None:
        """How far our clock is ahead of others', at least."""
        return self._reach.skew

    @property
    def can_be_called(self) -> bool:
        """Without a relay, as far as is known."""
        return self._reach.verdict not in (RELAYED, OUTGOING)

    def via(self, peer: str) -> str | None:
        """The route of the last stream with a peer, `direct` or `relayed`; None where there was none."""
        far_end = self._far_ends.get(peer)
        return far_end and ("relayed" if far_end.relayed else "direct")

    def met_at(self, peer: str) -> float | None:
        """When the last stream with a peer began, by the event loop's clock."""
        return self._met_at.get(peer)

    async def reaches(self, peer: str, addresses: Sequence[Address], within_s: int) -> bool:
        """Whether a stream to a peer can be opened, at these addresses where it is not connected to this node."""
        control = self._session.control
        try:
            async with asyncio.timeout(within_s):
                await self._punching.connect(peer, addresses)
                await control.connect(peer, addresses, within_s)
                stream, far_end = await control.open_stream(peer, PROTOCOL, within_s)
        except OSError:
            return False
        stream[1].transport.abort()
        self._note(far_end)
        return True

    async def may_answer(self, peer: str) -> bool:
        """False where a bootstrap peer is away. After each dial in vain p2pd waits longer before it dials again, and
        refuses requests to connect: two minutes after an outage of ten. So it is not asked while a plain connection
        fails."""
        helper = self._reach.helpers.get(peer, ())
        ways = [*helper, *self._introduced.get(peer, ())]
        if not helper or any(way.relay or way.transport != "tcp" for way in ways) or await self._find_connected(peer):
            return True
        return None in await asyncio.gather(*(probe(way, _PROBE_S) for way in ways), return_exceptions=True)

    async def place_seen(self, peer: str) -> str:
        """As `place_of`, for a peer that has asked something and may have had no stream of ours lately."""
        now = asyncio.get_running_loop().time()
        if now - self._met_at.get(peer, -inf) < _PLACE_S:
            return self.place_of(peer)
        place, asked_at = self._connected.get(peer, (GONE, -inf))
        if now - asked_at < _PLACE_S:
            return place
        if (far_end := await self._find_connected(peer)) is None:
            return GONE
        place = self._relayed.place(far_end)
        remember(self._connected, peer, (place, now), _MAX_KNOWN)
        return place

    async def _find_connected(self, peer: str) -> FarEnd | None:
        with suppress(OSError):
            async with asyncio.timeout(CONTROL_S):
                return await self._session.control.find_connected(peer)
        return None

    def introduce(self, peers: Mapping[str, Sequence[Address]]) -> None:
        """Remember where peers say that they can be reached."""
        for peer, addresses in peers.items():
            remember(self._introduced, peer, addresses, _MAX_KNOWN)

    async def lost(self) -> str:
        """Wait until p2pd has ended, and return how. From then on no call succeeds, until `restart`. Raises what ended
        a task of this transport, which is a defect of ours."""
        return await unless_broken(self._session.ended(), self._session.polling, self._keeping)

    async def restart(self) -> None:
        """Another p2pd in place of the one that was lost, with the same identity, and port where that is free.

        Services and channels stay. It succeeds without any peer, too: they are called when they are needed.
        """
        with _foreign_errors():
            await self._begin_again([])
        control = self._session.control
        latest = dict(list(self._introduced.items())[-_RECONNECT:])
        known = {**latest, **{helper: self._ways(ways) for helper, ways in self._reach.helpers.items()}}
        await asyncio.gather(*(control.try_connect(peer, addresses) for peer, addresses in known.items()))
        await self._reach.survey(control, self._found())

    @property
    def _parts(self) -> "_Parts":
        if self._started is None:
            raise RuntimeError("the transport has not been started")
        return self._started

    @property
    def _session(self) -> P2pdSession:
        if self._latest is None:
            raise RuntimeError("the transport has not been started")
        return self._latest

    # The start: each part pushes its own end onto the stack, so that `close` undoes them in the opposite order.

    async def _start(self) -> None:
        runtime = await RuntimeDirectory.open(*self._remove_at_end)
        self._stack.push_async_callback(runtime.close)
        observer = Observer(runtime, self._hivemind)
        await self._check_identity(observer)
        self._stack.push_async_callback(self._end_session)
        inbound = await self._start_server(runtime)
        outbound = Outbound(runtime.path, self._dial)
        self._stack.push_async_callback(outbound.close)
        self._stack.callback(self._relayed.close)
        self._stack.callback(self._punching.close)
        self._started = _Parts(runtime, observer, inbound, outbound)
        await self._begin_session(self._others)
        await self._reach.begin(self._session.control, self._found)
        if self._quic and not self._serves_relay:
            await self._begin_again(self._others)
            await self._reach.reserve(self._session.control)
        keeping = self._reach.keep(lambda: self._session.control, self._found, self._listen_for_quic)
        self._keeping = asyncio.create_task(keeping)
        self._stack.push_async_callback(cancelled, self._keeping)

    async def _begin_again(self, bootstrap: Sequence[Address]) -> None:
        self._listen = _same_port(self._listen, self._session.addresses)
        await self._session.end()
        await self._begin_session(bootstrap)

    async def _begin_session(self, bootstrap: Sequence[Address]) -> None:
        try:
            await self._begin(bootstrap)
        except PortInUse:  # another program took it between two of our p2pd, or since the last start
            if not (self._any_port and self._listen.port):
                raise
            check_port(any_port := replace(self._listen, port=0))  # not where it is the address that is gone
            self._listen = any_port
            await self._begin(bootstrap)

    async def _begin(self, bootstrap: Sequence[Address]) -> None:
        check_port(self._listen)
        if self._serves_relay and not self._listen.port:  # p2pd would take one for TCP and another one for QUIC
            self._listen = replace(self._listen, port=free_port(self._listen))
        if self._serves_relay and not is_free_for_udp(self._listen):
            _log.warning("nodes behind routers will swap over this relay: another program has its port for UDP")
        listen = [] if self._relay == ONLY else self._ways([self._listen])
        announce = [address.without_peers() for address in self._announce]
        arguments = node_arguments(
            self._identity.path, listen, announce, self._ways(bootstrap), relays=self._serves_relay
        )
        runtime, observer, *_ = self._parts
        self._has_quic = self._quic
        for start in range(_RELAY_STARTS):
            if start:
                await self._session.end()
            self._latest = await P2pdSession.begin(runtime, arguments, self._hivemind)
            if not self._serves_relay or await observer.has_relay(self.peer_id, self._from_here()):
                break
        else:
            _log.warning("this node forwards no calls to those behind routers: p2pd did not become a relay")
        async with asyncio.timeout(START_S):
            await self._session.control.hand_over_streams(PROTOCOL, runtime.path / _STREAMS)

    @property
    def _quic(self) -> bool:
        """Whether a p2pd that begins now listens for QUIC, too, and dials the bootstrap peers over it: as a relay, and
        where no peer can call this node. Others do without: on a fast link it takes twice the CPU of TCP (on loopback
        94 MB/s instead of 147, though it has none of the windows of rounds/link.py), and it cannot tell a port at which
        nobody listens from a peer that is slow."""
        return self._serves_relay or (self._relay == AUTO and not self.can_be_called)

    def _listen_for_quic(self) -> None:
        """Where it is found out later that no peer can call this node: its rendezvous was away or busy at the start, or
        its router maps the port no longer."""
        if self._quic and not self._has_quic:
            self._session.kill("no peer can call this node, so the next one listens for QUIC, too")

    def _ways(self, addresses: Iterable[Address]) -> list[Address]:
        """Those of this node and of its bootstrap peers, with QUIC's."""
        return [each for address in addresses for each in (address.both if self._quic else [address])]

    def _from_here(self) -> Sequence[Address]:
        """Where this machine itself reaches p2pd. An announced address may work from outside only, or later."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._listen.host, self._listen.host)
        return [replace(self._listen, host=host)] if self._listen.port else self._session.addresses

    async def _end_session(self) -> None:
        if self._latest:
            await self._latest.end()

    async def _check_identity(self, observer: Observer) -> None:
        """Two nodes with one identity receive each other's streams: check whether our own is used already."""
        if not self._bootstrap:
            return
        try:
            taken = await observer.finds(self.peer_id, self._bootstrap)
        except SwarmUnreachable:
            if self._others:
                raise
            return  # the only address is our own, of an earlier start: this node is the first one
        if taken:
            raise IdentityInUse(
                f"the identity {self._identity.path} is in use by a node that is running. "
                "Stop that one, or give this one a NOLOCO_HOME of its own."
            )

    @property
    def _others(self) -> list[Address]:
        return [address for address in self._bootstrap if address.peer != self.peer_id]

    def _named(self, address: Address) -> Address:
        """One to announce, with our peer id."""
        if address.port == 0 or address.peer not in ("", self.peer_id):
            raise UsageError(f"'{address}' cannot be announced: it needs a port of its own, and no other peer's id")
        return replace(address, peer=self.peer_id)

    async def _start_server(self, runtime: RuntimeDirectory) -> Inbound:
        async def admit(context: Context) -> None:
            far_end = inbound.caller_of(context.peer())
            if far_end is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "calls come through libp2p only")
                return
            who = far_end.peer, self._relayed.place(far_end), self.is_partner(far_end.peer)
            if not limits.begin(*who, now := asyncio.get_running_loop().time()):
                if limits.is_flood(*who, now):
                    inbound.shut_out(far_end.peer)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
            context.add_done_callback(lambda _: limits.end(*who))
            ended = inbound.answering(context.peer())
            context.add_done_callback(lambda _: ended())

        limits, guard = self._call_limits, Interceptor(admit)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard], maximum_concurrent_rpcs=MAX_RPCS)
        for add in self._services:
            add(server)
        inbound = Inbound(server.add_insecure_port("127.0.0.1:0"), self._read_caller, self.is_partner)
        self._stack.push_async_callback(inbound.close)
        self._stack.push_async_callback(_stop, server)
        await server.start()
        await inbound.listen(runtime.path / _STREAMS)
        return inbound

    def _found(self) -> Sequence[Address]:
        return self._latest.addresses if self._latest else ()

    async def _read_caller(self, reader: asyncio.StreamReader) -> FarEnd:
        caller = await self._session.control.read_caller(reader)
        self._note(caller)
        return caller

    def _note(self, far_end: FarEnd) -> None:
        # a crowd of callers does not make us believe what our own peers say of where they are
        remember(self._far_ends, far_end.peer, far_end, _MAX_KNOWN, keep=self._introduced)
        self._relayed.met(far_end)
        remember(self._met_at, far_end.peer, asyncio.get_running_loop().time(), _MAX_KNOWN)

    async def _dial(self, peer: str) -> Streams:
        """A stream to a peer: by the addresses that it has published, and that were given for a bootstrap peer, which a
        p2pd that was started again is not told; or else by those that p2pd finds."""
        control = self._session.control
        async with asyncio.timeout(_DIAL_S):
            if not await self.may_answer(peer):
                raise ConnectionError("a bootstrap peer that is away")
            known = [*self._introduced.get(peer, ()), *self._ways(self._reach.helpers.get(peer, ()))]
            if known:
                await self._punching.connect(peer, known)
                await control.try_connect(peer, known)
            stream, far_end = await control.open_stream(peer, PROTOCOL)
        self._note(far_end)
        return stream


class _Parts(NamedTuple):
    """What outlives a session of p2pd."""

    runtime: RuntimeDirectory
    observer: Observer
    inbound: Inbound
    outbound: Outbound


@contextmanager
def _workers_are_forks() -> Iterator[None]:
    """hivemind makes a semaphore as it is imported. Where workers are no forks, which is the default from Python 3.14
    on, it would have a name, and a process of its own that complains on stderr when this one ends. Raises
    NolocoError where none can be made."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    except OSError as error:
        raise NolocoError(f"cannot import hivemind: {error}. Is /dev/shm there, and may this user write it?") from error
    finally:
        multiprocessing.set_start_method(chosen, force=True)


def _import_hivemind() -> Hivemind:
    """Without torch, which a rendezvous and who only looks have no use for: 1 s of CPU and 150 MB. It renames a log
    level and adds a coloured handler: both are undone.

    Before anything is started, since it blocks the event loop, and so the signals that the loop handles. Not in a
    thread: warning filters belong to the process, and a second thread that imports a part meanwhile could find it half
    initialised.
    """
    with (
        warnings.catch_warnings(),
        _workers_are_forks(),
        _parts_of("hivemind"),
        _parts_of("hivemind.utils") as utils,
        _parts_of("hivemind.dht"),
    ):
        warnings.simplefilter("ignore")
        from hivemind.utils.logging import get_logger, use_hivemind_log_handler
        from hivemind.utils.serializer import MSGPackSerializer, SerializerBase
        from hivemind.utils.timed_storage import get_dht_time

        vars(utils).update(  # which the modules below take from there
            get_logger=get_logger,
            get_dht_time=get_dht_time,
            MSGPackSerializer=MSGPackSerializer,
            SerializerBase=SerializerBase,
        )
        from hivemind.dht.node import DHTNode  # noqa: F401 - brings all that peers/ imports
        from hivemind.p2p import P2P
        from hivemind.proto import p2pd_pb2
        from hivemind.utils.multiaddr import Multiaddr
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    return Hivemind(P2P, Multiaddr, p2pd_pb2)


@contextmanager
def _parts_of(package: str) -> Iterator[ModuleType]:
    """Importing a part of it runs not what the package itself does, unless that is done: hivemind's imports its
    optimizers and with them scipy, 0.3 s and 46 MB; that of its utilities imports torch."""
    if package in sys.modules:
        yield sys.modules[package]
        return
    spec = importlib.util.find_spec(package)
    assert spec
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        yield sys.modules[package]
    finally:
        del sys.modules[package]  # who imports the package later gets it whole


def _same_port(listen: Address, found: Sequence[Address]) -> Address:
    """Where to listen next time: if any port was allowed, on the one that the first p2pd used, which others know."""
    hosts = (listen.host, "127.0.0.1", "::1")
    ports = (address.port for address in found if address.host in hosts)
    return replace(listen, port=listen.port or next(ports, 0))


@contextmanager
def _foreign_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:  # the second is hivemind's, where p2pd ends in the middle of an answer
        raise NolocoError(f"p2pd, the network daemon, broke off while starting ({error!r}). Try again.") from error


async def _stop(server: grpc.aio.Server) -> None:
    try:
        async with asyncio.timeout(_STOP_S):
            await server.stop(None)
    except TimeoutError:
        _log.warning("a call that was being answered did not end when the transport closed")
