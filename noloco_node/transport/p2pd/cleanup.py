"""A private directory for sockets that does not outlive this process, however the process ends.

After `kill -9` nobody is left to tidy up, so a small shell waits for that: it blocks on a pipe whose other end only
this process holds, and when the kernel closes it, kills the processes it was told of and removes the directory. It has
a session of its own, so Ctrl-C in the terminal does not reach it. A process is killed only if its command line still
names the directory: process ids are reused, the directory's random name is not.

Where the janitor was killed too, the next node of this user that starts here sweeps up: a directory is a leftover when
nobody holds its lock (flock, which is gone with its process).
"""

import asyncio
import fcntl
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SCRIPT = r"""
trap '' HUP INT TERM
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do
    { tr '\0' ' ' <"/proc/$pid/cmdline" || ps -o args= -p "$pid"; } 2>/dev/null | grep -qF -- "$1" && kill -9 "$pid"
done
rm -rf -- "$@"
"""

_LONGEST = 29
"""A socket's path holds 103 letters on some systems; of those the directory's name takes 17 and a peer's socket 57."""

_EXIT_S = 2.0  # the shell has one directory to remove
_FRESH_S = 10.0  # a directory so young may not have been locked yet
_PREFIX = "noloco-"
_KEY = "identity.key"  # of a visitor, the one file that stands in such a directory

_lifelines: set[int] = set()


class RuntimeDirectory:
    """The directory (mode 0700) and the janitor that watches over it."""

    def __init__(self, path: Path, lock: int, lifeline: int, janitor: asyncio.subprocess.Process) -> None:
        self.path = path
        self._lock = lock
        self._lifeline = lifeline
        self._janitor = janitor

    @classmethod
    async def open(cls, *also: Path) -> "RuntimeDirectory":
        """`also`: files elsewhere that must not outlive us either."""
        parent = _parent()
        _sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _locked(path)
        waiting, lifeline = os.pipe()
        _cut_after_forks()
        _lifelines.add(lifeline)
        try:
            janitor = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _SCRIPT, "noloco-janitor", str(path), *map(str, also)),
                stdin=waiting,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            _cut(lifeline)
            os.close(lock)
            shutil.rmtree(path)
            raise
        finally:
            os.close(waiting)
        return cls(path, lock, lifeline, janitor)

    def told(self, pid: int) -> None:
        """Kill this process too when we are gone; its command line must name `path`."""
        with suppress(BrokenPipeError):  # somebody killed the janitor: there is nobody to tell
            os.write(self._lifeline, b"%d\n" % pid)

    async def close(self) -> None:
        if self._lifeline not in _lifelines:
            return
        _cut(self._lifeline)
        try:
            await asyncio.wait_for(self._janitor.wait(), _EXIT_S)
        except TimeoutError:
            self._janitor.kill()
            await self._janitor.wait()
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def momentary_key() -> Iterator[Path]:
    """Where to put a key of the moment. Of a process that was killed the next node sweeps it up; sooner does a janitor
    that was told of its directory."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_parent()) as folder:
        lock = _locked(Path(folder))
        try:
            yield Path(folder) / _KEY
        finally:
            os.close(lock)


def _parent() -> Path:
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST else "/tmp")


def _locked(path: Path) -> int:
    """Raises BlockingIOError where somebody holds it. The lock lasts until the descriptor is closed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(parent: Path) -> None:
    """What nodes left that were killed together with their janitor: their directories and their p2pd."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, somebody else's, or in use
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


@functools.cache
def _cut_after_forks() -> None:
    """A forked worker inherits the pipe and would keep the janitor waiting after our death: close its copy."""
    os.register_at_fork(after_in_child=_cut_all)


def _cut_all() -> None:
    for lifeline in list(_lifelines):
        _cut(lifeline)


def _cut(lifeline: int) -> None:
    _lifelines.discard(lifeline)
    os.close(lifeline)
