"""The control service's client: what every verb that looks at a running node goes through.

First a plain connect tells whether anybody is there, so that `status` without a node answers before gRPC is even
imported.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from noloco_node.control.views import PeersView, StatusView, peers_from_json, status_from_json
from noloco_node.errors import NolocoError, NoNodeRunning, UsageError
from noloco_node.home import Home

if TYPE_CHECKING:
    import grpc.aio

TIMEOUT_S = 5.0
"""A healthy node answers in milliseconds; one that is loading torch on a busy machine may need seconds."""


class ControlClient:
    """Made by `connected`."""

    def __init__(self, channel: "grpc.aio.Channel", home: Home) -> None:
        from noloco_node.wire.control_pb2_grpc import ControlStub

        self._stub = ControlStub(channel)
        self._home = home

    async def status(self) -> StatusView:
        return status_from_json(await self._view("Status"))

    async def peers(self) -> PeersView:
        return peers_from_json(await self._view("Peers"))

    async def leave(self) -> None:
        await self._call("Leave")

    async def pause(self) -> StatusView:
        return status_from_json(await self._view("Pause"))

    async def resume(self) -> StatusView:
        return status_from_json(await self._view("Resume"))

    async def _view(self, method: str) -> str:
        return str((await self._call(method)).json)

    async def _call(self, method: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 (a generated message)
        import grpc
        import grpc.aio

        from noloco_node.wire.control_pb2 import Empty

        try:
            return await getattr(self._stub, method)(Empty(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise nobody(self._home) from None
            raise NolocoError(
                f"the node in {self._home.root} does not answer ({error.code().name.lower()}): see {self._home.log}"
            ) from None


@asynccontextmanager
async def connected(home: Home) -> AsyncIterator[ControlClient]:
    """A client of the node that runs in `home`. Raises NoNodeRunning."""
    _knock(home)
    import grpc.aio

    async with grpc.aio.insecure_channel(home.socket_url) as channel:
        yield ControlClient(channel, home)


def nobody(home: Home) -> NoNodeRunning:
    pid = home.holder()
    if pid is not None:
        return NoNodeRunning(f"the node in {home.root} (pid {pid}) is just starting or ending: try again in a moment")
    return NoNodeRunning(
        f"no node is running in {home.root}: start one with `noloco-node join --bootstrap <address>`, "
        "or name the home of another with --home"
    )


def _knock(home: Home) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(TIMEOUT_S)
        try:
            plain.connect(str(home.socket))
        except PermissionError:
            raise UsageError(f"the node in {home.root} belongs to another user: ask as that user") from None
        except OSError:  # no such file, refused (a leftover of a killed node), or a path too long for any node
            raise nobody(home) from None
