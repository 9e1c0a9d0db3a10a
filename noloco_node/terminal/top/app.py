"""Runs `top`: connects the poller, the drawing, the terminal and the keys."""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from noloco_node.checkpoints import listing
from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import NolocoError
from noloco_node.host.home import Home
from noloco_node.terminal.top.driver import Terminal
from noloco_node.terminal.top.keys import Command, Keys
from noloco_node.terminal.top.line_mode import LineMode
from noloco_node.terminal.top.poller import Poller
from noloco_node.terminal.top.screen import Display, screen
from noloco_node.views.status import StatusView

_TICK_S = 1.0  # the shown times advance while no answer comes
_BY_SIGNAL = 128  # plus its number: the exit code that a shell gives a process ended by a signal


class Session:
    def __init__(self, home: Home, every_s: float) -> None:
        self.last_line: str | None = None
        """To print when the terminal is restored."""
        self._home, self._every_s = home, every_s
        self._changed = asyncio.Event()
        self._poller = Poller(home, every_s, self._changed.set)
        self._keys = Keys()
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._code: int | None = None
        self._left: StatusView | None = None
        """Of the node that was told to leave, before."""

    async def run(self) -> int:
        """Raises NoNodeRunning if none runs at the start; if it ends later, waits for the next one."""
        await self._poller.first()
        with Terminal(self._typed, self._changed.set, self._signalled) as terminal:
            loops = [asyncio.create_task(self._poller.keep()), asyncio.create_task(self._run_commands())]
            drawing = asyncio.create_task(self._draw(terminal))
            try:
                await asyncio.wait([drawing, *loops], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (drawing, *loops):
                    task.cancel()
                ends = await asyncio.gather(drawing, *loops, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return self._code or 0

    def _typed(self, keys: str) -> None:
        for command in self._keys.press(keys, time.monotonic()):
            if command is Command.QUIT:
                self._code = 0
            else:
                self._commands.put_nowait(command)
        self._changed.set()

    def _signalled(self, number: signal.Signals) -> None:
        self._code = 0 if number is signal.SIGINT else _BY_SIGNAL + number
        self._changed.set()

    async def _draw(self, terminal: Terminal) -> None:
        """When something changed, and every second for the shown times; until the user ends it."""
        while self._code is None:
            self._changed.clear()
            if picture := self._poller.picture:
                if self._left and picture.absence == "gone":
                    self.last_line, self._code = listing.after_leaving(self._left, self._home), 0
                terminal.show(screen(picture, self._display(*terminal.size())))
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _display(self, width: int, height: int) -> Display:
        return Display(
            width=width,
            height=height,
            now=time.time(),
            every_s=self._every_s,
            said=self._keys.said(time.monotonic()),
            shows_help=self._keys.shows_help,
        )

    async def _run_commands(self) -> None:
        while True:
            answer = await self._outcome(await self._commands.get())
            self._keys.say(answer, time.monotonic())
            self._changed.set()

    async def _outcome(self, command: Command) -> str:
        """The sentence to show."""
        node, picture = self._poller.node, self._poller.picture
        if node is None or picture is None or picture.absence:
            return "there is no node to do this"
        if picture.is_rendezvous and command is not Command.LEAVE:
            return f"{picture.status.name} is a rendezvous and does not train"
        try:
            return await self._send(command, node, picture.status)
        except NolocoError as error:
            return str(error)

    async def _send(self, command: Command, node: ControlClient, before: StatusView) -> str:
        if command is Command.LEAVE:
            await node.leave()
            self._left = before
            return f"{before.name} finishes its swap, saves, and leaves: a few seconds"
        view = await (node.pause() if command is Command.PAUSE else node.resume())
        return f"{view.name} is {view.state}"


class _Over(Exception):
    pass


async def as_lines(home: Home, every_s: float, write: Callable[[str], None]) -> None:
    """For a pipe or a terminal without a screen: until the node has ended with its work done, it is cancelled, or the
    pipe is closed."""
    mode = LineMode()

    def say() -> None:
        if poller.picture:
            for line in mode.lines(poller.picture, time.monotonic()):
                write(f"{time.strftime('%H:%M:%S')}  {line}")
            if poller.picture.is_over:
                raise _Over

    poller = Poller(home, every_s, say)
    await poller.first()
    with suppress(_Over):
        say()
        await poller.keep()
