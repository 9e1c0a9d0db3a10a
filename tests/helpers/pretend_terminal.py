"""A terminal for the tests: a program runs in a pseudo-terminal, and pyte keeps the screen that a person would see."""

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "noloco_node")
_OWNS_IT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""The terminal becomes the program's own, so that it hears of Ctrl-C and of a new size."""


class PretendTerminal:
    def __init__(
        self,
        *words: str,
        program: Sequence[str] = PROGRAM,
        columns: int = 80,
        rows: int = 24,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.bytes = b""
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._near, self._far = pty.openpty()
        self._sized(columns, rows)
        self.mode_before = termios.tcgetattr(self._far)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("NOLOCO_", "NO_COLOR"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNS_IT, *program, *words],
            stdin=self._far,
            stdout=self._far,
            stderr=self._far,
            env={**clean, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **(environ or {})},
            start_new_session=True,
        )

    def lines(self) -> list[str]:
        self._take(0)
        return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        return "\n".join(self.lines())

    def until(self, found: Callable[[str], object], what: str, within_s: float = 30) -> str:
        """Look until it is so. Returns the screen."""
        deadline = time.monotonic() + within_s * PATIENCE
        while not found(seen := self.text()):
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}\n{seen}"
            self._take(0.1)
        return seen

    def type(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._sized(columns, rows)

    def ended(self, within_s: float = 30) -> int:
        """Its exit code. What it still writes is read, so that it does not wait for us."""
        deadline = time.monotonic() + within_s * PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.text()}"
            self._take(0.1)
        self._take(0.1)
        return self.process.returncode

    def is_restored(self) -> bool:
        """The screen, the cursor, the wrapping, pasting and the keyboard's mode are as they were."""
        modes = self.bytes.rfind(b"\x1b[?1049l") > self.bytes.rfind(b"\x1b[?1049h")
        modes &= self.bytes.rfind(b"\x1b[?25h") > self.bytes.rfind(b"\x1b[?25l")
        modes &= self.bytes.rfind(b"\x1b[?7h") > self.bytes.rfind(b"\x1b[?7l")
        modes &= self.bytes.rfind(b"\x1b[?2004l") > self.bytes.rfind(b"\x1b[?2004h")
        return modes and termios.tcgetattr(self._far) == self.mode_before

    def hang_up(self) -> None:
        """As a window that is closed does."""
        os.close(self._far)
        os.close(self._near)
        self._near = self._far = -1

    def close(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
        if self._near >= 0:
            self.hang_up()

    def __enter__(self) -> "PretendTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, patience_s: float) -> None:
        while select.select([self._near], [], [], patience_s)[0]:
            taken = os.read(self._near, 1 << 16)
            self.bytes += taken
            self._stream.feed(self._decoder.decode(taken))
            patience_s = 0

    def _sized(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._far, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
