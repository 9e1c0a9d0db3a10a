"""Carries gRPC's bytes between local sockets and libp2p streams.

Outbound, each peer has a unix socket in our private directory: a gRPC channel connects to it, and a libp2p stream to
the peer is opened for that connection. With a TCP port, any user of this machine could call peers under our peer id.
Inbound, each libp2p stream gets a connection to our gRPC server on loopback; a table maps the local address of that
connection to the peer id that libp2p proved. Any local process can connect to that port too, but it is not in the
table: see `caller_of`. How a libp2p stream is opened is not known here: `Outbound` is handed `dial`.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

from noloco_node.base.addresses import Address
from noloco_node.base.identity import is_peer_id
from noloco_node.base.latest import remember
from noloco_node.base.places import RELAYED, place_of
from noloco_node.transport.base import TAKEN_S, lenient
from noloco_node.transport.call_limits import MAX_REMEMBERED, SHUT_S
from noloco_node.wire.messages import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES

_log = logging.getLogger(__name__)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[str], Awaitable[Streams]]

BUFFER_BYTES = 1 << 18
"""What a reader buffers before its sender has to wait: large enough that Python does not run for every packet."""

_LOCAL_S = 5.0  # for local work only: a connection to our own server, the flush of a closed socket
_MAX_OF_PARTNER = 4  # connections; one is used, others are left from before a reconnect
_MAX_OF_STRANGER = 2
_MAX_INBOUND = 128  # connections in all; each costs three file descriptors
_FOR_PARTNERS = 32  # of these: strangers cannot take them, from however many places they come
_MAX_BEGINNING = 32  # more streams, of which it is not known yet who sends them
_MAX_CHANNELS = 256  # channels kept; an idle one costs a listening socket
_KEPT_S = 120.0  # an idle channel: peers come and go, and most of them do not come back
_KEPT_UNREACHED_S = 10.0  # one to a peer that was not there: those of the cache are called again and again

_STREAMS = 16  # per connection
MAX_RPCS = _MAX_INBOUND * _STREAMS
"""Above what connections can hold, as grpc counts refused calls too, until their callers have read it: who may call is
decided by transport/call_limits.py."""

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else another process of this user could receive some of our calls
    ("grpc.max_concurrent_streams", _STREAMS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # a stream that opens and then sends nothing
    # One without calls, else 32 identities could hold all connections. It is closed after one to two of these times.
    ("grpc.max_connection_idle_ms", 60_000),
    # gRPC would close the connection of who pings too often. But where that peer reads nothing, the connection stays,
    # and for each further ping gRPC copies what it has to say of all earlier ones: two connections took 0.3 of a core.
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    # A peer whose machine hangs is noticed after 20 + 40 s. If this were shorter, a slow link that is busy with a large
    # message would be taken for dead, because a ping waits behind it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 40_000),
    # Without calls the connection is closed after one to two of these times, which frees the peer's descriptors: before
    # the peer closes it, at which moment a call could be beginning.
    ("grpc.client_idle_timeout_ms", 30_000),
    ("grpc.initial_reconnect_backoff_ms", 500),
    # By default up to two minutes, in which every call fails at once. A peer, or our own p2pd, is back sooner, and
    # a peer that fails twice in a row is not called for a minute.
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.default_authority", "peer"),  # else the path of our unix socket, which may name the user
    ("grpc.enable_retries", 0),  # gRPC must not repeat a swap by itself
    ("grpc.use_local_subchannel_pool", 1),  # two nodes in one process (tests) must not share connections
]


class FarEnd(NamedTuple):
    """The other end of a stream: its peer id, which libp2p has proved, and where it is."""

    peer: str
    host: str
    """The IP address that its bytes come from; that of the relay, if there is one."""
    relay: str = ""
    """The relay's peer id."""
    quic: Address | None = None
    """The address and port that its bytes come from, over QUIC without a relay."""

    @property
    def relayed(self) -> bool:
        return bool(self.relay)

    @property
    def place(self) -> str:
        """As base/places.py names it. Of who comes over a relay, transport/relayed_places.py may know more."""
        return RELAYED if self.relay else place_of(self.host)


@dataclass(eq=False, slots=True)
class _Carried:
    """A connection from a peer, which is carried to our own server."""

    caller: FarEnd
    task: "asyncio.Task[None]"
    calls: int = 0
    """Being answered now."""


class _Carrier:
    """Owns the tasks that carry connections, and cancels them all at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self, carry: Coroutine[Any, Any, None], accepted: asyncio.StreamWriter) -> None:
        """Run `carry` in a task, and close `accepted` when it ends, even if it is cancelled before its first step."""
        task = self._own(carry)
        task.add_done_callback(lambda _: _abort(accepted))
        if self._closed:  # a connection that was being accepted while the listener closed
            task.cancel()

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Inbound(_Carrier):
    """libp2p streams from peers, each carried to a connection of our own gRPC server."""

    def __init__(
        self,
        port: int,
        read_caller: Callable[[asyncio.StreamReader], Awaitable[FarEnd]],
        is_partner: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_partner`: whether a peer's connections may take the places that are kept for partners."""
        super().__init__()
        self._is_partner = is_partner
        self._port = port
        self._read_caller = read_caller
        self._carried: dict[str, _Carried] = {}
        """By the server's name for the connection (`context.peer()`), the oldest first."""
        self._per_peer: Counter[str] = Counter()
        self._shut_out: dict[str, float] = {}
        """Peers that have no streams until then."""
        self._server: asyncio.Server | None = None

    def caller_of(self, connection: str) -> FarEnd | None:
        carried = self._carried.get(connection)
        return carried.caller if carried else None

    def answering(self, connection: str) -> Callable[[], None]:
        """A call is being answered on this connection, which is there, until what is returned is called."""
        carried = self._carried[connection]
        carried.calls += 1

        def ended() -> None:
            carried.calls -= 1

        return ended

    def shut_out(self, peer: str) -> None:
        """Close what this peer has, and take nothing of it for SHUT_S."""
        remember(self._shut_out, peer, asyncio.get_running_loop().time() + SHUT_S, MAX_REMEMBERED)
        for each in self._carried.values():
            if each.caller.peer == peer:
                each.task.cancel()

    async def listen(self, path: Path) -> None:
        """Accept streams at this unix socket, which outlives p2pd: each of its sessions hands its streams over here."""
        self._server = await asyncio.start_unix_server(self._accepted, path, limit=BUFFER_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await super().close()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MAX_INBOUND + _MAX_BEGINNING:
            writer.transport.abort()
        else:
            self._start(self._carry((reader, writer)), writer)

    async def _carry(self, stream: Streams) -> None:
        try:
            async with asyncio.timeout(_LOCAL_S):
                caller = await self._read_caller(stream[0])
            if self._shut_out.get(caller.peer, 0.0) > asyncio.get_running_loop().time():
                return
            mine = self._per_peer[caller.peer]
            most = _MAX_OF_PARTNER if self._is_partner(caller.peer) else _MAX_OF_STRANGER
            if mine < most and is_peer_id(caller.peer) and self._make_room(caller):
                await self._carry_for(caller, stream)
        except (OSError, TimeoutError) as error:
            _log.debug("an incoming stream ended: %r", error)

    def _make_room(self, caller: FarEnd) -> bool:
        """If all that the caller may take are taken, close a connection of the place that has most: one without a call,
        which its peer opens again when it wants to call, unless the caller has more; else one of who has more than the
        caller would have. Of these the oldest of the peer that has most."""
        there = [each for each in self._carried.values() if not each.task.cancelling()]
        strangers = [each for each in there if not self._is_partner(each.caller.peer)]
        beginning = self._per_peer.total() - len(self._carried)
        if not self._is_partner(caller.peer) and len(strangers) + beginning >= _MAX_INBOUND - _FOR_PARTNERS:
            there = strangers
        elif len(there) + beginning < _MAX_INBOUND:
            return True
        if not there:
            return False
        places = Counter(each.caller.place for each in there)
        peers = Counter(each.caller.peer for each in there)
        largest = max(there, key=lambda each: (places[each.caller.place], not each.calls, peers[each.caller.peer]))
        more_in_place = places[largest.caller.place] - places[caller.place]
        more_of_peer = peers[largest.caller.peer] - peers[caller.peer]
        if (more_in_place, more_of_peer) < (0, 0) if not largest.calls else more_in_place <= 1 and more_of_peer <= 1:
            return False
        largest.task.cancel()
        return True

    async def _carry_for(self, caller: FarEnd, stream: Streams) -> None:
        self._per_peer[caller.peer] += 1
        try:
            async with asyncio.timeout(_LOCAL_S):
                local = await asyncio.open_connection("127.0.0.1", self._port, limit=BUFFER_BYTES)
            host, port = local[1].get_extra_info("sockname")
            # The host is part of the name: another local process can have the same port on 127.0.0.2.
            name = f"ipv4:{host}:{port}"
            task = asyncio.current_task()
            assert task is not None
            self._carried[name] = _Carried(caller, task)
            # The name is removed before the port is free: the next process with that port is not this peer.
            await splice(stream, local, before_close=lambda: self._carried.pop(name), may_pass=Frames().may_pass)
        finally:
            self._per_peer -= Counter([caller.peer])


class Outbound(_Carrier):
    """gRPC channels to peers, one each, made at their first use."""

    def __init__(self, directory: Path, dial: Dial) -> None:
        super().__init__()
        self._directory = directory
        self._dial = dial
        self._outlets: dict[str, _Outlet] = {}

    def channel(self, peer: str) -> grpc.aio.Channel:
        now = asyncio.get_running_loop().time()
        wanted = self._outlets.pop(peer, None)
        self._make_room(now)
        if wanted is None:
            wanted = _Outlet(self._directory / f"{peer}.sock")
            wanted.server = asyncio.create_task(self._listen(peer, wanted))
        self._outlets[peer], wanted.used_at = wanted, now
        return wanted.channel

    def _make_room(self, now: float) -> None:
        """Drop channels without a connection, which grpc closes some time after the last call: those that nobody has
        wanted for long, and the oldest where there are too many."""
        idle = [peer for peer, outlet in self._outlets.items() if not outlet.connections]
        over = max(0, len(self._outlets) + 1 - _MAX_CHANNELS)
        for at, peer in enumerate(idle):
            kept_s = _KEPT_S if self._outlets[peer].reached else _KEPT_UNREACHED_S
            if at < over or now - self._outlets[peer].used_at > kept_s:
                outlet = self._outlets.pop(peer)
                self._own(outlet.close())

    async def _listen(self, peer: str, outlet: "_Outlet") -> asyncio.Server:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._start(self._carry(peer, outlet, (reader, writer)), writer)

        return await asyncio.start_unix_server(accepted, sock=outlet.listener, limit=BUFFER_BYTES)

    async def _carry(self, peer: str, outlet: "_Outlet", local: Streams) -> None:
        outlet.connections += 1
        outlet.reached = False
        try:
            stream = await self._dial(peer)
            outlet.reached = True
            await splice(stream, local, may_pass=Frames().may_pass)
        except (OSError, TimeoutError) as error:
            _log.debug("no stream to %s: %r", peer, error)  # grpc sees the connection close: UNAVAILABLE
        finally:
            outlet.connections -= 1
            if outlet.reached:  # grpc goes on trying to connect to a peer that is not there, without a call
                outlet.used_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        await asyncio.gather(*(outlet.close() for outlet in self._outlets.values()))
        self._outlets.clear()
        await super().close()


class _Outlet:
    """A channel to one peer and the socket that it connects to, which listens before a server accepts from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.connections = 0
        self.used_at = 0.0
        self.reached = True
        """Whether the peer was there when it was called last."""
        self.server: asyncio.Task[asyncio.Server]
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(str(path))
        self.listener.listen()
        self.channel = open_channel(f"unix:{path}")

    def close(self) -> Coroutine[Any, Any, None]:
        """The peer may have another one at once; to be awaited until calls have ended."""
        self._path.unlink(missing_ok=True)
        return self._close()

    async def _close(self) -> None:
        await self.channel.close(None)
        server = await self.server
        asyncio.get_running_loop().remove_reader(self.listener)
        await asyncio.sleep(0)  # what asyncio's server has just accepted would stay open, if it were closed before
        server.close()
        self.listener.close()


def open_channel(target: str) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    for kind in ("unary_unary", "unary_stream", "stream_stream"):
        setattr(channel, kind, partial(_leniently, getattr(channel, kind)))
    return channel


def _leniently(make: Callable[..., Any], method: str, *, response_deserializer: Any = None, **more: Any) -> Any:
    """A channel's method for one kind of call, which reads the replies with `lenient`."""
    return make(method, response_deserializer=lenient(response_deserializer), **more)


class Frames:
    """What a peer may send of HTTP/2, frame by frame; none of gRPC's own does otherwise.

    No headers until it has acknowledged our gRPC's settings: only from then on gRPC keeps its limit to headers, of 16
    kB. Before, it takes 16 MB, half a million fields, and hands all to Python: one such call, of 0.45 MB, stopped the
    event loop for a second and took 110 MB. gRPC itself acknowledges before its first call or answer.

    No headers that go on in a second frame: gRPC reads on for ever, beyond its limit, too. In 5 s one stream took a
    core, and 500 MB. What gRPC sends fits into one.

    Not many small frames: each costs gRPC and this process 0.5 µs, also one of 9 bytes that says nothing. 15 MB/s of
    those took a core. gRPC itself sends at most 300 a second that its bytes do not pay for, at 300 MB/s.
    """

    _PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # of who calls
    _HEADER, _HEADERS, _SETTINGS, _CONTINUATION, _ACK = 9, 1, 4, 9, 1
    _MOST_BYTES = 1 << 10  # before it acknowledges; gRPC sends 91
    _FRAMES_S, _AT_ONCE, _BYTES_EACH = 2000, 4000, 1 << 10  # and one more for so many bytes

    def __init__(self) -> None:
        self._begun = self._acknowledged = False
        self._spare, self._looked_at = float(self._AT_ONCE), time.monotonic()
        """Frames that may come now."""
        self._bytes = 0
        """Before it acknowledged."""
        self._head = b""
        """Of a frame that is not whole yet, the first bytes."""
        self._left = 0
        """Bytes of the present frame that have not come."""

    def may_pass(self, data: bytes) -> bool:
        """False where it has sent what it may not."""
        at, end, now = self._left, len(data), time.monotonic()
        self._spare = min(self._AT_ONCE, self._spare + (now - self._looked_at) * self._FRAMES_S)
        self._spare, self._looked_at = self._spare + end / self._BYTES_EACH, now
        while at < end:
            head = self._head + data[at : at + self._HEADER - len(self._head)]
            at += len(head) - len(self._head)
            self._head = head if len(head) < self._HEADER else b""
            if not self._head:
                at += self._size_of(head)
                self._spare -= 1
                if self._spare < 0:
                    return False
                match head[3], head[4]:
                    case self._SETTINGS, self._ACK:
                        self._acknowledged = True
                    case (self._CONTINUATION, _):
                        return False
                    case (self._HEADERS, _) if not self._acknowledged:
                        return False
        self._left = at - end
        self._bytes += 0 if self._acknowledged else end
        return self._bytes <= self._MOST_BYTES

    def _size_of(self, head: bytes) -> int:
        """Of what follows."""
        begins, self._begun = not self._begun, True
        if begins and self._PREFACE.startswith(head):
            return len(self._PREFACE) - self._HEADER
        return int.from_bytes(head[:3], "big")


def _may_pass(_data: bytes) -> bool:
    return True


async def splice(
    one: Streams,
    other: Streams,
    before_close: Callable[[], object] = lambda: None,
    may_pass: Callable[[bytes], bool] = _may_pass,
) -> None:
    """Copy bytes both ways until either end closes, then close both. A slow reader slows its sender. `may_pass`: asked
    about all that `one` sends; where it may not, that is the end."""
    ended = asyncio.Event()
    there, back = one[1].transport, other[1].transport
    sides = _Side(there, back, ended, may_pass), _Side(back, there, ended, _may_pass)
    try:
        for side in sides:
            side.begin()
        for side, (reader, _) in zip(sides, (one, other), strict=True):
            await side.pass_on_what_came(reader)
        await ended.wait()
    finally:  # without an await, so that a cancellation leaves nothing open
        for side in sides:
            side.end()
        before_close()
        _close(one[1])
        _close(other[1])


class _Side(asyncio.Protocol):
    """One of two connections: what comes here goes to the other. Stream readers and writers in its place copy each byte
    twice more, and wake a task for each read."""

    def __init__(self, mine: Any, others: Any, ended: asyncio.Event, may_pass: Callable[[bytes], bool]) -> None:
        """`mine`, `others`: the transports."""
        self._mine, self._others, self._ended, self._may_pass = mine, others, ended, may_pass
        self._refused = False
        self._late: asyncio.TimerHandle | None = None
        self._held: list[bytes] | None = []
        """What came since `begin`, while what its reader has is not passed on."""

    def begin(self) -> None:
        self._mine.set_protocol(self)
        if self._mine.is_closing():
            self._ended.set()
        else:
            self._mine.set_write_buffer_limits(BUFFER_BYTES, BUFFER_BYTES)

    async def pass_on_what_came(self, reader: asyncio.StreamReader) -> None:
        """To its reader, before `begin`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):  # it has all that will come there
                while data := await reader.read(BUFFER_BYTES):
                    self._pass_on(data)
                self._ended.set()
        held, self._held = self._held or [], None
        for data in held:
            self._pass_on(data)
        if self._others.get_write_buffer_size() > BUFFER_BYTES:  # the reader may have begun to read again
            self._others.get_protocol().pause_writing()

    def data_received(self, data: bytes) -> None:
        if self._held is None:
            self._pass_on(data)
        else:
            self._held.append(data)

    def _pass_on(self, data: bytes) -> None:
        self._refused = self._refused or not self._may_pass(data)  # more may come before the end is seen
        if self._refused:
            self._ended.set()
        elif not self._others.is_closing():  # uvloop raises where the other end has just been lost
            self._others.write(data)

    def pause_writing(self) -> None:
        """Too much waits here: take nothing more from the other end."""
        with suppress(RuntimeError):  # it is closed
            self._others.pause_reading()
        self.end()
        self._late = asyncio.get_running_loop().call_later(TAKEN_S, self._ended.set)  # its calls end then, too

    def resume_writing(self) -> None:
        self.end()
        with suppress(RuntimeError):
            self._others.resume_reading()

    def eof_received(self) -> bool:
        self._ended.set()
        return True  # what waits here to be sent is sent

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()  # a reset is an end like any other: gRPC knows whether its call was complete

    def end(self) -> None:
        """Nothing is waited for any more."""
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _close(writer: asyncio.StreamWriter) -> None:
    """Send what is buffered, for `_LOCAL_S` at most, then close the socket in any case."""
    writer.close()
    if writer.transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(_LOCAL_S, _abort_unsent, writer)


def _abort_unsent(writer: asyncio.StreamWriter) -> None:
    if writer.transport.get_write_buffer_size():
        writer.transport.abort()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Unless it is sending what is left, before it closes."""
    if not writer.transport.is_closing():
        writer.transport.abort()
