"""A swarm of real node processes on this machine: a rendezvous and N trainers on loopback, each with a home of its own.

They are started by the command line and watched through their control sockets and, at the end, the checkpoints in their
homes. However this process ends, transport/p2pd/cleanup.py ends the others and removes their homes.
"""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.states import AT_WORK, ON_THE_WAY, NodeState
from noloco_node.control import socket_client
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import NolocoError
from noloco_node.host.config import PREFIX
from noloco_node.host.home import Home
from noloco_node.run.schema import Manifest
from noloco_node.transport.p2pd.cleanup import RuntimeDirectory
from noloco_node.views.status import StatusView

COMMAND = (sys.executable, "-P", "-m", "noloco_node")
"""-P: modules in the working directory are not imported."""
POLL_S = 0.5

_LISTEN = "/ip4/127.0.0.1/tcp/0"
_START_S = 120.0  # five processes that import torch on a small and busy machine
_TOGETHER_S = 600.0  # then those that have joined begin without the others
_LINGER_S = 120  # a finished node shows its last status so long; it is told to leave well before
_LEAVE_S = 15.0
_ELSEWHERE = "name another folder with --keep"
_STOP_S = 5.0  # after an interrupt: nothing of value is lost, and the user waits

Watch = Callable[[Sequence["Member"]], None]


@dataclass(slots=True)
class Member:
    """One node process, as seen from outside."""

    home: Home
    process: asyncio.subprocess.Process
    view: StatusView | None = None
    """Its last status; it outlives the process."""
    held: bool = False
    """Until the others have joined too."""
    _output_line: str | None = None

    @property
    def label(self) -> str:
        """Its name before its first status."""
        return self.home.root.name

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    @property
    def finished(self) -> bool:
        return self.exit_code is not None or (self.view is not None and self.view.state == NodeState.FINISHED)

    @property
    def on_the_way(self) -> bool:
        return self.exit_code is None and (self.view is None or self.view.state in ON_THE_WAY)

    def last_output_line(self) -> str:
        """The last line of its output: why a node failed. Kept, as its home is removed before the report."""
        if self._output_line is None or self.exit_code is None:
            self._output_line = _last_line(_output(self.home))
        return self._output_line

    async def look(self) -> None:
        """Read its status; of a node that does not answer, the last one is kept."""
        with suppress(NolocoError):
            self.view = await socket_client.ask(self.home, ControlClient.status)

    async def leave(self) -> None:
        """Over the control socket; a node without one yet gets the signal, which means the same."""
        try:
            await socket_client.ask(self.home, ControlClient.leave)
        except NolocoError:
            self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Not by the process's own methods: they take the exit code of one that has just ended, so asyncio gets 255."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def begin(self) -> None:
        """End its first pause, if it has come to it; a later one is the user's."""
        if self.view is not None and self.view.state in AT_WORK:
            self.held = False
        if self.held and self.exit_code is None and self.view is not None and self.view.state == NodeState.PAUSED:
            with suppress(NolocoError):
                await socket_client.ask(self.home, ControlClient.resume)
                self.held = False


class LocalSwarm:
    """Made by `opened`. The nodes' homes lie below `root`."""

    def __init__(self, runtime: RuntimeDirectory, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.root = runtime.path
        self.members: list[Member] = []
        self._runtime = runtime
        self._command = command
        self._environ = nodes_environ(environ)
        self._all: list[Member] = []

    async def run(  # noqa: PLR0913, PLR0917
        self, manifest: Path, nodes: int, rounds: int | None, watch: Watch, pages: Sequence[str] = (), stages: int = 0
    ) -> None:
        """Train until every node has finished or ended, or no more can, calling `watch` every POLL_S. `pages`:
        addresses for --web; `stages`: of the run, held by one node after the other.

        They start paused and begin together: on a GPU the first one would be through its rounds before the second one
        has imported torch."""
        watch(self.members)  # none yet: starting takes seconds
        rendezvous = await self._spawn("rendezvous", "bootstrap")
        address = await self._address(rendezvous)
        flags = ["--bootstrap", address, "--threads", "1", "--linger", str(_LINGER_S)]
        flags += [] if rounds is None else ["--rounds", str(rounds)]
        for index in range(nodes):
            verb = ["start", str(manifest)] if index == 0 else ["join"]
            page = ["--web", pages[index]] if pages else []
            page += ["--stage", str(index % stages + 1)] if stages else []
            self.members.append(await self._spawn(f"node-{index + 1}", *verb, *flags, *page))
        together = time.monotonic() + _TOGETHER_S
        while not (all(member.finished for member in self.members) or self._stands(stages)):
            await self._look(watch)
            if not any(member.on_the_way for member in self.members) or time.monotonic() > together:
                together = 0.0
                await asyncio.gather(*(member.begin() for member in self.members))
        await self._look(watch)  # the last figures of the node that finished last
        await _end(self.members, _LEAVE_S)
        for member in self.members:
            member.last_output_line()
        watch(self.members)

    def _stands(self, stages: int) -> bool:
        """Whether all nodes of some stage have failed: the others would wait for them."""
        return any(all(member.exit_code for member in self.members[stage::stages]) for stage in range(stages))

    def eval_of_average(self, run: Manifest) -> float | None:
        """Held-out loss of the mean of all nodes' last weights, as `export --average` would write them."""
        if run.stages:
            return self._eval_of_stages(run)
        from noloco_node.checkpoints import listing

        whole = [member.home.run(run.run_id) / "checkpoints" for member in self.members if member.exit_code == 0]
        written = [checkpoints for directory in whole if (checkpoints := listing.kept(directory))]
        if not written:
            return None
        from noloco_node.checkpoints import checkpoint
        from noloco_node.publish.weights import mean_into
        from noloco_node.training.build import build_replica

        replica = build_replica(run, "the mean of all", device="cpu")
        slow = (checkpoint.slow_weights(checkpoints, run.run_id, replica.layout) for checkpoints in written)
        mean_into(replica.module, (weights.phi for weights in slow))
        return replica.evaluate()

    def _eval_of_stages(self, run: Manifest) -> float | None:
        """As `eval_of_average`, of the model that the means of all stages make."""
        from noloco_node.data import corpus
        from noloco_node.publish import evaluate, weights

        try:
            places = [weights.find(member.home.root) for member in self.members if member.exit_code == 0]
            trained = weights.load(places, corpus.NOTHING) if places else None
        except NolocoError:  # nobody of one stage has ended well
            trained = None
        return evaluate.measure(trained, corpus.load(run.data), "cpu").loss if trained else None

    async def _look(self, watch: Watch) -> None:
        await asyncio.gather(*(member.look() for member in self.members if member.exit_code is None))
        watch(self.members)
        await asyncio.sleep(POLL_S)

    async def _spawn(self, name: str, verb: str, *arguments: str) -> Member:
        home, held = Home(self.root / name).create(), verb != "bootstrap"
        if held:
            home.pause_mark.touch()
        with _output(home).open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(*self._command, verb, *arguments, "--home", str(home.root), "--listen", _LISTEN),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,  # Ctrl-C is for this process only
            )
        self._runtime.kill_at_end(process.pid)
        self._all.append(Member(home, process, held=held))
        return self._all[-1]

    async def _address(self, rendezvous: Member) -> str:
        """Where the rendezvous listens, as its own status says."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                while rendezvous.exit_code is None:
                    await rendezvous.look()
                    if rendezvous.view and rendezvous.view.addresses:
                        return rendezvous.view.addresses[0]
                    await asyncio.sleep(POLL_S / 5)
        raise NolocoError(f"the rendezvous of the local swarm did not start: {rendezvous.last_output_line()}")

    async def close(self) -> None:
        await _end(self._all, _STOP_S)
        for member in self._all:
            if member.held:
                member.home.pause_mark.unlink(missing_ok=True)  # a home that is kept is not to begin with a pause


def nodes_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Our environment without node settings, and with our module path: nodes run the same code."""
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return {**{key: value for key, value in environ.items() if not key.startswith(PREFIX)}, "PYTHONPATH": places}


@asynccontextmanager
async def opened(keep: Path | None, command: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[LocalSwarm]:
    """A swarm whose processes and files are removed when the context ends; `keep`: where the homes are copied first."""
    runtime = await RuntimeDirectory.open()
    swarm = LocalSwarm(runtime, command, environ)
    try:
        yield swarm
    finally:
        try:
            await swarm.close()
            if keep:
                sockets = shutil.ignore_patterns("*.sock")
                try:
                    with atomic_files.writing(keep, _ELSEWHERE):
                        shutil.copytree(runtime.path, keep, ignore=sockets, copy_function=_copy, dirs_exist_ok=True)
                except NolocoError:
                    _remove_copies(runtime.path, keep)
                    raise
        finally:
            await runtime.close()


def _remove_copies(of: Path, there: Path) -> None:
    """It was empty before. What stayed would fill a disk that is full, and the next swarm would refuse the folder."""
    for copy in (there / path.name for path in of.iterdir()):
        shutil.rmtree(copy, ignore_errors=True)
        with suppress(OSError):  # a folder, or not there; why it could not be written is said in any case
            copy.unlink()


def _copy(file: str, to: str) -> None:
    """After an OSError `copytree` would go on, and name all files that were not copied."""
    with atomic_files.writing(to, _ELSEWHERE):
        shutil.copy2(file, to)


async def _end(members: Sequence[Member], patience_s: float) -> None:
    """Make the nodes leave; a process that has not ended in time is killed."""
    running = [member for member in members if member.exit_code is None]
    await asyncio.gather(*(member.leave() for member in running))
    exits = [asyncio.ensure_future(member.process.wait()) for member in running]
    if exits:
        await asyncio.wait(exits, timeout=patience_s)
    for member in running:
        member.send_signal(signal.SIGKILL)
    await asyncio.gather(*exits)


def _output(home: Home) -> Path:
    return home.root / "output"


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
