"""The command line: runs a verb, and turns every error into a sentence and an exit code.

Nothing heavy is imported before a verb needs it, so `--help` is quick. A NolocoError is one sentence on stderr and its
exit code, and with `--json` a document on stdout, too; one that is interrupted is that document alone. Anything else is
a bug: one line for the user, and the traceback in the home's log. How a signal ends a verb: __main__.py.
"""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from noloco_node.base.validation import printable
from noloco_node.errors import EXIT_INTERRUPTED, DiskFull, NolocoError, OutOfMemory, known

_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # p2pd is started by exec; gRPC's fork handlers would only add warnings and delays
    "GRPC_VERBOSITY": "NONE",  # else it prints every refused connection; status codes report them
    "HIVEMIND_LOGLEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # else its threads compete with training, and it warns about forks
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Read by libraries when they are imported. A variable that the user has set stays."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
"""The first name works with every torch, though 2.10 and 2.11 print a line that it is deprecated: they take
the second one for CUDA without using it (pytorch issue 183387)."""


def prepare_libraries() -> None:
    """Before they are imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in _ALLOCATOR):
        # as micro-batches, evaluations and boundaries want blocks of many sizes; read at torch's first use of a GPU
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def main(argv: Sequence[str] | None = None) -> int:
    prepare_libraries()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_verb(args)
    except BaseException as error:  # noqa: BLE001 (the process ends here: every error becomes an exit code)
        code = _report(error, args)
        for line in getattr(error, "__notes__", ()):  # what a node that failed has reached: node/trainer.py
            print(printable(line), file=sys.stderr)
        return code


def run_verb(args: list[str]) -> int:
    from noloco_node.cli.parser import parse

    verb, options = parse(args)
    code = verb(options)
    sys.stdout.flush()  # so that a closed pipe is found here and not at exit
    return code


def _report(error: BaseException, args: list[str]) -> int:
    match known(error) or _out_of_memory(error) or error:
        case NolocoError() as expected:
            return _say(str(expected), expected.exit_code, args)
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # rich exits with 1 then
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
            return 0
        case SystemExit() as asked:  # argparse, after --help and --version
            return asked.code if isinstance(asked.code, int) else 0
        case KeyboardInterrupt():
            return _document("interrupted by Ctrl-C or SIGTERM", EXIT_INTERRUPTED, args)
        case OSError(errno=errno.ENOSPC, filename=None):  # also at the flush: what is said here may not come through
            return _say("the disk is full: the output is not whole. Free some space", DiskFull.exit_code, args)
        case _:
            from noloco_node.cli.log_setup import note_crash

            sentence = f"noloco-node failed unexpectedly ({type(error).__name__}): {note_crash(error, args)}"
            return _say(sentence, NolocoError.exit_code, args)


def _out_of_memory(error: BaseException) -> OutOfMemory | None:
    is_it = isinstance(error, MemoryError)
    if not is_it and "torch" in sys.modules:
        from noloco_node.training.memory_budget import is_out_of_memory

        is_it = is_out_of_memory(error)
    return OutOfMemory("memory has no room for this: end other programs, or ask for less") if is_it else None


def _say(sentence: str, code: int, args: list[str]) -> int:
    _document(sentence, code, args)
    print(printable(sentence), file=sys.stderr)
    return code


def _document(sentence: str, code: int, args: list[str]) -> int:
    if "--json" in args:
        import json

        from noloco_node.views.documents import SCHEMA, as_error

        with suppress(OSError):  # on one line, since it may end a list of documents that has one a line
            print(json.dumps({"schema": SCHEMA, "error": as_error(sentence, code)}), flush=True)
    return code
