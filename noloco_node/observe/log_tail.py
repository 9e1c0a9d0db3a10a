"""The last lines of the log, kept in memory for the live views; and whose a line is, where a process has two nodes."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from noloco_node.views.history import Said

SAID = 100
NODE: ContextVar[object] = ContextVar("node", default=None)
"""The node that is at work: its tasks and its training thread have it from the thread that runs it."""


def of_this_node() -> Callable[[logging.LogRecord], bool]:
    """A filter for a handler. A record of a thread that is nobody's passes it, too."""
    here = NODE.get()
    return lambda _: NODE.get() in {None, here}


class LogTail(logging.Handler):
    """The last SAID lines at level info or above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Said] = deque(maxlen=SAID)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(Said(record.created, record.levelname.lower(), record.getMessage()))

    @contextmanager
    def attached(self) -> Iterator[None]:
        ours = logging.getLogger("noloco_node")
        self.addFilter(of_this_node())
        ours.addHandler(self)
        try:
            yield
        finally:
            ours.removeHandler(self)

    def last(self) -> tuple[Said, ...]:
        return tuple(self._lines)
