"""A home for a test, and a fake node that runs in it."""

import os
import subprocess
import sys
from pathlib import Path

import fake_node
import pytest

from noloco_node.host.home import Home


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path / "home")


@pytest.fixture
def running(home):
    """A fake node in `home`: a process of its own, because gRPC's asyncio needs one event loop per process."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, fake_node.__file__, str(home.root)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
