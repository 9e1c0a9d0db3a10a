"""Files that are there whole or not at all, and that are still there after the power went."""

import os
from pathlib import Path


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
