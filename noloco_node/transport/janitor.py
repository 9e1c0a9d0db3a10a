"""A private directory for sockets that does not outlive this process, however the process ends.

After `kill -9` nobody is left to tidy up, so a small shell waits for that: it blocks on a pipe whose other end only
this process holds, and when the kernel closes it, kills the processes it was told of and removes the directory. It has
a session of its own, so Ctrl-C in the terminal does not reach it. A process is killed only if its command line still
names the directory: process ids are reused, the directory's random name is not.
"""

import asyncio
import functools
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SCRIPT = r"""
trap '' HUP INT TERM
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do
    { tr '\0' ' ' <"/proc/$pid/cmdline" || ps -o args= -p "$pid"; } 2>/dev/null | grep -qF -- "$1" && kill -9 "$pid"
done
rm -rf -- "$@"
"""

_LONGEST = 40
"""A socket's path holds 104 bytes on some systems, and a socket here is named by a peer id of 52."""

_EXIT_S = 2.0  # the shell has one directory to remove

_lifelines: set[int] = set()


class Runtime:
    """The directory (mode 0700) and the janitor that watches over it."""

    def __init__(self, path: Path, lifeline: int, janitor: asyncio.subprocess.Process) -> None:
        self.path = path
        self._lifeline = lifeline
        self._janitor = janitor

    @classmethod
    async def open(cls, *also: Path) -> "Runtime":
        """`also`: files elsewhere that must not outlive us either."""
        parent = tempfile.gettempdir()
        path = Path(tempfile.mkdtemp(prefix="noloco-", dir=parent if len(parent) <= _LONGEST else "/tmp"))
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
            shutil.rmtree(path)
            raise
        finally:
            os.close(waiting)
        return cls(path, lifeline, janitor)

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
        shutil.rmtree(self.path, ignore_errors=True)


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
