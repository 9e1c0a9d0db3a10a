"""The state directory: who may read it, and that only one node lives there."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from noloco_node.errors import DiskFull, NodeAlreadyRunning, UsageError
from noloco_node.host.home import MAX_SOCKET_PATH_BYTES, Home

_HOLD = """
import sys
from pathlib import Path
from noloco_node.host.home import Home
with Home(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


_FORK = """
import os, sys
from pathlib import Path
from noloco_node.host.home import Home
home = Home(Path(sys.argv[1]))
waiting, end = os.pipe()
with home.lock():
    stays = os.fork()
    if not stays:
        os.close(end)
        os._exit(len(os.read(waiting, 1)))
    passes = os.fork()
    if passes:
        assert os.waitpid(passes, 0)[1] == 0
        assert home.holder() == str(os.getpid())
if not passes:
    os._exit(0)
assert home.holder() is None
with home.lock():
    pass
os.close(end)
assert os.waitpid(stays, 0)[1] == 0
"""


@pytest.fixture
def another_process_holds():
    """A function that makes another process hold the lock of a home."""
    started = []

    def hold(home):
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(home.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield hold
    for process in started:
        process.communicate()


def test_it_is_made_for_its_user_alone(tmp_path):
    home = Home(tmp_path / "a" / "b").create()
    assert home.root.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    assert Home(tmp_path / "open").create().root.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_use_too_is_not_closed_to_them(tmp_path):
    """As where root names /tmp or /home."""
    (tmp_path / "shared" / "theirs").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    assert Home(tmp_path / "shared").create().root.stat().st_mode & 0o7777 == 0o1777


def test_a_name_in_which_no_checkpoint_could_be_read_is_refused_at_once(tmp_path):
    """safetensors opens no such path: a node would train, save, and come back with nothing."""
    with pytest.raises(UsageError, match=r"is not UTF-8, .*name another directory"):
        Home(tmp_path / os.fsdecode(b"\xfc")).create()
    assert list(tmp_path.iterdir()) == []
    assert Home(tmp_path / "a b%20\n\u00fc").create().root.is_dir()


def test_a_second_node_is_told_the_pid_of_the_first(tmp_path, another_process_holds):
    home = Home(tmp_path).create()
    assert home.holder() is None
    process = another_process_holds(home)
    assert home.holder() == str(process.pid)
    with pytest.raises(NodeAlreadyRunning, match=rf"pid {process.pid}\)") as raised, home.lock():
        pass
    assert f"`noloco-node leave --home {tmp_path}`" in str(raised.value)
    assert raised.value.exit_code == 4


def test_the_lock_dies_with_its_process(tmp_path, another_process_holds):
    home = Home(tmp_path).create()
    process = another_process_holds(home)
    process.kill()
    process.wait()
    assert home.holder() is None
    with home.lock():
        assert home.lock_file.read_text() == f"{os.getpid()} {os.uname().nodename}\n"


def test_a_home_that_two_machines_share_names_the_machine_of_the_node(tmp_path, another_process_holds):
    """As on NFS, which passes locks on."""
    home = Home(tmp_path).create()
    another_process_holds(home)
    home.lock_file.write_text("4711 another-box\n")
    assert home.holder() == "4711 on another-box"
    with pytest.raises(NodeAlreadyRunning, match=r"\(pid 4711 on another-box\)"), home.lock():
        pass


def test_a_child_process_does_not_keep_the_lock(tmp_path):
    home = Home(tmp_path).create()
    with home.lock():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with home.lock():
            pass
    finally:
        child.communicate(b"\n")


def test_a_forked_worker_does_not_keep_the_lock_either(tmp_path):
    """As those of a data loader, which may stay: nor does one that goes through the end of the block take it away."""
    subprocess.run([sys.executable, "-c", _FORK, str(Home(tmp_path).create().root)], check=True, timeout=60 * PATIENCE)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    """As Lustre without `flock`, or NFS without its lock daemon."""

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    home = Home(tmp_path)
    said = r"node\.lock: No locks available. Name another directory with --home"
    with pytest.raises(UsageError, match=said), home.lock():
        pass
    assert home.holder() is None


def test_a_name_that_is_no_text_is_the_sockets_too():
    assert Home(Path(os.fsdecode(b"/h/\xff %"))).socket_url == "unix:/h/%FF%20%25/control.sock"


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    fits = tmp_path / ("x" * (MAX_SOCKET_PATH_BYTES - len(os.fsencode(tmp_path)) - len("//control.sock")))
    assert len(os.fsencode(Home(fits).create().socket)) == MAX_SOCKET_PATH_BYTES
    with pytest.raises(UsageError, match=r"108 bytes, 107 are possible.*--home"):
        Home(fits.with_name(fits.name + "x")).create()


def test_a_full_disk_is_named_where_the_pid_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFull, match="the disk is full"), Home(tmp_path).create().lock():
        raise AssertionError("unreachable")


def test_a_place_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        Home(tmp_path / "file" / "home").create()
