"""One running p2pd: the process, its control socket, hivemind's `P2P` over it, and how its end is noticed.

A p2pd that is killed is noticed at once. To notice one that hangs, IDENTIFY is polled; after two misses it is killed: a
single one may be a busy machine. So is one whose answers hivemind no longer reads, and one that takes too much memory:
libp2p's own Kademlia table, in which p2pd finds the addresses of peers, keeps whatever strangers write into it. Then
`transport/libp2p.py` starts a new session.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from noloco_node.base.addresses import Address
from noloco_node.base.units import size
from noloco_node.host.memory import process_bytes
from noloco_node.transport.p2pd.cleanup import RuntimeDirectory
from noloco_node.transport.p2pd.control import P2pdControl
from noloco_node.transport.p2pd.process import START_S, P2pdProcess

_log = logging.getLogger(__name__)

T = TypeVar("T")

CONTROL_S = 5.0
"""How long p2pd may take to answer what needs no other peer."""
_POLL_EVERY_S, _ANSWER_S, _MISSES = 1.0, 1.4, 2
"""A hang is noticed after 2 · (1 + 1.4) s at most, so within 5 s."""
MOST_BYTES = 1 << 30
"""Of memory. It begins with 50 MB; a stranger has to send some 100 MB to make it this large."""


class Hivemind(NamedTuple):
    """The parts of it that are used, handed in: importing it takes a while."""

    p2p: Any
    multiaddr: Any
    messages: Any


class P2pdSession:
    """Made by `begin`; the caller also ends it."""

    def __init__(self, process: P2pdProcess, control: P2pdControl) -> None:
        self.process = process
        self.control = control
        self.p2p: Any = None
        self.addresses: list[Address] = []
        """Where p2pd believes that it can be reached."""
        self.polling: asyncio.Task[None] | None = None
        self._killed_because: str | None = None
        self._stack = AsyncExitStack()

    @classmethod
    async def begin(cls, runtime: RuntimeDirectory, arguments: Sequence[str], hivemind: Hivemind) -> "P2pdSession":
        process = await P2pdProcess.start(runtime, "p2pd.sock", arguments)
        session = cls(process, P2pdControl(process.socket, hivemind.messages, hivemind.multiaddr))
        session._stack.push_async_callback(process.stop)
        try:
            async with asyncio.timeout(START_S):
                session.p2p = await session._join_hivemind(runtime, hivemind)
                session.addresses = await session.control.identify()
        except BaseException:
            await session.end()
            raise
        session.polling = asyncio.create_task(session._poll())
        session._stack.push_async_callback(cancelled, session.polling)
        return session

    async def ended(self) -> str:
        """Wait until p2pd has ended, and return how."""
        status = await self.process.exited()
        if self._killed_because:
            return self._killed_because
        return f"p2pd was killed by signal {-status}" if status < 0 else f"p2pd ended with status {status}"

    def kill(self, because: str) -> None:
        self._killed_because = because
        self.process.kill()

    async def end(self) -> None:
        await self._stack.aclose()

    async def _join_hivemind(self, runtime: RuntimeDirectory, hivemind: Hivemind) -> Any:
        async def identify(p2p: Any) -> None:  # hivemind's own also puts addresses into words, and fails at some
            p2p.peer_id, _ = await p2p._client.identify()

        own = {"_UNIX_SOCKET_PREFIX": f"/unix{runtime.path}/", "_ping_daemon": identify}
        ours = type("P2P", (hivemind.p2p,), own)
        p2p = await ours.replicate(hivemind.multiaddr(f"/unix{self.process.socket}"))  # type: ignore[attr-defined]
        self._stack.push_async_callback(p2p.shutdown)
        control = p2p._client.control
        control._handler_tasks, control._pending_calls = CallsUnderWay(), CallsMade(control._pending_calls)
        for task in (control._read_task, control._write_task):
            task.add_done_callback(_retrieve)  # hivemind does not, and asyncio would print a traceback when p2pd ends
        return p2p

    async def _poll(self) -> None:
        """Keep the addresses up to date (a port is mapped, a cable is plugged in) until p2pd hangs or is too large, or
        hivemind reads no more of its answers: then no call of the DHT would ever end."""
        misses, reading = 0, self.p2p._client.control._read_task
        while misses < _MISSES and not reading.done() and (process_bytes(self.process.pid) or 0) <= MOST_BYTES:
            await asyncio.sleep(_POLL_EVERY_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self.addresses = await self.control.identify()
                misses = 0
            except OSError:  # a TimeoutError is one
                misses += 1
        if misses == _MISSES:
            self.kill("p2pd no longer answered")
        elif reading.done():
            with suppress(TimeoutError):  # it breaks where p2pd ends, too, and a busy machine hears of that later
                async with asyncio.timeout(_ANSWER_S):
                    await self.process.exited()
                return
            self.kill("hivemind's connection to p2pd broke")
        else:
            self.kill(f"p2pd took more than {size(MOST_BYTES)} of memory")


class CallsUnderWay(dict[Any, "asyncio.Task[None]"]):
    """The calls that hivemind answers. It forgets those alone whose handler comes to its end: one that the caller gave
    up, or whose answer is too large, stayed for ever with all that it held. 60 callers that gave up after 2 ms cost 8
    MB a second."""

    def __setitem__(self, call: Any, task: "asyncio.Task[None]") -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))
        task.add_done_callback(_retrieve)


class CallsMade(dict[Any, "asyncio.Future[Any]"]):
    """The calls that hivemind makes. Who has just given one up waits for no answer. hivemind would give it one, and its
    reader would break: wherever a machine wakes from sleep, and a call's time is up and its answer there at once."""

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.debug("a task of hivemind's ended: %r", task.exception())


async def unless_broken(work: Coroutine[Any, Any, T], *meanwhile: "asyncio.Task[None] | None") -> T:
    """What `work` returns. Raises the error by which one of the tasks has ended before: nobody awaits them."""
    own = asyncio.create_task(work)
    try:
        await asyncio.wait([own, *filter(None, meanwhile)], return_when=asyncio.FIRST_COMPLETED)
        for task in meanwhile:
            if task is not None and task.done() and not task.cancelled() and (error := task.exception()):
                raise error
        return await own
    finally:
        own.cancel()


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
