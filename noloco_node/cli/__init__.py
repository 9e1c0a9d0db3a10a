"""The command line: one seam between what users type and the rest, and the only place where errors become text.

Nothing heavy is imported before a verb needs it, so `--help` answers at once. An error that is ours is one sentence on
stderr and its exit code; anything else is a bug: one line for the user, the traceback in the home's log.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from noloco_node.errors import EXIT_INTERRUPTED, NolocoError

_LIBRARIES = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # p2pd is started by exec; gRPC's fork handlers only add warnings and waits
    "GRPC_VERBOSITY": "NONE",  # it would print every refused connection; we get them as status codes
    "HIVEMIND_LOGLEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # its threads would compete with training, and it warns about forks
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Read by libraries when they are imported. A user's own setting stands."""


def program() -> NoReturn:
    """`main`, and then an end without the interpreter's own, which takes torch apart object by object: 2 s of a core,
    and on a busy box most of the 10 s in which a node leaves."""
    code = main()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except BaseException as error:  # noqa: BLE001 (the seam: below, nothing but an exit code leaves the process)
        return _ended(error, args)


def _run(args: list[str]) -> int:
    from noloco_node.cli.parser import parse

    verb, options = parse(args)
    code = verb(options)
    sys.stdout.flush()  # so that a closed pipe shows here and not while the interpreter ends
    return code


def _ended(error: BaseException, args: list[str]) -> int:
    ours = _ours(error)
    match ours or error:
        case NolocoError() as known:
            print(known, file=sys.stderr)
            return known.exit_code
        case SystemExit() as asked:  # argparse, after --help and --version
            return asked.code if isinstance(asked.code, int) else 0
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case BrokenPipeError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
            return 0
        case _:
            from noloco_node.cli.log_setup import note_crash

            print(
                f"noloco-node failed unexpectedly ({type(error).__name__}): {note_crash(error, args)}", file=sys.stderr
            )
            return 1


def _ours(error: BaseException) -> NolocoError | None:
    """The first error of ours in what a task group gathered."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_ours, error.exceptions)), None)
    return error if isinstance(error, NolocoError) else None
