"""A node's logging: everything to node.log in the home, a line or two per round to the terminal."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from logging.handlers import RotatingFileHandler

from noloco_node.base.validation import printable
from noloco_node.cli.terminal_lines import LINES, TerminalHandler, TerminalLines
from noloco_node.errors import NolocoError, known
from noloco_node.host.home import Home, home_dir
from noloco_node.observe.log_tail import NODE, of_this_node

LOG_FILES = 3
_LOG_BYTES = 8 << 20  # at most, each of the three: weeks of a node, without filling a disk
_LIBRARIES = "asyncio", "grpc", "hivemind"
"""Of a node: what they say is about it."""
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_levels: dict[logging.Logger, int] = {}
"""What they were before the nodes of this process: a loop may have several."""


@contextmanager
def written(home: Home, level: str, form: str, *, whole: bool = True) -> Iterator[None]:
    """All records to the file, and this package's, from INFO on, to the terminal. `form`: one of config.LOG_FORMATS.
    `whole` False: the process is somebody else's, whose records and warnings go where they went before; the file has
    those of a node alone."""
    as_text = {"encoding": "utf-8", "errors": "backslashreplace"}  # a path may be no text
    file = _LogFile(home.log, maxBytes=_LOG_BYTES, backupCount=LOG_FILES - 1, delay=True, **as_text)
    file.setFormatter(_JsonFormatter() if form == "json" else logging.Formatter(_FILE_FORMAT))
    lines = TerminalLines()
    terminal, before = TerminalHandler(lines), LINES.set(lines)
    terminal.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter(datefmt="%H:%M:%S"))
    ours, others = logging.getLogger("noloco_node"), map(logging.getLogger, _LIBRARIES)
    kept = [logging.getLogger()] if whole else [ours, *others]
    outside = NODE.set(file)
    for handler in (file, terminal):
        handler.addFilter(of_this_node())
    _levels.setdefault(kept[0], kept[0].level)
    kept[0].setLevel(level.upper())
    ours.propagate = whole  # else a handler of the loop's own would print each line again
    logging.getLogger("grpc").setLevel(logging.WARNING)  # its debug records refer to objects that are being freed
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_caller)
    for each in kept:
        each.addHandler(file)
    ours.addHandler(terminal)
    if whole:
        logging.captureWarnings(True)
    try:
        yield
    except Exception as error:
        ours.removeHandler(terminal)  # there it is the program's last line
        if expected := known(error):
            ours.error("ended with exit code %d: %s", expected.exit_code, expected)
        raise
    finally:
        if whole:
            logging.captureWarnings(False)
        ours.removeHandler(terminal)
        for each in kept:
            each.removeHandler(file)
        NODE.reset(outside)
        if not any(isinstance(handler, _LogFile) for handler in kept[0].handlers):  # of another node
            ours.propagate = True
            ours.setLevel(logging.NOTSET)  # `logs --level` may have set it
            kept[0].setLevel(_levels.pop(kept[0]))
        file.close()
        LINES.reset(before)
        lines.close(whole=whole)


def _is_no_lost_caller(record: logging.LogRecord) -> bool:
    """grpc logs an error with its traceback where a caller has gone just before its call's status is sent: each caller
    that is killed may do that."""
    return "ExecuteBatchError" not in record.getMessage()


def note_crash(error: BaseException, args: Sequence[str]) -> str:
    """Write the traceback to the log of the home that `args` name. Returns where it is, for the user."""
    words = [part for word in args for part in (word.split("=", 1) if word.startswith("--home=") else [word])]
    named = next((after for word, after in pairwise(words) if word == "--home"), None)
    try:
        home = Home(home_dir(named, os.environ))
        home.create()
        with home.log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except (OSError, NolocoError):
        return repr(error)
    return f"the details are in {home.log}"


class _LogFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        if not isinstance(sys.exc_info()[1], OSError):  # a full disk is a health line, not a traceback for each record
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _JsonFormatter(logging.Formatter):
    """One object per line. The time is UTC, as log collectors expect."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    """`12:31:07 round 4 of 8: …`; the level is shown only above INFO. No tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return f"{self.formatTime(record, self.datefmt)} {level}{printable(record.getMessage())}"
