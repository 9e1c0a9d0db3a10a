"""The committed stubs are what the .proto files say."""

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
    protos = [str(p.relative_to(ROOT / "proto")) for p in sorted((ROOT / "proto").rglob("*.proto"))]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *protos],
        cwd=ROOT,
        check=True,
        timeout=60 * PATIENCE,
    )
    fresh = tmp_path / "noloco_node/wire"
    (fresh / "circuit_pb2_grpc.py").unlink()  # it has no services
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
