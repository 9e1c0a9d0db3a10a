"""From the first picture to the last key: joins what asks (Watch), what draws (screen), what hears (Terminal, Desk)."""

import asyncio
import signal
import time
from collections.abc import Callable

from noloco_node.control.socket_client import ControlClient
from noloco_node.errors import NolocoError
from noloco_node.host.home import Home
from noloco_node.terminal.top.driver import Terminal
from noloco_node.terminal.top.keys import Command, Keys
from noloco_node.terminal.top.line_mode import LineMode
from noloco_node.terminal.top.picture import Picture
from noloco_node.terminal.top.poller import Poller
from noloco_node.terminal.top.screen import Look, screen

_TICK_S = 1.0  # clocks go on while no answer comes
_BY_SIGNAL = 128  # and its number: what a shell makes of a process that a signal ended


class Session:
    """Of one terminal."""

    def __init__(self, home: Home, every_s: float) -> None:
        self.farewell: str | None = None
        """To be said when the terminal is as it was."""
        self._home, self._every_s = home, every_s
        self._news = asyncio.Event()
        self._watch = Poller(home, every_s, self._news.set)
        self._desk = Keys()
        self._wishes: asyncio.Queue[Command] = asyncio.Queue()
        self._code: int | None = None
        self._left: str | None = None
        """Who was told to leave."""

    async def run(self) -> int:
        """Raises NoNodeRunning where none runs at the start; one that goes later is waited for."""
        await self._watch.first()
        with Terminal(self._typed, self._news.set, self._signalled) as terminal:
            duties = [asyncio.create_task(self._watch.keep()), asyncio.create_task(self._grant())]
            drawing = asyncio.create_task(self._draw(terminal))
            try:
                await asyncio.wait([drawing, *duties], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (drawing, *duties):
                    task.cancel()
                ends = await asyncio.gather(drawing, *duties, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return self._code or 0

    def _typed(self, keys: str) -> None:
        for wish in self._desk.press(keys, time.monotonic()):
            if wish is Command.QUIT:
                self._code = 0
            self._wishes.put_nowait(wish)
        self._news.set()

    def _signalled(self, number: signal.Signals) -> None:
        self._code = 0 if number is signal.SIGINT else _BY_SIGNAL + number
        self._news.set()

    async def _draw(self, terminal: Terminal) -> None:
        """Whenever there is something new, and every second for the clocks; until somebody wants it to end."""
        while self._code is None:
            self._news.clear()
            if picture := self._watch.picture:
                self._say_farewell(picture)
                terminal.show(screen(picture, self._look(*terminal.size())))
            try:
                await asyncio.wait_for(self._news.wait(), _TICK_S)
            except TimeoutError:
                continue

    def _look(self, width: int, height: int) -> Look:
        return Look(
            width=width,
            height=height,
            now=time.time(),
            every_s=self._every_s,
            said=self._desk.said(time.monotonic()),
            shows_help=self._desk.shows_help,
        )

    def _say_farewell(self, picture: Picture) -> None:
        if self._left and picture.absence == "gone":
            self.farewell = f"{self._left} has left; what it knows is kept in {self._home.root}"
            self._code = 0

    async def _grant(self) -> None:
        while True:
            said = await self._granted(await self._wishes.get())
            self._desk.say(said, time.monotonic())
            self._news.set()

    async def _granted(self, wish: Command) -> str:
        """What became of it."""
        node, picture = self._watch.node, self._watch.picture
        if node is None or picture is None or picture.absence:
            return "there is no node that could hear this"
        if picture.is_rendezvous and wish is not Command.LEAVE:
            return f"{picture.status.name} is a rendezvous and trains nothing"
        try:
            return await self._told(wish, node, picture.status.name)
        except NolocoError as error:
            return str(error)

    async def _told(self, wish: Command, node: ControlClient, name: str) -> str:
        if wish is Command.LEAVE:
            await node.leave()
            self._left = name
            return f"{name} finishes its swap, saves, and leaves: a few seconds"
        view = await (node.pause() if wish is Command.PAUSE else node.resume())
        return f"{view.name} is {view.state}"


async def as_lines(home: Home, every_s: float, write: Callable[[str], None]) -> None:
    """For a pipe, a log, a terminal without a screen: until it is cancelled, or nobody reads any more."""
    news = LineMode()

    def say() -> None:
        if watch.picture:
            for line in news.lines(watch.picture, time.monotonic()):
                write(f"{time.strftime('%H:%M:%S')}  {line}")

    watch = Poller(home, every_s, say)
    await watch.first()
    say()
    await watch.keep()
