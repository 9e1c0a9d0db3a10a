"""A private directory for sockets that is removed when this process ends, even by `kill -9`.

A small shell, the cleaner, blocks on a pipe whose other end only this process holds. When the kernel closes that, the
shell kills the processes whose ids it has read from the pipe, and removes the directory. It has a POSIX session of its
own, so Ctrl-C in the terminal does not reach it. It kills a process only if its command line still names the directory:
process ids are reused, the directory's random name is not.

Where the cleaner was killed too, the next node of this user that starts here removes what is left: directories whose
lock (flock, released when its process ends) is free.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from noloco_node.base.atomic_files import writing
from noloco_node.host import forks

_SCRIPT = r"""
trap '' HUP INT TERM
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do
    { tr '\0' ' ' <"/proc/$pid/cmdline" || ps -o args= -p "$pid"; } 2>/dev/null | grep -qF -- "$1" && kill -9 "$pid"
done
rm -rf -- "$@"
"""

_LONGEST = 29
"""A socket's path has at most 103 bytes on some systems: 17 for the directory's name, 57 for a peer's socket."""

_EXIT_S = 2.0  # the shell has one directory to remove
_FRESH_S = 10.0  # a directory so young may not have been locked yet
_PREFIX = "noloco-"
_KEY = "identity.key"  # a visitor's temporary key, the one file that may lie in such a directory


class RuntimeDirectory:
    """The directory (mode 0700) and its cleaner."""

    def __init__(self, path: Path, lock: int, pipe: int, cleaner: asyncio.subprocess.Process) -> None:
        self.path = path
        self._lock = lock
        self._pipe = pipe
        self._cleaner = cleaner

    @classmethod
    async def open(cls, *also: Path) -> "RuntimeDirectory":
        """`also`: files elsewhere to remove with it. Raises UsageError, DiskFull where there can be none."""
        path = _new_folder()
        lock = _locked(path)
        _remove_leftovers(path.parent)
        waiting, pipe = os.pipe()
        forks.own(pipe)  # else a forked worker would keep the cleaner waiting after our end
        try:
            cleaner = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _SCRIPT, "noloco-cleaner", str(path), *map(str, also)),
                stdin=waiting,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            forks.close(pipe)
            os.close(lock)
            shutil.rmtree(path)
            raise
        finally:
            os.close(waiting)
        return cls(path, lock, pipe, cleaner)

    def kill_at_end(self, pid: int) -> None:
        """Have this process killed when ours ends; its command line must name `path`."""
        with suppress(BrokenPipeError):  # the cleaner was killed
            os.write(self._pipe, b"%d\n" % pid)

    async def close(self) -> None:
        if not forks.is_own(self._pipe):
            return
        forks.close(self._pipe)
        try:
            async with asyncio.timeout(_EXIT_S):
                await self._cleaner.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):  # it ended at this very moment
                self._cleaner.kill()
            await self._cleaner.wait()
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def temporary_key() -> Iterator[Path]:
    """A path for a key that is removed at the end. Where the process was killed, the cleaner removes its folder, if it
    was opened with it (`also`), or else the next node that starts."""
    folder = _new_folder()
    lock = _locked(folder)
    try:
        yield folder / _KEY
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> Path:
    elsewhere = f"name another folder, of at most {_LONGEST} letters, with TMPDIR"
    with writing("temporary files", elsewhere):
        parent = tempfile.gettempdir()
    if len(parent) > _LONGEST:
        parent = "/tmp"
    with writing(parent, elsewhere):
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _locked(path: Path) -> int:
    """Raises BlockingIOError where another process holds the lock. It lasts until the descriptor is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_leftovers(parent: Path) -> None:
    """Remove the directories, and kill the p2pd, of nodes that were killed together with their cleaner."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, another user's, or in use
            about, inside = path.lstat(), list(path.iterdir())
            known = all(child.is_socket() or child.name == _KEY for child in inside)
            ours = about.st_uid == os.getuid() and inside and known
            if ours and time.time() - about.st_mtime > _FRESH_S:
                descriptor = _locked(path)
                _kill_users(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _kill_users(path: Path) -> None:
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"-listen=/unix{path}/".encode() in command_line.read_bytes():
                os.kill(int(command_line.parent.name), signal.SIGKILL)
