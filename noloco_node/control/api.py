"""The control service: a gRPC server on the home's unix socket, over whatever can say how the node is.

Who may open the socket may control the node, so its mode (0600) is the whole of the access control. Knows nothing of
node.py: it declares what it needs.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
import grpc.aio

from noloco_node.control.views import PeersView, StatusView, to_json
from noloco_node.errors import UsageError
from noloco_node.home import Home
from noloco_node.wire import control_pb2 as pb
from noloco_node.wire import control_pb2_grpc as rpc

_GRACE_S = 1.0  # answers under way get so long when the socket closes


class NodeView(Protocol):
    """What the service asks of a node. Called on the event loop; each returns at once."""

    def status(self) -> StatusView: ...

    def peers(self) -> PeersView: ...

    def leave(self) -> None:
        """Begin to leave cleanly; asking twice is fine."""

    def pause(self) -> None:
        """Train and exchange no more until `resume`; asking twice is fine."""

    def resume(self) -> None: ...


class ControlServicer(rpc.ControlServicer):
    def __init__(self, node: NodeView) -> None:
        self._node = node

    async def Status(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        return pb.View(json=to_json(self._node.status()))

    async def Peers(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        return pb.View(json=to_json(self._node.peers()))

    async def Leave(self, _request: pb.Empty, _context: object) -> pb.Empty:  # noqa: N802 (the proto's name)
        self._node.leave()
        return pb.Empty()

    async def Pause(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        self._node.pause()
        return pb.View(json=to_json(self._node.status()))

    async def Resume(self, _request: pb.Empty, _context: object) -> pb.View:  # noqa: N802 (the proto's name)
        self._node.resume()
        return pb.View(json=to_json(self._node.status()))


@asynccontextmanager
async def serving(home: Home, node: NodeView) -> AsyncIterator[None]:
    """Answer on the home's socket while the context lasts. The caller holds the lock: a file there is a leftover."""
    server = grpc.aio.server()
    rpc.add_ControlServicer_to_server(ControlServicer(node), server)
    try:
        _bind(server, home)
        await server.start()
        yield
    finally:
        await server.stop(_GRACE_S)  # gRPC removes the file


def _bind(server: grpc.aio.Server, home: Home) -> None:
    """Bind with the mode right from the first instant: a chmod alone would leave a moment open to everybody."""
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
