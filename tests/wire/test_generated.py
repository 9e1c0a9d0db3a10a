"""The committed stubs are what the .proto files say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
GENERATED = sorted(p.name for p in (ROOT / "noloco_node/wire").glob("*_pb2*.py*") if p.suffix in (".py", ".pyi"))


def test_generated_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools regenerates the stubs; it comes with the extra `test`")
    environ = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", ROOT / "proto/generate.sh", tmp_path]
    subprocess.run(command, env=environ, check=True, timeout=60 * PATIENCE)
    fresh = tmp_path / "noloco_node/wire"
    assert sorted(p.name for p in fresh.iterdir()) == GENERATED
    for name in GENERATED:
        assert (fresh / name).read_text() == (ROOT / "noloco_node/wire" / name).read_text(), (
            f"run proto/generate.sh: {name}"
        )


def test_no_message_uses_a_number_twice_or_leaves_the_package() -> None:
    text = (ROOT / "proto/noloco_node/wire/peer.proto").read_text()
    assert "package noloco.v1;" in text
    for body in re.findall(r"message \w+ \{([^}]*)\}", text):
        numbers = re.findall(r"= (\d+);", body)
        assert len(numbers) == len(set(numbers)), body
