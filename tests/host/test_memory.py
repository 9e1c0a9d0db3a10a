"""How much memory there is, and how much this process has and had."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the files of one cgroup."""
    own = tmp_path / "own"
    own.write_text("5:cpu:/elsewhere\n4:hugetlb,memory:/run:1/node\n0::/run:1/node\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)

    def make(path: str, **files: str) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / path / f"memory.{name}").write_text(text)

    return make


KEPT_FILES = "anon 100\ninactive_file 600\nactive_file 250\nactive_anon 100\n"


def test_what_a_container_keeps_of_files_is_free(group: Callable[..., None]) -> None:
    group("", max="1000\n", current="990\n", stat=KEPT_FILES)
    assert memory.free_bytes() == 860
    assert memory.total_bytes() == 1000
    group("", max="max\n")
    assert (memory.free_bytes() or 0) > 10**6, "the machine's"
    assert memory.total_bytes() > 10**6


def test_the_smallest_limit_from_the_own_group_up_to_the_root_counts(group: Callable[..., None]) -> None:
    group("run:1/node", max="max\n", current="10\n", stat="")
    group("run:1", max="3000\n", current="2990\n", stat="inactive_file 40\n")
    group("", max="2000\n", current="100\n", stat="")
    assert (memory.total_bytes(), memory.free_bytes()) == (2000, 50)


def test_limits_of_cgroup_v1_count(group: Callable[..., None]) -> None:
    stat = "inactive_file 5\ntotal_inactive_file 600\ntotal_active_file 250\n"
    group("memory/run:1/node", limit_in_bytes="1000\n", usage_in_bytes="990\n", stat=stat)
    group("memory", limit_in_bytes="9223372036854771712\n", usage_in_bytes="9000\n", stat="")
    assert (memory.total_bytes(), memory.free_bytes()) == (1000, 860)


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
