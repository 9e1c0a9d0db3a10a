"""The processes of a bench: orders and answers, what one says that fails, and that nothing is left of them."""

import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.bench.workers import Workers, cpu_s, descendants
from noloco_node.errors import NolocoError

MEMBER = """
    import asyncio, os, subprocess, sys, tempfile
    from noloco_node.bench.workers import serve
    from noloco_node.errors import NolocoError

    class Member:
        def add(self, one, other):
            print("what a library prints")
            return {"sum": one + other}

        async def wait(self):
            await asyncio.sleep(0)

        def share(self):
            open(f"/dev/shm/torch_{os.getpid()}_1", "w").close()

        def child(self):
            return {"pid": subprocess.Popen(["sleep", "60"], start_new_session=True).pid}

        def folder(self):
            return {"path": tempfile.mkdtemp()}

        def refuse(self):
            raise NolocoError("there is no such peer")

        def fail(self):
            raise ValueError("a fault of its own")

    serve(Member())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_worker.py").write_text(textwrap.dedent(MEMBER))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    yield "a_worker"


def test_workers_answer_fail_and_leave_nothing(module: str) -> None:
    with Workers(module, [None, None]) as workers:
        pids = [worker.pid for worker in workers.each]
        answers = workers.ask("add", 30, each=[{"other": 1}, {"other": 2}], one=10)
        assert [answer["sum"] for answer in answers] == [11, 12]
        assert workers.ask("wait", 30) == [{}, {}]
        assert min(workers.used().cpu_s) > 0
        pids += [answer["pid"] for answer in workers.ask("child", 30)]
        assert pids[2] in descendants(pids[0])
        workers.ask("share", 30)
        shared = [Path("/dev/shm", f"torch_{worker.pid}_1") for worker in workers.each]
        assert all(path.exists() for path in shared)
        folders = [answer["path"] for answer in workers.ask("folder", 30)]
        with pytest.raises(NolocoError, match="a worker could not refuse: there is no such peer"):
            workers.ask("refuse", 30)
        with pytest.raises(NolocoError, match=r"a worker ended when it was to fail.*a fault of its own"):
            workers.ask("fail", 30)
    assert not any(path.exists() for path in shared)
    assert not any(map(os.path.exists, folders))
    until = time.monotonic() + 60
    while any(Path("/proc", str(pid), "exe").exists() for pid in pids):  # a zombie has no program
        assert time.monotonic() < until
    assert cpu_s(pids[0]) == 0
