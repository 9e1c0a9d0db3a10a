"""How far a long piece of work is, on stderr: a bar on a terminal that can redraw it, else a line where something new
begins, and every LINE_EVERY_S. Stdout has the results alone."""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from noloco_node.base.units import span
from noloco_node.terminal.text import can_redraw

LINE_EVERY_S = 10.0


class Progress:
    """`with Progress() as say: say("bf16", 3, 10)`: three of ten are done, and now it is bf16's turn.

    Work may have several parts, each with its own count and clock: one begins where fewer are done than before.
    """

    def __init__(self, out: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or Console(stderr=True)
        self._clock = clock
        self._draws = can_redraw(self._out)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}", markup=False),
            console=self._out,
            transient=True,
            disable=not self._draws,
        )
        self._task = self._bar.add_task("", count="", total=None)
        self._what = ""
        self._done = 0
        self._began = self._printed = clock()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int, note: str = "", unit: str = "done") -> None:
        """`note`: the latest figure, as `loss 1.87`."""
        now = self._clock()
        if done < self._done or not done:
            self._began = now
        count = f"{done} of {total} {unit}"
        if left := self._left(done, total, now):
            count += f", about {left} left"
        self._bar.update(self._task, completed=done, total=total, description=what, count=f"{count} {note}".rstrip())
        if not self._draws and (what != self._what or now - self._printed >= LINE_EVERY_S):
            self.line(f"{what}: {count}" + (f", {note}" if note else ""))
            self._printed = now
        self._what, self._done = what, done

    def line(self, text: str) -> None:
        """One that stays, above the bar."""
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def _left(self, done: int, total: int, now: float) -> str:
        return span((now - self._began) / done * (total - done)) if 0 < done < total else ""
