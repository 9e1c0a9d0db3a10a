"""How much memory this process has and had."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from noloco_node.host import memory
before = memory.forget_peak()
block = bytearray(b"1") * (64 << 20)
del block
print(memory.peak_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no proc(5) here")
def test_the_peak_of_a_process_is_found() -> None:
    """In a process of its own: another one gives memory back when it likes."""
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert 60 << 20 <= int(found.stdout) < 200 << 20
