"""One life of p2pd: the process, the orders to it, hivemind's `P2P` over it, and how its death is noticed.

A death by a signal is seen at once. A p2pd that hangs is asked who it is, and when it has twice not answered it is made
to be dead: one miss may be a machine that is busy. transport/libp2p.py begins a new life after that.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from noloco_node.transport.p2pd.cleanup import RuntimeDirectory
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.transport.p2pd.process import P2pdProcess

_log = logging.getLogger(__name__)

CONTROL_S = 5.0
"""For p2pd to answer what it can answer by itself, when nothing else waits for it."""
_ASK_EVERY_S, _ANSWER_S, _MISSES = 1.0, 1.4, 2
"""A hang is noticed after 2 · (1 + 1.4) s at most, so within 5 s."""


class Hivemind(NamedTuple):
    """What is used of it, handed in: importing it takes seconds and brings torch."""

    p2p: Any
    multiaddr: Any
    messages: Any


class P2pdSession:
    """Made by `begin`; whoever begins one also ends it."""

    def __init__(self, daemon: P2pdProcess, orders: P2pdControl) -> None:
        self.daemon = daemon
        self.orders = orders
        self.p2p: Any = None
        self.found: list[str] = []
        """The addresses at which p2pd believes that it can be reached."""
        self._hung = False
        self._stack = AsyncExitStack()

    @classmethod
    async def begin(
        cls, runtime: RuntimeDirectory, arguments: Sequence[str], hivemind: Hivemind, timeout_s: float
    ) -> "P2pdSession":
        socket = runtime.path / "p2pd.sock"
        socket.unlink(missing_ok=True)  # a former life's: p2pd would take it for another one's that runs
        daemon = await P2pdProcess.launch(socket, arguments)
        runtime.told(daemon.pid)
        life = cls(daemon, P2pdControl(socket, hivemind.messages, hivemind.multiaddr))
        life._stack.push_async_callback(daemon.stop)
        try:
            await daemon.wait_ready(timeout_s)
            life.p2p = await life._join_hivemind(runtime, hivemind)
            async with asyncio.timeout(CONTROL_S):
                life.found = await life.orders.identify()
        except BaseException:
            await life.end()
            raise
        watch = asyncio.create_task(life._watch())
        life._stack.push_async_callback(cancelled, watch)
        return life

    async def ended(self) -> str:
        """Returns at p2pd's death, saying how it died."""
        status = await self.daemon.exited()
        if self._hung:
            return "p2pd no longer answered"
        return f"p2pd was killed by signal {-status}" if status < 0 else f"p2pd ended with status {status}"

    async def end(self) -> None:
        await self._stack.aclose()

    async def _join_hivemind(self, runtime: RuntimeDirectory, hivemind: Hivemind) -> Any:
        ours = type("P2P", (hivemind.p2p,), {"_UNIX_SOCKET_PREFIX": f"/unix{runtime.path}/"})
        async with asyncio.timeout(CONTROL_S):
            p2p = await ours.replicate(hivemind.multiaddr(f"/unix{self.daemon.socket}"))  # type: ignore[attr-defined]
        self._stack.push_async_callback(p2p.shutdown)
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(_seen)  # hivemind never looks, and asyncio would print a traceback when p2pd dies
        return p2p

    async def _watch(self) -> None:
        """Keep the addresses fresh (a port is mapped, a cable is plugged in) and see that p2pd still answers."""
        misses = 0
        while misses < _MISSES:
            await asyncio.sleep(_ASK_EVERY_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self.found = await self.orders.identify()
                misses = 0
            except OSError:  # a TimeoutError is one
                misses += 1
        self._hung = True
        self.daemon.kill()


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.debug("hivemind's connection to p2pd broke: %r", task.exception())


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
