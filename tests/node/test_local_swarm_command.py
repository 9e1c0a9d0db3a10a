"""The nodes of a local swarm run the program that started them."""

import os
import subprocess
from pathlib import Path

from noloco_node.node.local_swarm import COMMAND, nodes_environ
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
