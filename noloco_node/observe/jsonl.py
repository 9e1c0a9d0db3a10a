"""JSON lines in a run's folder: `events.jsonl` has each event, `metrics.jsonl` the figures of status once a minute.

A file that is full becomes `<name>.1`, the one before it `<name>.2`; older ones are removed. A full disk costs lines,
never the node: the first failure is logged, and later lines are tried again. A file that could not even be opened at
the start is given up.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from noloco_node.base.atomic_files import open_file, refuse_fifo
from noloco_node.views.status import StatusView

MAX_BYTES = 8 << 20
"""Some 40,000 events: days of rounds that take seconds, a year of rounds that take minutes."""
KEPT = 2
"""Full files that are kept beside the one that is written."""
METRICS_EVERY_S = 60.0
_MAX_LINE_BYTES = 64 << 10
_FIGURES = """
state round step tokens tokens_per_s loss learning_rate gradient_norm mfu eval_loss busy_fraction
busy_fraction_minute stall_ms resent_block_fraction calls peers_seen reachable uptime_s
""".split()  # noqa: SIM905 (so many quoted words on as many lines read worse)

log = logging.getLogger(__name__)


class JsonLines(RotatingFileHandler):
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=KEPT, encoding="utf-8", delay=True)
        self._over = False
        self._failed = self._fails = False
        """Whether the line before the last one, and the last one, could not be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_fifo(path)
            self.stream = self._open()  # at once, so that a failure is logged at the start
        except OSError as error:
            log.warning("no lines are written to %s: %s", self.baseFilename, error.strerror)
            self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        if not self._over:
            self._failed, self._fails = self._fails, False
            self.emit(logging.makeLogRecord({"msg": json.dumps(record)}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        if isinstance(error := sys.exc_info()[1], OSError):
            self._fails = True
            if not self._failed:
                log.warning("no lines are written to %s for now: %s", self.baseFilename, error.strerror)
        else:
            super().handleError(record)

    def close(self) -> None:
        self._over = True
        with suppress(OSError):  # a loss has been logged already
            super().close()


def figures(view: StatusView, at: float) -> dict[str, Any]:
    """A line of `metrics.jsonl`, for people who ask later how it was; `at` is wall-clock, for people only."""
    rounds, bytes_ = asdict(view.rounds), {"sent": view.bytes.sent, "received": view.bytes.received}
    troubles = [finding.text for finding in view.health]
    shown = {name: getattr(view, name) for name in _FIGURES}
    return {"at": round(at, 3), **shown, "rounds": rounds, "bytes": bytes_, "health": troubles}


def records(path: Path) -> Iterator[Mapping[str, Any]]:
    """What was written, the oldest first. Damaged lines are skipped; without a file there are none."""
    for file in reversed(generations(path)):
        with suppress(OSError), open_file(file) as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record


def generations(path: Path, kept: int = KEPT) -> list[Path]:
    """The file that is written and the full ones, the newest first, whether they exist or not."""
    return [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, kept + 1))]
