"""A home for a test, and a fake node that runs in it."""

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
    """A fake node in `home`."""
    with fake_node.begun(home.root) as process:
        yield process
        process.kill()
