"""A node beside a loop: it runs on a thread of its own, with the same home, flags and verbs as `noloco-node` has.

So `noloco-node status`, `top`, `pause` and `leave` work on it as on any other node, and errors are those of the command
line, raised where the loop waits for its turn.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401 - what it does at the end of a process comes after what we do
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from noloco_node import cli
from noloco_node.core import gpu
from noloco_node.errors import NolocoError, UsageError
from noloco_node.loop.island import Follower, Island, News
from noloco_node.loop.task import Loop
from noloco_node.loop.turns import Turns

if TYPE_CHECKING:
    from noloco_node.host.config import NodeConfig
    from noloco_node.node.trainer import TrainingNode
    from noloco_node.run.manifest import Signed
    from noloco_node.views.status import StatusView

ANSWER_S = 10.0
_SIGNALS = signal.SIGTERM, signal.SIGHUP
"""Which end a script that has no handler of its own for them."""
_REPEATED = {"announce", "bootstrap"}
"""Flags that may be typed several times: as keywords, once with a list."""
_OF_THE_LOOP = {"device", "micro_batch", "moments", "compile", "no_compile", "checkpoint_activations"}

T = TypeVar("T")


def start(
    run: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    evaluate: Callable[[], float] | None = None,
    **settings: object,
) -> "Swarm | Follower":
    """The first node of a run, as `noloco-node start`. `run`: its run.toml, with `task` in [model]; any name will do.
    The rest is as in `join`."""
    return _member(["start", str(run)], model, optimizer, evaluate, settings)


def join(
    invitation: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    evaluate: Callable[[], float] | None = None,
    **settings: object,
) -> "Swarm | Follower":
    """A further node, as `noloco-node join`; None: as it was in a run before, it goes on with it.

    `model`: float32 where it is trained, on the CPU or on one GPU, and there to stay; weights with requires_grad are
    averaged. `optimizer`: any of torch's. `evaluate`: the loss on held-out data, the same data for everyone: it says
    whether a peer's weights are good. `settings`: flags of the command line, as home="/data/noloco", linger=60."""
    return _member(["join", *([invitation] if invitation else [])], model, optimizer, evaluate, settings)


def _member(
    words: list[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    evaluate: Callable[[], float] | None,
    settings: dict[str, object],
) -> "Swarm | Follower":
    """Of an island, where there is one, only the first process has the node."""
    island = Island.here()
    if island and not island.is_first:
        return Follower(island, model, optimizer)
    return Swarm(words, model, optimizer, evaluate, settings, island)


class Swarm:
    """To be entered before the first step and left after the last one."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        words: list[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[], float] | None,
        settings: dict[str, object],
        island: Island | None = None,
    ) -> None:
        """Raises UsageError."""
        self._island, self._shared = island, (-1, -1)
        cli.prepare_libraries()
        self._turns = Turns()
        self._task = Loop(model, optimizer, evaluate, self._turns)
        self._words = [*words, "--device", str(self._task.device), *_flags(settings)]
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        self._fault: BaseException | None = None
        self._node: TrainingNode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaves = False
        self._signals: list[signal.Signals] = []
        """Whose handler is ours, and of no swarm around this one."""
        self.over = False
        """Whether the run is over, or this node has left it, and has ended: further steps are of this model alone."""

    def __enter__(self) -> "Swarm":
        """Returns when the node trains: it has found the run, and where others are ahead it has taken their weights.
        Raises NolocoError."""
        if self._thread.ident is not None:
            raise UsageError("a swarm is entered once: make another one with loop.join or loop.start")
        # where the script ends without leaving: as atexit runs its functions, asyncio can start no thread any more
        end = weakref.WeakMethod(self._end)  # which holds no model that its loop has dropped
        threading._register_atexit(lambda: (still := end()) and still())  # type: ignore[attr-defined]
        if threading.current_thread() is threading.main_thread():
            self._signals = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            for number in self._signals:  # a service, a container or a terminal that ends loses nothing, as at Ctrl-C
                signal.signal(number, _ends)
        self._thread.start()
        try:
            self._wait(0.0, enters=True)
        except BaseException as error:
            self._end()
            self._fail(error)
            raise
        return self

    def step(self, loss: Tensor | float) -> None:
        """To be called after each step of the optimizer, with its loss. The node has its turn then: it may change the
        weights. After ten losses in a row that are not finite they become those of the last checkpoint. Raises
        NolocoError where the node has failed."""
        if self._thread.ident is None:
            raise UsageError("the swarm is to be entered before its first step: `with loop.join(...) as swarm:`")
        if not self.over:
            # plain: a checkpoint with a number of numpy's could not be read
            self._wait(loss.item() if isinstance(loss, Tensor) else float(loss))

    def status(self) -> "StatusView":
        """As `noloco-node status --json` has it. Raises NolocoError before the node runs and after its end."""
        loop, node, answer = self._loop, self._node, Future["StatusView"]()
        if loop and node:
            with suppress(RuntimeError, TimeoutError):  # its loop has ended, or takes nothing any more
                loop.call_soon_threadsafe(lambda: answer.set_result(node.status()))
                return answer.result(ANSWER_S)
        raise NolocoError("the node does not run")

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        """Leaves as Ctrl-C does: a swap under way may end, and a checkpoint is written. Where the run is over, the node
        has ended by itself."""
        self._end()
        if found := error or self._fault:
            self._fail(found)
        if self._fault and error is None:
            raise self._fault

    def _wait(self, loss: float, *, enters: bool = False) -> None:
        with gpu.lent(self._task.device):
            goes_on = self._turns.wait(loss)
        if not goes_on:
            self.over = True
            if self._fault:
                raise self._fault
            if enters:
                raise NolocoError("the node has ended before a first step: it says why above")
        if self._island:
            if enters and not self._task.moments.state():
                self._task.moments.restart()  # what it holds, the other processes cannot be sent
            self._island.tell(self._news(), self._task.theta, self._task.moments)

    def _news(self) -> News:
        """What the node has changed in its turn. Weights that were loaded leave the vector's version as it was, as they
        are written parameter by parameter; moments are loaded with them."""
        version, before = (self._task.theta._version, self._task.moments.changes), self._shared
        self._shared = version
        news = News.OVER if self.over else News.NONE
        if version[1] != before[1]:
            return news | News.WEIGHTS | News.MOMENTS
        return news | News.WEIGHTS if version != before else news

    def _fail(self, error: BaseException) -> None:
        """Tell the other processes of the island, when all is saved and said: as one ends, torchrun ends all."""
        from noloco_node.cli.terminal_lines import report

        island, self._island = self._island, None
        if island:
            report(f"the island ends: {type(error).__name__}: {error}")
            island.fail()

    def _end(self) -> None:
        self._turns.close()
        self._leave()
        if self._thread.ident is not None:
            self._thread.join()
        for number in self._signals:
            if signal.getsignal(number) is _ends:
                signal.signal(number, signal.SIG_DFL)

    def _leave(self) -> None:
        self._leaves = True
        if self._loop and self._node:
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._node.leave)

    # ---- the node's thread ----
    def _run(self) -> None:
        from noloco_node.cli.parser import parse
        from noloco_node.cli.terminal_lines import report

        try:
            verb, given = parse(self._words)
            verb(given, self._train)  # type: ignore[call-arg]
        except BaseException as error:  # noqa: BLE001 - it is the loop's to see
            for line in vars(error).pop("__notes__", ()):  # where the loop itself fails, nobody sees this error
                report(line)
            self._fault = error if isinstance(error, Exception) else NolocoError(f"the node ended: {error!r}")
        finally:
            self._turns.end()

    def _train(
        self, settings: "NodeConfig", signed: "Signed | None", _again: "Callable[[NodeConfig], Awaitable[NodeConfig]]"
    ) -> int:
        # not uvloop, which hears of its processes' ends by SIGCHLD: torch's data loaders with workers take that for
        # themselves, and then a network daemon's end is never heard of
        asyncio.run(self._live(settings, signed))
        return 0

    async def _live(self, settings: "NodeConfig", signed: "Signed | None") -> None:
        from noloco_node.cli.terminal_lines import report
        from noloco_node.node.trainer import TrainingNode

        self._node = TrainingNode(settings, report, signed, brought=self._task)
        self._loop = asyncio.get_running_loop()
        if self._leaves:
            self._node.leave()
        await self._node.run()


def _ends(number: int, _: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:  # a terminal that is closed may send it twice
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _flags(settings: dict[str, Any]) -> list[str]:
    """As they are typed."""
    words = []
    for name, given in settings.items():
        if name in _OF_THE_LOOP:
            raise UsageError(f"{name}: that is the loop's own business, and no setting of its node")
        flag = f"--{name.replace('_', '-')}"
        for value in given if name in _REPEATED and isinstance(given, list | tuple) else [given]:
            words += [] if value is None or value is False else [flag] if value is True else [flag, str(value)]
    return words
