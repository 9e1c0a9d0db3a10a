"""The control service's client: every verb that asks a running node goes through it.

It connects to the socket first, before gRPC is even imported, so that `status` without a node answers at once.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_node.errors import Incompatible, NolocoError, NoNodeRunning, UsageError
from noloco_node.host.home import Home
from noloco_node.views.documents import from_json
from noloco_node.views.gather import GatherView
from noloco_node.views.history import HistoryView
from noloco_node.views.peers import PeersView, PingView
from noloco_node.views.status import StatusView

if TYPE_CHECKING:
    import grpc.aio

T = TypeVar("T")

TIMEOUT_S = 5.0
"""A healthy node answers in milliseconds; one that is loading torch on a busy machine may need seconds."""
GATHER_SILENCE_S = 15.0
"""A node that collects states sends a view every half a second. After 20 s gRPC would take it for one that has gone."""
PING_TIMEOUT_S = 30.0
"""Longer than a node waits for a peer that does not answer."""
_KINDS = {kind.exit_code: kind for kind in NolocoError.__subclasses__() if kind.exit_code != NolocoError.exit_code}


class ControlClient:
    """Made by `connected`."""

    def __init__(self, channel: "grpc.aio.Channel", home: Home) -> None:
        from noloco_node.wire import control_pb2, control_pb2_grpc

        self._stub, self._pb = control_pb2_grpc.ControlStub(channel), control_pb2
        self._home = home

    async def status(self) -> StatusView:
        return from_json(StatusView, await self._view("Status"))

    async def peers(self) -> PeersView:
        return from_json(PeersView, await self._view("Peers"))

    async def history(self) -> HistoryView:
        return from_json(HistoryView, await self._view("History"))

    async def leave(self) -> None:
        await self._call("Leave")

    async def pause(self) -> StatusView:
        return from_json(StatusView, await self._view("Pause"))

    async def resume(self) -> StatusView:
        return from_json(StatusView, await self._view("Resume"))

    async def ping(self, peer: str, payload_bytes: int = 0) -> PingView:
        asked = self._pb.PingRequest(peer=peer, payload_bytes=payload_bytes)
        return from_json(PingView, str((await self._call("Ping", asked, PING_TIMEOUT_S)).json))

    async def gather(self, peers: int) -> AsyncIterator[GatherView]:
        """Yields views until one has `done`. Raises NolocoError with the node's failure text."""
        views = aiter(self._stub.Gather(self._pb.GatherRequest(peers=peers)))
        with self._faults():
            while True:
                try:
                    async with asyncio.timeout(GATHER_SILENCE_S):
                        view = from_json(GatherView, str((await anext(views)).json))
                except StopAsyncIteration:
                    raise nobody(self._home) from None
                except TimeoutError:
                    raise self._silent("deadline_exceeded") from None
                if view.failure:
                    raise _KINDS.get(view.exit_code, NolocoError)(view.failure)
                yield view
                if view.done:
                    return

    async def log_level(self, level: str) -> None:
        await self._call("LogLevel", self._pb.LogLevelRequest(level=level))

    async def round_events(self) -> list[str]:
        return list((await self._call("RoundEvents")).lines)

    async def _view(self, method: str) -> str:
        return str((await self._call(method)).json)

    async def _call(self, method: str, asked: Any = None, timeout_s: float = TIMEOUT_S) -> Any:
        with self._faults():
            return await getattr(self._stub, method)(self._pb.Empty() if asked is None else asked, timeout=timeout_s)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """gRPC's errors become ours."""
        import grpc.aio

        try:
            yield
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise self._silent("its connection was closed") from None  # by another call that had waited too long
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise nobody(self._home) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Incompatible(
                    f"the node in {self._home.root} is of an older version than this command: restart it"
                ) from None
            raise self._silent(error.code().name.lower()) from None

    def _silent(self, why: str) -> NolocoError:
        return NolocoError(f"the node in {self._home.root} does not answer ({why}): see {self._home.log}")


@asynccontextmanager
async def connected(home: Home) -> AsyncIterator[ControlClient]:
    """A client of the node that runs in `home`. Raises NoNodeRunning, or UsageError: none to ask from here."""
    _require_listener(home)
    import grpc.aio

    no_limit = [("grpc.max_receive_message_length", -1)]  # a rendezvous may list a hundred thousand peers
    async with grpc.aio.insecure_channel(home.socket_url, options=no_limit) as channel:
        yield ControlClient(channel, home)


async def ask(home: Home, question: Callable[[ControlClient], Awaitable[T]]) -> T:
    """A single one: `ask(home, ControlClient.status)`."""
    async with connected(home) as node:
        return await question(node)


def nobody(home: Home) -> NoNodeRunning | UsageError:
    if (holder := home.holder()) is not None:
        pid, _, machine = holder.partition(" on ")
        if machine:  # where a socket leads nowhere from here, for as long as the node runs
            return UsageError(f"the node in {home.root} runs on the machine {machine} (pid {pid}): ask there")
        return NoNodeRunning(f"the node in {home.root} (pid {pid}) is just starting or ending: try again in a moment")
    join = f"join{'' if home.remembered.is_file() else ' <invitation>'}{home.flag}"
    return NoNodeRunning(
        f"no node is running in {home.root}: start one with `noloco-node {join}`, "
        "or name the home of another with --home"
    )


def _require_listener(home: Home) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(TIMEOUT_S)
        try:
            plain.connect(str(home.socket))
        except PermissionError:
            raise home.not_ours() from None
        except OSError:  # no such file, refused (a leftover of a killed node), or a path too long for any node
            raise nobody(home) from None
