"""The control service: a gRPC server on the home's unix socket.

Anyone who can open the socket can control the node, so its mode (0600) is the whole of the access control. What the
node must offer is `NodeView`; node/base.py does.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from noloco_node.base.identity import is_peer_id
from noloco_node.errors import UsageError
from noloco_node.host.config import LOG_LEVELS
from noloco_node.host.home import Home
from noloco_node.views.documents import to_json
from noloco_node.views.gather import GatherView
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeersView, PingView
from noloco_node.views.status import StatusView
from noloco_node.wire import control_pb2 as pb
from noloco_node.wire import control_pb2_grpc as rpc

Context = Any  # grpc.aio.ServicerContext

MAX_PAYLOAD = 1 << 20
"""Limit for a ping's payload, so that pings in a loop cost a link little."""
_GRACE_S = 1.0  # for answers under way when the socket closes


class NodeView(Protocol):
    """The part of a node that is used. Called on the event loop; what is no coroutine returns at once."""

    def status(self) -> StatusView: ...

    def peers(self) -> PeersView: ...

    def history(self) -> HistoryView: ...

    def leave(self) -> None:
        """Begin to leave cleanly; asking twice is fine."""

    async def pause(self) -> None:
        """No training and no swaps until `resume`, also after a restart; asking twice is fine."""

    async def resume(self) -> None: ...

    def log_level(self, level: str) -> None:
        """One of config.LOG_LEVELS."""

    def round_events(self) -> list[str]:
        """The latest of the rounds' state machine, one a line."""
        ...

    async def ping(self, peer: str, payload_bytes: int) -> PingView:
        """One round trip, in bounded time."""
        ...

    def gather(self, peers: int) -> AsyncGenerator[GatherView, None]:
        """Download the weights of so many others at most into files; the last view is done or failed."""
        ...


class ControlServicer(rpc.ControlServicer):
    def __init__(self, node: NodeView) -> None:
        self._node = node

    async def Status(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        return pb.View(json=to_json(self._node.status()))

    async def Peers(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        return pb.View(json=to_json(self._node.peers()))

    async def History(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        return pb.View(json=to_json(self._node.history()))

    async def Leave(self, _request: pb.Empty, _context: object) -> pb.Empty:  # noqa: N802 (the proto's name)
        self._node.leave()
        return pb.Empty()

    async def Pause(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        await self._node.pause()
        return pb.View(json=to_json(self._node.status()))

    async def Resume(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        await self._node.resume()
        return pb.View(json=to_json(self._node.status()))

    async def Ping(self, request: pb.PingRequest, context: Context) -> pb.View:  # noqa: N802 (the proto's name)
        if not is_peer_id(request.peer):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "")
        return pb.View(json=to_json(await self._node.ping(request.peer, min(request.payload_bytes, MAX_PAYLOAD))))

    async def Gather(self, request: pb.GatherRequest, _context: object) -> AsyncIterator[pb.View]:  # noqa: N802
        async with aclosing(self._node.gather(request.peers)) as views:
            async for view in views:
                yield pb.View(json=to_json(view))

    async def LogLevel(self, request: pb.LogLevelRequest, context: Context) -> pb.Empty:  # noqa: N802 (the proto's name)
        if request.level not in LOG_LEVELS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "")
        self._node.log_level(request.level)
        return pb.Empty()

    async def RoundEvents(self, _request: pb.Empty, _context: object) -> pb.Lines:  # noqa: N802 (the proto's name)
        return pb.Lines(lines=self._node.round_events())


@asynccontextmanager
async def serving(home: Home, node: NodeView) -> AsyncIterator[None]:
    """Answer on the home's socket. The caller holds the home's lock, so a socket there is a leftover."""
    server = grpc.aio.server()
    rpc.add_ControlServicer_to_server(ControlServicer(node), server)
    try:
        _bind(server, home)
        await server.start()
        yield
    finally:
        await server.stop(_GRACE_S)  # gRPC removes the file


def _bind(server: grpc.aio.Server, home: Home) -> None:
    """With umask, as a chmod alone would leave the socket open to everybody for a moment."""
    home.socket.unlink(missing_ok=True)
    before = os.umask(0o077)
    try:
        server.add_insecure_port(home.socket_url)
    except RuntimeError as error:  # gRPC says no more than that
        raise UsageError(
            f"cannot open the control socket {home.socket}: its file system must allow sockets. "
            "Name another directory with --home or NOLOCO_HOME"
        ) from error
    finally:
        os.umask(before)
    home.socket.chmod(0o600)
