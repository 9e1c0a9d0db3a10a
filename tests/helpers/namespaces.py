"""Network namespaces of this test process: several hosts on one machine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def why_not(*tools: str) -> str | None:
    """Why there can be none here, or not with these tools besides, if so."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", *tools) if not shutil.which(tool)]
    if missing:
        return f"needs {' and '.join(missing)} (ip and tc: iproute2; miniupnpd: miniupnpd-iptables)"
    tried = subprocess.run(["ip", "netns", "add", space("try")], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"cannot make a network namespace here: {tried.stderr.strip()}"
    sh(f"ip netns delete {space('try')}")
    return None


def space(name: str) -> str:
    return f"nn-{os.getpid()}-{name}"


@contextmanager
def spaces(*names: str) -> Iterator[None]:
    """Each with its own loopback. The links in them go with them at the end."""
    try:
        for name in names:
            sh(f"ip netns add {space(name)}")
            sh(f"ip -n {space(name)} link set lo up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", space(name)], capture_output=True, check=False, timeout=10)


def inside(name: str) -> list[str]:
    """What a command is put behind to run there."""
    return ["ip", "netns", "exec", space(name)]


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode == 0, (line, done.stderr)
