"""Files that are there whole or not at all, and that are still there after the power went."""

import errno
import os
from pathlib import Path

from noloco_node.errors import DiskFull, UsageError


def replace_text(path: Path, text: str) -> None:
    """Another content for a small file; whoever reads it meanwhile has the old one. Raises OSError."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(path)


def sync(path: Path) -> None:
    """What was written to this file, or named in this directory, is on the disk afterwards. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> UsageError | DiskFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk is full: cannot write {path}. Free some space, or move NOLOCO_HOME")
    return UsageError(f"cannot write {path}: {error.strerror}. Name another directory with --home or NOLOCO_HOME")
