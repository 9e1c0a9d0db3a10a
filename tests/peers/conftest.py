from pathlib import Path

import pytest

from noloco_node.base.identity import Identity


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "key")
