"""The seam between this program and a network of peers: gRPC calls to a peer id, and who calls us.

Everything above knows only `Transport` and the stubs generated from proto/. It does not know libp2p, sockets, or
addresses other than as text, and another stack may take libp2p's place below without a change above.

What both implementations promise, and the contract suite in tests/transport checks:
- `caller(context)` is what the transport has proved, never what a peer said of itself;
- every failure of the other side ends a call with a status code (UNAVAILABLE, RESOURCE_EXHAUSTED ...);
- a call that has a timeout ends by then on both sides, whatever the network does;
- a sender that is faster than its receiver is made to wait.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from noloco_node.errors import PeerLost

if TYPE_CHECKING:  # importing grpc reads its environment variables, which the command line sets first
    import grpc.aio

MAX_MESSAGE_BYTES = 8 << 20
"""A message is held whole in memory on both sides; the largest that we send is a fragment of 4 MiB and its envelope."""


class Transport(Protocol):
    @property
    def peer_id(self) -> str: ...

    def serve(self, add: Callable[["grpc.aio.Server"], None]) -> None:
        """Add a service; before `start`. `add` is `lambda server: add_ExchangeServicer_to_server(servicer, server)`."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Ends every call in both directions and frees everything. May be called more than once."""

    def channel(self, peer: str) -> "grpc.aio.Channel":
        """The channel to a peer, made when first asked for. Ask for it at each use: an idle one may be dropped."""

    def caller(self, context: "grpc.aio.ServicerContext[Any, Any]") -> str:
        """The peer id behind a call that a servicer is answering. Unknown callers never reach a servicer."""

    def addresses(self) -> list[str]:
        """Multiaddrs that others can dial, each ending in /p2p/<peer id>."""


@contextmanager
def peer_faults() -> Iterator[None]:
    """What grpc raises for a call becomes `PeerLost` with the status code as its reason.

    grpc.aio raises `CancelledError` not only when our own task is cancelled but also when the *peer* answers with the
    status CANCELLED. Let through, that would look like our own shutdown to every task group above.
    """
    import grpc.aio

    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PeerLost(error.code().name.lower()) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLost("cancelled") from None
