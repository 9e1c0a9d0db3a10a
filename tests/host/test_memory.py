"""How much memory there is, and how much this process has and had."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from noloco_node.host import memory

SCRIPT = """
from noloco_node.host import memory
before = memory.forget_peak()
block = bytearray(b"1") * (64 << 20)
del block
print(memory.peak_bytes() - before)
"""


def test_what_a_container_keeps_of_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    kept = "anon 100\ninactive_file 600\nactive_file 250\nactive_anon 100\n"
    for name, text in (("max", "1000\n"), ("current", "990\n"), ("stat", kept)):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_bytes() == 860
    (tmp_path / "memory.max").write_text("max\n")
    assert (memory.free_bytes() or 0) > 10**6, "the machine's"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no proc(5) here")
def test_the_peak_of_a_process_is_found() -> None:
    """In a process of its own: another one gives memory back when it likes."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60 * PATIENCE
    )
    assert 60 << 20 <= int(found.stdout) < 200 << 20


KEPT = """
from noloco_node.host import memory
blocks = [bytearray(b"1") * 100_000 for _ in range(2000)]
del blocks[::2]  # between others: the C library cannot give them back by itself
before = memory.process_bytes()
memory.give_back()
print(before - memory.process_bytes())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc here")
def test_what_was_freed_goes_back_to_the_system() -> None:
    found = subprocess.run(
        [sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, timeout=60 * PATIENCE
    )
    assert int(found.stdout) > 80_000_000
