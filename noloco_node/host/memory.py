"""How much memory there is and is free, of the machine and of this container, and how much this process has and had at
most."""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """All memory of this machine, or what this container may use."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        allowed = (_CGROUP / "memory.max").read_text()
    except OSError:
        return installed
    return min(installed, int(allowed)) if allowed.strip().isdigit() else installed


def free_bytes() -> int | None:
    """None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None
    with suppress(OSError, ValueError):  # no limit: `max`
        allowed, used, stat = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)", stat, re.MULTILINE)))  # the kernel takes it back
        free = min(free, max(0, int(allowed) - int(used) + cached))
    return free


def process_bytes(pid: int | str = "self") -> int | None:
    """What a process has in memory; None where the system does not say, or it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def forget_peak() -> int | None:
    """What this process has now, from where `peak_bytes` counts again; None where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5)
    except OSError:
        return None
    return process_bytes()


def peak_bytes() -> int | None:
    """The most that this process had since `forget_peak`, or since it began."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def give_back() -> None:
    """To the system, what this process has freed and its C library keeps; where that is not glibc, nothing happens."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
