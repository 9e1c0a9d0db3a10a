"""The p2pd process (go-libp2p, from hivemind's wheel): its command line, its start, its end.

It runs in a POSIX session of its own, so that Ctrl-C in the terminal does not end it before this node has published
that it leaves. It ends by itself when its last client connection closes; the kernel kills it with its parent where
util-linux can ask for that; where both fail, `transport/p2pd/cleanup.py` kills it.
"""

import asyncio
import importlib.util
import logging
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from noloco_node.base.addresses import Address
from noloco_node.base.extras import pip_install
from noloco_node.errors import NolocoError, PortInUse, SwarmUnreachable
from noloco_node.transport.p2pd.cleanup import RuntimeDirectory

_log = logging.getLogger(__name__)

START_S = 60.0
"""To be ready, and for its first answers: on a busy machine they take seconds."""
_STOP_S = 3.0  # to close its connections after SIGTERM; then it is killed
_TRY_S = 5.0  # it takes a few milliseconds
_KEPT_LINES = 20
_STARTS = 3  # of one that is killed while it starts
_RELAYS = "-relayService=1"


def node_arguments(
    identity: Path,
    listen: Sequence[Address],
    announce: Sequence[Address],
    bootstrap: Sequence[Address],
    *,
    relays: bool,
) -> list[str]:
    """The command line of a node's daemon; `listen`: none where it is called through a relay only; `relays`: whether it
    is a relay for others.

    Port mapping asks the router by multicast: not for a node on loopback only. Without -forceReachabilityPublic, a
    relay would wait until AutoNAT finds it reachable, which on private addresses never happens.
    """
    local = all(address.is_loopback for address in listen)
    return [
        f"-id={identity}",
        f"-hostAddrs={_listed(listen)}" if listen else "-noListenAddrs=1",
        *([f"-announceAddrs={_listed(announce)}"] if announce else []),
        *bootstrap_arguments(bootstrap),
        "-dhtServer=1",
        "-connManager=1",
        "-autonat=1",
        "-relay=1",
        f"-natPortMap={int(not local)}",
        *([_RELAYS, "-forceReachabilityPublic=1"] if relays else ["-relayService=0"]),
    ]


def observer_arguments(bootstrap: Sequence[Address]) -> list[str]:
    """The command line of a daemon that no peer can call, under a temporary key."""
    return ["-noListenAddrs=1", *bootstrap_arguments(bootstrap), "-dhtClient=1", "-relay=1"]


def bootstrap_arguments(bootstrap: Sequence[Address]) -> list[str]:
    return ["-b=1", f"-bootstrapPeers={_listed(bootstrap)}"] if bootstrap else []


def _listed(addresses: Sequence[Address]) -> str:
    return ",".join(map(str, addresses))


def executable() -> Path:
    """p2pd's path, found without importing hivemind."""
    found = importlib.util.find_spec("hivemind")
    if found is None or not found.submodule_search_locations:
        raise NolocoError(f"hivemind is not installed: {pip_install('hivemind')}")
    return Path(found.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"


class KilledAtStart(NolocoError):
    """p2pd was killed before it was ready. It may start if it is tried again."""


class P2pdProcess:
    """One p2pd process. `socket` is its control socket."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self.socket = socket
        self.pid = process.pid
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_output())

    @classmethod
    async def start(cls, runtime: RuntimeDirectory, name: str, arguments: Sequence[str]) -> "P2pdProcess":
        """A process that is ready, whose control socket has this name. The caller also stops it. One that is killed
        before, as by a system that is short of memory, is started again."""
        for _ in range(_STARTS - 1):
            try:
                return await cls._ready_one(runtime, name, arguments)
            except KilledAtStart as killed:
                _log.warning("%s", killed)
        return await cls._ready_one(runtime, name, arguments)

    @classmethod
    async def _ready_one(cls, runtime: RuntimeDirectory, name: str, arguments: Sequence[str]) -> "P2pdProcess":
        socket = runtime.path / name
        socket.unlink(missing_ok=True)  # of the one before: p2pd would believe that another one is running
        process = await cls.launch(socket, arguments)
        runtime.kill_at_end(process.pid)
        try:
            await process.wait_ready()
        except BaseException:
            await process.stop()
            raise
        return process

    @classmethod
    async def launch(cls, socket: Path, arguments: Sequence[str]) -> "P2pdProcess":
        """Start the process; then `wait_ready`. The caller also stops it."""
        # Else p2pd dials from the port that it listens at. Where two dial each other at the same moment, TCP then makes
        # one connection of both dials, on which both ends begin the handshake, and neither dials again for 5 s.
        environ = {**os.environ, "LIBP2P_TCP_REUSEPORT": "0"}
        if _RELAYS in arguments:
            # On one thread the relay that -relayService asks for starts after the small one that p2pd always has, and
            # replaces it: in 12 of 12 starts on two idle cores. On two threads they race, and it did in 1 of 12. (Other
            # nodes gain nothing at 50 Mbit/s by one thread, and p2pd answers later on busy cores.)
            environ["GOMAXPROCS"] = "1"
        try:
            process = await asyncio.create_subprocess_exec(
                *(*_killed_with_parent(), str(executable()), f"-listen=/unix{socket}", "-idleTimeout=60s", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=environ,
            )
        except OSError as error:
            raise NolocoError(
                f"cannot start p2pd, the network daemon ({error.strerror}). "
                f"Install it again: {pip_install('hivemind')} --force-reinstall --no-deps"
            ) from error
        return cls(process, socket)

    async def wait_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise NolocoError(
                f"p2pd, the network daemon, was not ready within {START_S:g} s. Is this machine very busy? Try again."
            ) from error

    async def exited(self) -> int:
        """Wait for its end, and return its exit status: negative for a signal."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill a process that hangs: it would not react to SIGTERM."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        for end in (self._process.terminate, self._process.kill):
            with suppress(ProcessLookupError):
                end()
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
                break
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._ready.cancel()

    async def _read_output(self) -> None:
        """Read all that it writes: p2pd would block on a full pipe."""
        output = self._process.stdout
        while output is not None:
            try:
                line = await output.readline()
            except ValueError:
                continue  # a line longer than the reader's buffer, which dropped it
            if not line:
                break
            self._last_lines.append(line.decode(errors="replace").strip())
            _log.debug("p2pd: %s", self._last_lines[-1])
            if line.startswith(b"Peer ID:") and not self._ready.done():
                self._ready.set_result(None)
        status = await self._process.wait()
        if not self._ready.done():
            self._ready.set_exception(_start_error(list(self._last_lines), status))
            self._ready.exception()  # retrieved: else asyncio warns where nothing awaits it any more


@cache
def _killed_with_parent() -> list[str]:
    """The words before the command line that make the kernel kill p2pd when we end (PR_SET_PDEATHSIG).

    Python could ask the kernel itself only in a `preexec_fn`, which may hang in a process with threads; busybox's
    setpriv cannot ask, and where a sandbox allows no capset(2), none can. Then only `RuntimeDirectory` kills it.
    """
    found = shutil.which("setpriv")
    if found is None or Path(found).resolve().name != "setpriv":
        return []
    words = [found, "--pdeathsig", "KILL"]
    try:
        tried = subprocess.run([*words, "true"], check=False, capture_output=True, timeout=_TRY_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return words if tried.returncode == 0 else []


def _start_error(lines: Sequence[str], status: int) -> NolocoError:
    output = "\n".join(lines)
    if status < 0:
        return KilledAtStart(f"p2pd, the network daemon, was killed by signal {-status} while it started: try again")
    if "failed to connect to bootstrap peers" in output:
        return SwarmUnreachable(
            "cannot reach the swarm: none of the bootstrap addresses answers as the peer that it names. "
            "Is the bootstrap node running, and is the peer id at the end of its address still the same?"
        )
    if "address already in use" in output or "failed to listen" in output:
        return PortInUse("the port to listen on is in use by another program. Choose another one with --listen.")
    return NolocoError(f"p2pd, the network daemon, did not start: {lines[-1] if lines else 'it printed nothing'}")
