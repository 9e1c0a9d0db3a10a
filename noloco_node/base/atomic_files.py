"""Small state files: written whole and synced, read with a damaged one named, and what a full disk is called.

A file is written under a temporary name in the same folder, synced, and renamed; then the folder is synced. A kill or a
power cut at any instant leaves the old content or the new one. Large files (checkpoints, token files, exports) are
written elsewhere in the same manner, with `part_of`, `sync` and `writing`.
"""

import errno
import glob
import itertools
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from noloco_node.errors import DiskFull, UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")

_ANOTHER_HOME = "name another directory with --home or NOLOCO_HOME"
_NO_FILE = "it is not a regular file"
_numbers = itertools.count()


# ---- writing ----
def write(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the content of a file, or make it. Raises DiskFull, UsageError."""
    with writing(path), _written_beside(path, content, mode) as fresh:
        fresh.replace(path)
        sync(path.parent)


def create(path: Path, content: str | bytes, mode: int = 0o666) -> bool:
    """Make a file, unless it is there already: of two processes that race, one wins and its content stays. Raises
    DiskFull, UsageError."""
    with writing(path), _written_beside(path, content, mode) as fresh:
        try:
            path.hardlink_to(fresh)  # unlike a rename, it never replaces
        except FileExistsError:
            return False
        sync(path.parent)
    return True


@contextmanager
def _written_beside(path: Path, content: str | bytes, mode: int) -> Iterator[Path]:
    fresh = part_of(path)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        yield fresh
    finally:
        with suppress(OSError):
            fresh.unlink()


def part_of(path: Path) -> Path:
    """A temporary name for a file or a folder, used by nobody else. Those that killed processes left are removed."""
    mine = path.with_name(f".{path.name}.{next(_numbers)}-{os.getpid()}.part")
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        pid = part.name.split(".")[-2].rpartition("-")[2]
        ended = pid.isdigit() and not Path("/proc", pid).exists()
        if ended or part == mine:  # our own pid may come again, as in containers
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)
    return mine


def sync(path: Path) -> None:
    """Return when the content of this file, or the names in this directory, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_known(path: Path) -> None:
    """Raises OSError where it cannot be known what is there: from Python 3.14 on, `exists` says no then."""
    try:
        path.stat()
    except ValueError:  # as of a name with a zero in it
        pass
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise


@contextmanager
def writing(what: object, elsewhere: str = _ANOTHER_HOME) -> Iterator[None]:
    """An OSError inside becomes DiskFull or UsageError, with the remedy."""
    try:
        yield
    except OSError as error:
        raise cannot_write(what, error, elsewhere) from error


def cannot_write(what: object, error: OSError, elsewhere: str = _ANOTHER_HOME) -> UsageError | DiskFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk is full: cannot write {what}. Free some space, or {elsewhere}")
    return UsageError(f"cannot write {what}: {error.strerror or error}. {elsewhere[0].upper()}{elsewhere[1:]}")


def free_bytes(directory: Path) -> int | None:
    """Free bytes of the disk that a directory is on; None where the system does not say, or where it is none, as
    /proc."""
    there = next((place for place in (directory, *directory.parents) if place.exists()), directory)
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    return usage.free if usage.total else None


# ---- reading ----
class DamagedFile(UsageError):
    """A state file that was written here does not hold what was written."""


class NotAFile(OSError):
    """A FIFO, a device, a socket, a directory or a loop of links has the name of a file."""


def open_file(path: Path) -> BufferedReader:
    """Open a file of the home for reading. Raises OSError, and NotAFile at once where something else has its name: a
    FIFO would block, and a device may have no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket, a loop of links
            raise NotAFile(error.errno, _NO_FILE) from None
        raise
    require_file(descriptor)
    return os.fdopen(descriptor, "rb")


def refuse_fifo(path: Path) -> None:
    """Before a library opens it for writing, which would wait for a reader. Raises NotAFile."""
    if path.is_fifo():
        raise NotAFile(errno.EINVAL, _NO_FILE)


def require_file(descriptor: int) -> None:
    """Raises NotAFile, and has closed it then."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile(errno.EINVAL, _NO_FILE)


def read_json(path: Path, check: Callable[[Any], T], max_bytes: int, remedy: str) -> T | None:
    """The content of a small JSON file, None where there is no file. `check` turns it into its value and raises
    ValueError where it cannot be one. Raises DamagedFile, which ends in the remedy, and UsageError."""
    try:
        with open_file(path) as file:
            raw = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        mend = "Move it away" if isinstance(error, NotAFile) else "Make it readable for this user"
        raise UsageError(f"cannot read {path}: {error.strerror}. {mend}") from error
    try:
        if len(raw) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return check(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged ({error}): {remedy}") from None


def read_json_or_set_aside(path: Path, check: Callable[[Any], T], max_bytes: int, lost: str) -> T | None:
    """The same for a file without which a node can go on: a damaged one is renamed, the log says what is lost, and the
    answer is None."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        return read_json(path, check, max_bytes, f"{lost}. It is kept as {aside.name}, delete it when you like")
    except UsageError as error:
        log.warning("%s", error)
        if isinstance(error, DamagedFile):
            with suppress(OSError):
                path.replace(aside)
    return None
