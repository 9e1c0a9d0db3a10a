"""The process of a verb: `noloco-node`, and `python -m noloco_node`. Ctrl-C ends it from its first import on.

Importing torch or hivemind takes seconds, and an exception in the middle of it may be lost. So in an import, and before
and after a verb, SIGINT and SIGTERM end the process at once. While a verb works, the first one is a KeyboardInterrupt,
so that the verb can tidy up; a second one ends it at once, and so does a first one that Python loses, as in a
destructor. A node that runs has handlers of its own (node/main.py), and so has `top`.
"""

import os
import signal
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # errors.EXIT_INTERRUPTED, which is imported after the handlers are set
_SHOW_CURSOR = b"\x1b[?25h"  # a progress line may have hidden it
_asked = False


def _on_signal(_number: int, frame: FrameType | None) -> None:
    global _asked  # noqa: PLW0603 (the handlers are the process's, too)
    if _asked or not _can_tidy_up(frame):
        _end()
    _asked = True
    raise KeyboardInterrupt


def _end() -> NoReturn:
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)
    os._exit(INTERRUPTED)


def _nobody_gets(lost: "sys.UnraisableHookArgs") -> None:
    """What was raised in a destructor or in a weak reference's callback, of which asyncio has one for each task."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(lost)


def _can_tidy_up(frame: FrameType | None) -> bool:
    """Whether a verb works, and is not in the middle of an import."""
    while frame:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return False
        if frame.f_code.co_name == "run_verb":
            return True
        frame = frame.f_back
    return False


for _each in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_each) is not signal.SIG_IGN:  # as in a shell's background job
        signal.signal(_each, _on_signal)


class _Stderr(FileIO):
    """Nobody may read it any more, or its disk be full: that ends no verb, and changes no exit code."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_streams() -> None:
    """So that printing cannot fail for a letter that the terminal does not have, as in the name of a home. One that was
    closed would be the next file that is opened, and get what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            device = os.open(os.devnull, os.O_RDWR)  # for good: stderr is replaced below
            setattr(sys, name, os.fdopen(device, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stderr, TextIOWrapper):
        out = BufferedWriter(_Stderr(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = TextIOWrapper(out, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def program() -> NoReturn:
    """The verb, without the interpreter's shutdown: freeing torch object by object takes 2 s of a core, and on a busy
    machine most of the 10 s in which a node leaves."""
    _open_streams()
    sys.unraisablehook = _nobody_gets
    from noloco_node.cli import main

    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    program()
