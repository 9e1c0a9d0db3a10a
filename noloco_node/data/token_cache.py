"""The token files made of a volunteer's files: kept for the next start, and removed when they are no longer used.

A use sets the file's modification time. A node's start removes those that no run has used for UNUSED_DAYS, and the
least recently used while all but the last used one take more than OTHERS_BYTES. They can be made again any time.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

from noloco_node.base import units
from noloco_node.data.sources import TOKENS

log = logging.getLogger(__name__)

UNUSED_DAYS = 30
OTHERS_BYTES = 20 << 30
_DAY_S = 86_400


def use(path: Path) -> None:
    with suppress(OSError):  # a home on a read-only disk can be used too
        os.utime(path)


def prune(folder: Path, now: float | None = None) -> list[Path]:
    """Remove what is no longer used. Returns what was removed."""
    now, gone, room = time.time() if now is None else now, [], OTHERS_BYTES
    for place, (_, age_s, size, path) in enumerate(_by_use(folder, now)):
        room -= size if place else 0
        if age_s <= UNUSED_DAYS * _DAY_S and room >= 0:
            continue
        try:
            path.unlink()
        except OSError as error:
            log.warning("cannot remove %s, which no run has used lately: %s", path, error.strerror)
            continue
        gone.append(path)
        days = units.count(int(age_s / _DAY_S), "day")
        log.info("removed %s (%s), last used %s ago; a run that needs it makes it again", path, units.size(size), days)
    return gone


def _by_use(folder: Path, now: float) -> list[tuple[float, float, int, Path]]:
    """How far from now their last use is, seconds since then, size and path; the last used first. What lies in the
    future comes from a clock that was wrong, or is: so far it may lie in the past too, or not at all."""
    found = []
    with suppress(OSError):
        for path in folder.glob(f"*{TOKENS}"):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                since = now - stat.st_mtime
                found.append((abs(since), max(0.0, since), stat.st_size, path))
    return sorted(found)
