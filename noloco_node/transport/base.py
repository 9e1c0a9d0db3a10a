"""What every transport promises to the code above it, which knows peers by their ids and speaks gRPC to them.

The receivers declare the few methods that they call (`channel`, `caller`, `place` ...), so another stack may take
libp2p's place without a change above. The contract suite in tests/transport checks, for libp2p and for the in-memory
network of the tests:
- `caller(context)` is the peer id that the transport has proved, never what a peer said of itself;
- `place(context)` is where the bytes of the caller come from, as base/places.py names it;
- every failure of the other side ends a call with a status code (UNAVAILABLE, RESOURCE_EXHAUSTED ...);
- a call that has a timeout ends by then on both sides, whatever the network does;
- a sender that is faster than its receiver is made to wait;
- `channel(peer)` is cheap and may drop an idle channel: ask for it at each use;
- `close` ends every call in both directions, and may be called more than once.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from noloco_node.errors import PeerLost
from noloco_node.wire import varint

T = TypeVar("T")

HUNG_UP = "hung_up"
"""The reason of a PeerLost: the other end ended the stream."""
TOO_MANY = "resource_exhausted"
"""... it has answered as many calls as it wants to."""
TAKEN_S = 240.0
"""How long a caller may take to read one message. As much as 6 MB may lie in buffers before it: at the slowest rate
that a volunteer can set (host/limits.py), they are read in 190 s."""


@contextmanager
def peer_faults() -> Iterator[None]:
    """What grpc raises for a call becomes `PeerLost` with the status code as its reason.

    grpc.aio raises `CancelledError` not only when our own task is cancelled but also when the *peer* answers with the
    status CANCELLED. Let through, that would look like our own shutdown to every task group above.
    """
    import grpc.aio  # late: importing grpc reads its environment variables, which the command line sets first

    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PeerLost(error.code().name.lower()) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLost("cancelled") from None


async def connected(call: Any, within_s: float) -> None:
    """Until there is a connection over which a call that was made goes. Raises PeerLost."""
    try:
        async with asyncio.timeout(within_s):
            with peer_faults():
                await call.wait_for_connection()
    except TimeoutError:
        raise PeerLost("silent", f"no connection in {within_s:g} s") from None


async def next_message(stream: AsyncIterator[T], within_s: float) -> T:
    """The peer's next one. Raises PeerLost."""
    try:
        async with asyncio.timeout(within_s):
            with peer_faults():
                return await anext(stream)
    except TimeoutError:
        raise PeerLost("silent", f"no message for {within_s:g} s") from None
    except StopAsyncIteration:
        raise PeerLost(HUNG_UP) from None


@contextmanager
def taken(within_s: float = math.inf, gives_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While a message waits for the other end to read it. One that never reads would hold the call, and its answer in
    memory, for ever: after TAKEN_S, or sooner, the present task is cancelled, and `gives_up` called before."""
    timer = _cancel_later(asyncio.current_task(), within_s, gives_up)
    try:
        yield
    finally:
        timer.cancel()


def taken_to_the_end(call: "asyncio.Task[Any] | None") -> None:
    """The same from now on until that task is over."""
    timer = _cancel_later(call)
    if call:
        call.add_done_callback(lambda _: timer.cancel())


def _cancel_later(
    call: "asyncio.Task[Any] | None", within_s: float = math.inf, gives_up: Callable[[], None] = lambda: None
) -> asyncio.TimerHandle:
    def end() -> None:
        gives_up()
        if call:
            call.cancel()

    return asyncio.get_running_loop().call_later(min(TAKEN_S, within_s), end)


def lenient(from_string: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Bytes that are no message, or one of too many fields, are read as one without fields, which whoever uses it
    refuses, as it would refuse one that a peer sent so. grpc would log a traceback for each, and hand a caller None for
    the peer's answer."""
    if from_string is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return from_string(data if varint.has_few_fields(data) else b"")
        except DecodeError:
            return from_string(b"")

    return read
