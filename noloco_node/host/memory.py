"""How much memory is free, of the machine and of this container."""

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None
    with suppress(OSError, ValueError):  # no limit: `max`
        allowed, used = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        free = min(free, max(0, int(allowed) - int(used)))
    return free
