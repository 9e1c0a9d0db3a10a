"""What happened in a run as lines of JSON in files, for people and tools that look back, and how long those grow.

`events.jsonl` has each fact, `metrics.jsonl` the figures of status once a minute. A file that is full becomes
`<name>.1`, the one before it `<name>.2`, and that is all that is kept. A disk that is full costs lines, never the node:
the first failure is logged, later ones are silent.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from noloco_node.base.events import Event, as_json
from noloco_node.views.status import StatusView

MAX_BYTES = 8 << 20
"""Some 40,000 events: days of rounds that take seconds, a year of rounds that take minutes."""
KEPT = 2
"""Full files that stay beside the one that is written."""
_MAX_LINE_BYTES = 64 << 10

log = logging.getLogger(__name__)


class JsonLines:
    """One such file."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _opened(path)
        except OSError as error:
            self._give_up(error)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            if self._file.tell() >= self._max_bytes:
                self._turn()
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # what was lost is said already
                file.close()

    def _give_up(self, error: OSError) -> None:
        log.warning("no more lines are written to %s: %s", self._path, error.strerror)
        self.close()

    def _turn(self) -> None:
        """Begin a file anew. Raises OSError."""
        self.close()
        for younger, older in reversed(list(pairwise(generations(self._path)))):
            if younger.exists():
                younger.replace(older)
        self._file = _opened(self._path)


class EventLog:
    """The events."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, event: Event) -> None:
        self._lines.write(as_json(event, time.time()))

    def close(self) -> None:
        self._lines.close()


class MetricsLog:
    """`metrics.jsonl`: the figures of `status` once a minute, for people who ask later how it was."""

    EVERY_S = 60.0
    FIGURES = """
    state round step tokens tokens_per_s loss eval_loss busy_fraction busy_fraction_minute stall_ms
    resent_block_fraction calls peers_seen reachable uptime_s
    """.split()  # noqa: SIM905 (fifteen quoted words on fifteen lines read worse)

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, view: StatusView, at: float) -> None:
        """`at` is wall-clock, for people only."""
        figures = {name: getattr(view, name) for name in self.FIGURES}
        rounds, bytes_ = asdict(view.rounds), {"sent": view.bytes.sent, "received": view.bytes.received}
        troubles = [finding.text for finding in view.health]
        self._lines.write({"at": round(at, 3), **figures, "rounds": rounds, "bytes": bytes_, "health": troubles})

    def close(self) -> None:
        self._lines.close()


def records(path: Path) -> Iterator[Mapping[str, Any]]:
    """What was written, the oldest first; damaged lines are passed over, and nothing is there where no file is."""
    for file in reversed(generations(path)):
        with suppress(OSError), file.open("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record


def generations(path: Path, kept: int = KEPT) -> list[Path]:
    """The file that is written and the full ones beside it, the youngest first, whether they are there or not."""
    return [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, kept + 1))]


def _opened(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8", buffering=1)
