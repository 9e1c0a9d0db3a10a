"""The sources of Python's standard library: a text that is on every machine, with nothing to download.

Files are taken in the order of their names, so machines with the same Python have the same corpus; between Python
versions most files differ a little, which does not matter for training. Their names decide which are held out: so two
versions of a file, which are nearly the same text, are on the same side everywhere.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from noloco_node.data.parts import is_held_out
from noloco_node.errors import UsageError

MAX_BYTES = 32 << 20
"""It is held in memory; the standard library has a third of this."""
MAX_FILE_BYTES = 512 << 10
"""Larger files are generated tables, not prose."""

_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"})
_MISSING = "this Python came without the sources of its standard library ({path}): install them, or use another Python"


def root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def read(root: Path) -> tuple[list[bytes], list[bytes]]:
    """The Python sources below `root`: those to train on, and those held out."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for path in _sources(root):
        text = _read(path)
        total += len(text) + 1
        if total > MAX_BYTES:
            break
        (held_out if is_held_out(path.relative_to(root).as_posix().encode()) else train).append(text)
    if not train or not held_out:
        raise UsageError(_MISSING.format(path=root))
    return train, held_out


def _sources(root: Path) -> Iterator[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}, which is part of the training data: {error.strerror}") from error
