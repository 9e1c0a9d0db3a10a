"""The home, a node's state directory: where it is, where its files lie, and the lock that lets only one node use it.

The lock is the kernel's (flock), so it ends with its process, however that ended; the pid and the machine's name in the
file are for people.
"""

import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from noloco_node.base.atomic_files import open_file, require_file, writing
from noloco_node.errors import NodeAlreadyRunning, NolocoError, UsageError
from noloco_node.host import forks

MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes on Linux, the last of them a zero."""
_MAX_HOLDER_BYTES = 100
"""A pid and a machine's name, which has at most 64."""
_TRY_S = 0.03
_TRIES, _CHANGE_TRIES = 5, 300
"""`holder` has the lock for a moment, another command of a run's author for a second or two."""


def default_home(environ: Mapping[str, str]) -> Path:
    """`$NOLOCO_HOME`, else `$XDG_STATE_HOME/noloco-node`, else `~/.local/state/noloco-node`."""
    if named := environ.get("NOLOCO_HOME"):
        return whole_path(named)
    state = environ.get("XDG_STATE_HOME", "")
    if state.startswith("/"):  # the XDG rules: what is relative is ignored
        return Path(state, "noloco-node")
    return user_dir(environ) / ".local" / "state" / "noloco-node"


def user_dir(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        return Path("/")  # as Docker has it for a user without one; where nothing can be written there, that is said


def home_dir(flag: object, environ: Mapping[str, str]) -> Path:
    return whole_path(str(flag)) if flag else default_home(environ)


def whole_path(named: str) -> Path:
    """Absolute, and without `..`."""
    try:
        path = Path(named).expanduser().absolute()
    except RuntimeError:
        raise UsageError(f"{named} names no user's home directory: write the path out") from None
    return Path(os.path.realpath(path)) if ".." in path.parts else path  # resolve() raises for a loop of links


class _Inside:
    """A file or a folder of a home."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: "Home", _: object) -> Path:
        return home.root / self._name


@dataclass(frozen=True, slots=True)
class Home:
    root: Path
    identity = _Inside("identity.key")
    socket = _Inside("control.sock")
    lock_file = _Inside("node.lock")
    log = _Inside("node.log")
    web_token = _Inside("web.token")
    """The token that the web page needs for pause, resume and leave."""
    pause_mark = _Inside("paused")
    """Where it is, the node makes no step: neither now nor after a restart."""
    traffic = _Inside("traffic.json")
    remembered = _Inside("remembered.json")
    data = _Inside("data")
    """Token files made of the volunteer's files: made again where they are missing."""

    @property
    def socket_url(self) -> str:
        """For gRPC, which decodes it: a home may have spaces and per cent signs in its name."""
        return f"unix:{quote(os.fsencode(self.socket))}"

    @property
    def flag(self) -> str:
        """` --home DIR`, for a command that is about this home; empty where it is the default one."""
        return "" if self.root == default_home(os.environ) else f" --home {shlex.quote(str(self.root))}"

    def not_ours(self) -> UsageError:
        """For what the system does not let this user do there."""
        return UsageError(f"the node in {self.root} belongs to another user: ask as that user")

    def run(self, run_id: str) -> Path:
        return self.root / "runs" / run_id

    def create(self) -> "Home":
        """Make the directory, for its user alone unless it was there with something in it. Raises UsageError where a
        node could not use it."""
        length = len(raw := os.fsencode(self.socket))
        try:
            raw.decode()
        except UnicodeDecodeError:
            raise UsageError(
                f"the name of {self.root} is not UTF-8, and no checkpoint can be read there: name another directory "
                "with --home or NOLOCO_HOME"
            ) from None
        if length > MAX_SOCKET_PATH_BYTES:
            raise UsageError(
                f"{self.root} is too long for a control socket ({length} bytes, {MAX_SOCKET_PATH_BYTES} are possible): "
                "name a shorter directory with --home or NOLOCO_HOME"
            )
        with writing(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not any(self.root.iterdir()):  # others may use it too, as /tmp; key and socket have their own modes
                with suppress(PermissionError):  # a mounted volume may belong to root
                    self.root.chmod(0o700)
        return self

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the home for this process. Raises NodeAlreadyRunning, which names the other's pid."""
        with writing(self.lock_file):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            require_file(descriptor)
        forks.own(descriptor)
        try:
            with writing(self.lock_file):  # not every file system of a network has locks
                is_free = _locked(descriptor, _TRIES)
            if not is_free:
                pid = _holder(os.pread(descriptor, _MAX_HOLDER_BYTES, 0))
                raise NodeAlreadyRunning(
                    f"a node is running in {self.root} already (pid {pid}): stop it with "
                    f"`noloco-node leave{self.flag}`, or give this one a home of its own with --home"
                )
            with writing(self.lock_file):
                holder = f"{os.getpid()} {os.uname().nodename}\n".encode()
                os.pwrite(descriptor, holder, 0)  # over the last one, which a full disk has room for
                os.ftruncate(descriptor, len(holder))
            yield
        finally:
            if forks.is_own(descriptor):
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that has just begun may not have closed its copy
                forks.close(descriptor)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """For a command of the author, beside a node: two that read one amendment would sign two of the same version.
        Raises NolocoError where another one does not end."""
        with open_file(self.identity) as key:  # which nothing replaces
            is_free = True
            with suppress(OSError):  # some file systems of a network lock only what may be written
                is_free = _locked(key.fileno(), _CHANGE_TRIES)
            if not is_free:
                raise NolocoError(f"another command is changing a run in {self.root}: wait for it, or end it")
            yield

    def holder(self) -> str | None:
        """The pid of the node that runs in this home, `PID on NAME` where that is on another machine, which a home on a
        network's disk allows; None where none does."""
        try:
            with open_file(self.lock_file) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _holder(file.read(_MAX_HOLDER_BYTES))
        except OSError:
            pass
        return None


def _holder(written: bytes) -> str:
    pid, _, machine = written.decode(errors="replace").partition("\n")[0].partition(" ")
    return (pid or "unknown") + (f" on {machine}" if machine not in ("", os.uname().nodename) else "")


def _locked(descriptor: int, tries: int) -> bool:
    for _ in range(tries):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TRY_S)
        else:
            return True
    return False
