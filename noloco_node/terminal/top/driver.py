"""The terminal: the alternate screen and the keyboard, both restored afterwards whatever happens.

Only changed lines are written, for slow ssh links.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from noloco_node.terminal.top.glyphs import in_ascii

# alternate screen, no cursor, no wrapping at the right edge, marks around what is pasted
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[?2004h\x1b[2J"
_LEAVE = "\x1b[?2004l\x1b[?7h\x1b[?25h\x1b[0m\x1b[?1049l"
_KEYS_BYTES, _CTRL_L = 1024, b"\x0c"
_USUAL = os.terminal_size((80, 24))
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """A context manager, inside a running event loop. `typed` gets the keys that arrived together; `resized` is called
    when the screen must be drawn again, `ended` when a signal asks to end."""

    def __init__(
        self, typed: Callable[[str], None], resized: Callable[[], None], ended: Callable[[signal.Signals], None]
    ) -> None:
        self._typed, self._resized, self._ended = typed, resized, ended
        self._console = Console(highlight=False)
        self._plain = not speaks_unicode()
        self._keyboard: int | None = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._mode: list[Any] | None = None
        self._shown: list[Text] = []
        self._handlers: dict[signal.Signals, Any] = {}
        """Those before."""

    def __enter__(self) -> "Terminal":
        try:
            self._set_up()
            self._listen()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if self._keyboard is not None:
            loop.remove_reader(self._keyboard)
        self._restore()

    def size(self) -> os.terminal_size:
        """Some terminals do not know theirs, and a closed window has none."""
        try:
            known = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return _USUAL
        return os.terminal_size((known.columns or _USUAL.columns, known.lines or _USUAL.lines))

    def show(self, lines: Sequence[Text]) -> None:
        """Lines of the screen's width, from the top."""
        wiped = "" if self._shown else "\x1b[2J"
        before = [*self._shown, *[None] * len(lines)]
        changed = [row for row, line in enumerate(lines) if line != before[row]]
        try:
            self._write(wiped + "".join(f"\x1b[{row + 1};1H{self._drawn(lines[row])}" for row in changed))
        except OSError:  # its window was closed
            self._ended(signal.SIGHUP)
        self._shown = list(lines)

    def _drawn(self, line: Text) -> str:
        with self._console.capture() as drawn:
            self._console.print(line, end="", soft_wrap=True)
        return in_ascii(drawn.get()) if self._plain else drawn.get()

    def _set_up(self) -> None:
        if self._keyboard is not None:
            self._mode = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        self._write(_ENTER)
        self._shown = []

    def _restore(self) -> None:
        """The terminal itself may be gone."""
        with suppress(OSError):
            self._write(_LEAVE)
        if self._mode is not None and self._keyboard is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._mode)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._handlers = {number: signal.getsignal(number) for number in (*_ENDS, signal.SIGWINCH, signal.SIGTSTP)}
        for number in _ENDS:
            loop.add_signal_handler(number, self._ended, number)
        loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        if self._keyboard is not None:
            loop.add_reader(self._keyboard, self._read)

    def _redraw(self) -> None:
        self._shown = []  # something else may have changed the screen
        self._resized()

    def _stop(self) -> None:
        """Ctrl-Z: the shell needs its own screen; `fg` continues after SIGSTOP."""
        self._restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._set_up()
        self._resized()

    def _read(self) -> None:
        assert self._keyboard is not None
        try:
            keys = os.read(self._keyboard, _KEYS_BYTES)
        except OSError:  # hung up
            keys = b""
        if keys == _CTRL_L:
            self._redraw()
        elif keys:
            self._typed(keys.decode(errors="replace"))
        else:
            asyncio.get_running_loop().remove_reader(self._keyboard)

    def _write(self, text: str) -> None:
        """Without Python's buffer, which would try again at exit what a closed window did not accept."""
        rest = text.encode(sys.stdout.encoding or "ascii", "replace")
        while rest:
            rest = rest[os.write(sys.stdout.fileno(), rest) :]


def can_show() -> bool:
    """Whether there is a terminal with cursor addressing."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def speaks_unicode() -> bool:
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def print_once(lines: Sequence[Text]) -> None:
    """Below what the terminal shows already."""
    out = Console(highlight=False)
    for line in lines:
        line.rstrip()
        out.print(Text(in_ascii(line.plain)) if not speaks_unicode() else line, soft_wrap=True)
