"""The nodes of a local swarm as processes: which program they run, and how they end."""

import asyncio
import os
import subprocess
import threading
from pathlib import Path

import pytest

from noloco_node.errors import DiskFull
from noloco_node.host.home import Home
from noloco_node.node.local_swarm import COMMAND, Member, nodes_environ, opened
from noloco_node.version import VERSION


def test_what_lies_in_the_working_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "noloco_node").mkdir()
    (tmp_path / "noloco_node" / "__init__.py").touch()
    (tmp_path / "noloco_node" / "__main__.py").write_text("print('a stranger')")
    environ = nodes_environ({**os.environ, "NOLOCO_HOME": "/nowhere"})
    assert "NOLOCO_HOME" not in environ
    done = subprocess.run(
        [*COMMAND, "--version"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert VERSION in done.stdout


async def test_a_node_that_has_just_ended_keeps_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to leave before asyncio has heard that it ended: on a busy machine its thread for that comes late."""
    told, wait = threading.Event(), os.waitpid

    def comes_late(pid: int, options: int) -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert told.wait(60)
        return wait(pid, options)

    monkeypatch.setattr(os, "waitpid", comes_late)
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 (nothing else is to happen meanwhile)
    await Member(Home(tmp_path), process).leave()
    told.set()
    assert await process.wait() == 7


async def test_where_the_homes_are_kept_the_disk_is_full(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=rf"cannot write {tmp_path}/(one|two)\. Free some space, or name another folder"):
        async with opened(tmp_path, COMMAND, os.environ) as swarm:
            for name in ("one", "two"):
                (swarm.root / name).write_text("a log")
    assert not swarm.root.exists()
