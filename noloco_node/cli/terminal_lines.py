"""What a node says on its terminal, written by a thread of its own.

A terminal may take nothing for hours (Ctrl-S, a `less` that nobody scrolls), and that holds up no node: MAX_WAITING
lines wait for it, and later ones are lost.
"""

import logging
import os
import sys
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TextIO

MAX_WAITING = 1000
PATIENCE_S = 2.0
"""For the last lines, when a node has ended."""


class TerminalLines:
    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[TextIO, str] | None] = SimpleQueue()
        self._at: TextIO | None = None
        self._thread = Thread(target=self._write_all, name="terminal", daemon=True)
        self._thread.start()

    def say(self, stream: TextIO, line: str) -> None:
        if not self._thread.is_alive():  # closed, or a data loader's worker, which is a fork without this thread
            _write(stream, line)
        elif self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((stream, line))

    def close(self, *, whole: bool) -> None:
        """`whole`: the process ends now. Then nothing may wait for the stream that takes nothing: its lock is held."""
        self._waiting.put(None)
        self._thread.join(PATIENCE_S)
        for name in ("stdout", "stderr"):
            if whole and self._thread.is_alive() and getattr(sys, name) is self._at:
                setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (for good)

    def _write_all(self) -> None:
        while said := self._waiting.get():
            self._at = said[0]
            _write(*said)


def _write(stream: TextIO, line: str) -> None:
    """A node goes on where nobody can read what it prints: its terminal is gone, or the disk is full."""
    try:
        with suppress(ValueError):  # it is closed, or has no such letter
            stream.write(line + "\n")
            stream.flush()
    except OSError:
        if stream is sys.stdout:  # else the flush at the end fails again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


LINES: ContextVar[TerminalLines | None] = ContextVar("lines", default=None)
"""Of the node that is at work: what it reports and what it logs come in the order in which they were said."""


def report(line: str) -> None:
    if lines := LINES.get():
        lines.say(sys.stdout, line)
    else:
        _write(sys.stdout, line)


class TerminalHandler(logging.Handler):
    def __init__(self, lines: TerminalLines) -> None:
        super().__init__(logging.INFO)
        self._lines, self._stream = lines, sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.say(self._stream, self.format(record))
        except Exception:  # noqa: BLE001 (as each handler of logging does)
            self.handleError(record)
