"""Where a daemon's words go: all of them to node.log in the home, a line or two a round to the terminal."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from logging.handlers import RotatingFileHandler

from noloco_node.errors import NolocoError
from noloco_node.host.config import home_dir
from noloco_node.host.home import Home

LOG_FILES = 3
_LOG_BYTES = 8 << 20  # each of the three at most: weeks of a node, and no disk is filled
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def written(home: Home, level: str, form: str) -> Iterator[None]:
    """Everybody's records into the file; ours, from INFO on, to the terminal too. `form`: one of config.LOG_FORMATS."""
    file = RotatingFileHandler(home.log, maxBytes=_LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8", delay=True)
    file.setFormatter(_ForPrograms() if form == "json" else logging.Formatter(_FILE_FORMAT))
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.INFO)
    terminal.setFormatter(_ForPrograms() if form == "json" else _ForPeople(datefmt="%H:%M:%S"))
    root, ours = logging.getLogger(), logging.getLogger("noloco_node")
    before = root.level
    root.setLevel(level.upper())
    logging.getLogger("grpc").setLevel(logging.WARNING)  # its debug records hold objects that are just being freed
    root.addHandler(file)
    ours.addHandler(terminal)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.removeHandler(terminal)
        root.removeHandler(file)
        root.setLevel(before)
        ours.setLevel(logging.NOTSET)  # `logs --level` may have set it
        file.close()


def note_crash(error: BaseException, args: Sequence[str]) -> str:
    """Write the traceback to the log of the home that `args` name; say where it is."""
    named = next((after for word, after in pairwise(args) if word == "--home"), None)
    try:
        home = Home(home_dir(named, os.environ))
        home.create()
        with home.log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except (OSError, NolocoError):
        return repr(error)
    return f"the details are in {home.log}"


class _ForPrograms(logging.Formatter):
    """An object a line. The time is UTC, as collectors want it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _ForPeople(logging.Formatter):
    """`12:31:07 round 4 of 8: …`; only what is worse than information says how bad it is. No tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return f"{self.formatTime(record, self.datefmt)} {level}{record.getMessage()}"
