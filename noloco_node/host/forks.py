"""File descriptors that are this process's alone: a forked child closes its copies.

A data loader's workers are forks, and may outlive their parent. What ends when its last descriptor is closed (a lock, a
pipe) would last as long as they do.
"""

import functools
import os

_own: set[int] = set()


def own(descriptor: int) -> int:
    _close_after_forks()
    _own.add(descriptor)
    return descriptor


def is_own(descriptor: int) -> bool:
    """Not where it is closed already: here, or since this process was forked."""
    return descriptor in _own


def close(descriptor: int) -> None:
    _own.discard(descriptor)
    os.close(descriptor)


@functools.cache
def _close_after_forks() -> None:
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in list(_own):
        close(descriptor)
