"""Large imports, for which the garbage collector rests: while more and more objects come, it would look through all of
them again and again and find nothing to free. That took an eighth of the CPU time in which a node starts."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_import() -> Iterator[None]:
    """Where the process has called `gc.freeze` before (a node's has, cli/daemon.py), the collector leaves out what was
    imported for good, and so what else there is at that moment until `gc.unfreeze`. Where all was there, nothing
    happens: to ask a process with a million frozen objects how many it has takes 0.1 s."""
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules and gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()
