"""One direction of one call over a `MemoryNetwork`. Links, delay and loss are known here only as `Carry`."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import grpc

_WINDOW = 4
"""Messages of one stream that may be under way or unread; then the sender waits. HTTP/2 has a limit in bytes."""

Carry = Callable[[int, Callable[[], None]], bool]
"""`carry(size_bytes, arrive)` calls `arrive` at the other end, later; it returns false if the message is lost."""


class Status(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""


class Stream:
    """In order and bounded; after a lost message, nothing more arrives.

    Its end is what is read from it last, as often as one asks: `None` after requests, a `Status` after replies.
    """

    def __init__(self, carry: Carry) -> None:
        self._carry = carry
        self._unread: deque[bytes] = deque()
        self._end: tuple[Status | None] | None = None
        self._outstanding = 0
        self._silent = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    # At the sender.

    async def send(self, message: bytes) -> None:
        while self._outstanding >= _WINDOW:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        self._outstanding += 1
        self.post(lambda: self._arrived(message), len(message))

    def post(self, arrive: Callable[[], None], size_bytes: int = 0) -> None:
        """Let something happen at the other end once what was sent before has arrived there."""
        if not self._silent:
            self._silent = not self._carry(size_bytes, arrive)

    # At the receiver.

    def _arrived(self, message: bytes) -> None:
        if self._end is None:
            self._unread.append(message)
            _wake(self._reader)

    def end(self, last: Status | None, at_once: bool = False) -> None:
        """Nothing more will be read after what is there; `at_once` drops that too."""
        if at_once:
            self._unread.clear()
        if self._end is None:
            self._end = (last,)
        _wake(self._reader)

    async def receive(self) -> bytes | Status | None:
        while not self._unread:
            if self._end is not None:
                return self._end[0]
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._outstanding -= 1
        _wake(self._writer)
        return self._unread.popleft()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
