"""How much memory there is and is free, of the machine and of this container, and how much this process has and had at
most."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NAMES = {
    "": ("memory.max", "memory.current", ""),  # cgroup v2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # v1
}
"""The files of the limit and of what is used, and how the lines of memory.stat begin that count the groups inside."""


def total_bytes() -> int:
    """All memory of this machine, or what this container may use."""
    return min([_installed(), *(allowed for allowed, *_ in _limits())])


def free_bytes() -> int | None:
    """None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None
    for allowed, group, usage, total in _limits():
        with suppress(OSError, ValueError):
            used, stat = (group / usage).read_text(), (group / "memory.stat").read_text()
            cached = re.findall(rf"^{total}(?:in)?active_file (\d+)", stat, re.MULTILINE)  # the kernel takes it back
            free = min(free, max(0, allowed - int(used) + sum(map(int, cached))))
    return free


def _limits() -> Iterator[tuple[int, Path, str, str]]:
    """Of the groups that this process is in, from its own one up to the root: each holds. In a container the root may
    be its own group, under a path of the machine that is not there."""
    try:
        own = _OWN_CGROUPS.read_text(errors="surrogateescape")
    except OSError:
        return
    for controllers, path in re.findall(r"^\d+:(.*?):/(.*)$", own, re.MULTILINE):  # cgroups(7)
        for kind in _NAMES.keys() & controllers.split(","):
            limit, *others = _NAMES[kind]
            for inside in (Path(path), *Path(path).parents):
                group = _CGROUPS / kind / inside
                with suppress(OSError, ValueError):  # no limit: no such file, or `max`
                    if (allowed := int((group / limit).read_text())) < _installed():
                        yield allowed, group, *others


def _installed() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
