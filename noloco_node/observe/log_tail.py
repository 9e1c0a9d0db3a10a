"""The last lines of the log, kept in memory for the live views."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from noloco_node.views.history import Said

SAID = 100


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
        ours.addHandler(self)
        try:
            yield
        finally:
            ours.removeHandler(self)

    def last(self) -> tuple[Said, ...]:
        return tuple(self._lines)
