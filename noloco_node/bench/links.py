"""Hosts on one machine: network namespaces, each behind a link of its own that tc holds at a rate, up and down.

All links end at one switch, a bridge in a namespace of its own; nothing outside of these namespaces is changed. They
are removed at the end with the processes in them; those of a program that was killed, when the next one begins.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from noloco_node.errors import NolocoError

_NAMED = re.compile(r"nn-([0-9]+)-\S+")
_SWITCH = "switch"
LATENCY_MS = 50
"""What waits in front of a link at most; more is dropped. As on a router that keeps its queues short: with 200 ms our
own swap takes a sixth longer, since what its partner answers waits too."""
MAX_HOSTS = 200
_SPARE_BYTES = 1500
"""For the headers of what is sent at once."""
_MOST_BYTES = 1 << 16
"""Sent at once: more is for newer kernels."""


def why_not(*tools: str) -> str | None:
    """Why there can be no namespaces with these tools on this machine; None if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", *tools) if not shutil.which(tool)]
    if missing:
        return f"needs {' and '.join(missing)} (ip and tc: iproute2; miniupnpd: miniupnpd-iptables)"
    tried = _ran(f"ip netns add {space('try')}")
    if tried.returncode:
        return f"cannot make a network namespace here: {tried.stderr.strip()}"
    try:
        held = _ran(f"tc -n {space('try')} qdisc add dev lo root {_limit(1)}") if "tc" in tools else tried
    finally:
        _ran(f"ip netns delete {space('try')}")
    return f"cannot hold a link at a rate here: {held.stderr.strip()}" if held.returncode else None


def require() -> None:
    """Raises NolocoError where links with a rate cannot be made."""
    if why := why_not("tc"):
        raise NolocoError(f"this bench joins nodes by links of a known rate, and {why}. Run it as root on Linux.")


def space(name: str) -> str:
    return f"nn-{os.getpid()}-{name}"


def inside(name: str) -> list[str]:
    """The words to put before a command so that it runs there."""
    return ["ip", "netns", "exec", space(name)]


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        return inside(self.name)

    def traffic(self) -> tuple[int, int]:
        """Bytes that went up its link and down, all headers included."""
        ends = (space(self.name), "link0"), (space(_SWITCH), self.name)
        up, down = (json.loads(sh(f"tc -n {there} -j -s qdisc show dev {link} root")) for there, link in ends)
        return int(up[0]["bytes"]), int(down[0]["bytes"])


@contextmanager
def spaces(*names: str) -> Iterator[None]:
    """Namespaces with these names, each with its own loopback. They are removed at the end, with the links in them."""
    _remove_left_over()
    try:
        for name in names:
            sh(f"ip netns add {space(name)}")
            sh(f"ip -n {space(name)} link set lo up")
        yield
    finally:
        for name in names:
            _remove(space(name))


@contextmanager
def star(count: int, mbit: float) -> Iterator[Sequence[Host]]:
    """`count` hosts, whose links carry `mbit` Mbit/s up and as much down."""
    if not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"from 1 to {MAX_HOSTS} hosts, not {count}")
    hosts = [Host(f"host{number}", f"10.86.0.{number}") for number in range(1, count + 1)]
    with spaces(_SWITCH, *(host.name for host in hosts)):
        switch = space(_SWITCH)
        sh(f"ip -n {switch} link add bridge0 type bridge")
        sh(f"ip -n {switch} link set bridge0 up")
        for host in hosts:
            there = space(host.name)
            sh(f"ip link add link0 netns {there} type veth peer name {host.name} netns {switch}")
            sh(f"ip -n {switch} link set {host.name} master bridge0 up")
            sh(f"ip -n {there} address add {host.address}/24 dev link0")
            sh(f"ip -n {there} link set link0 up gso_max_size {min(_bucket(mbit) - _SPARE_BYTES, _MOST_BYTES):.0f}")
            sh(f"tc -n {there} qdisc add dev link0 root {_limit(mbit)}")
            sh(f"tc -n {switch} qdisc add dev {host.name} root {_limit(mbit)}")
        yield hosts


def _limit(mbit: float) -> str:
    return f"tbf rate {mbit * 1000:.0f}kbit burst {_bucket(mbit):.0f} latency {LATENCY_MS}ms"


def _bucket(mbit: float) -> float:
    """Bytes that may go at once, those of a millisecond at least. TCP hands a link as much at a time, as to a network
    card that cuts packets itself: those of 1500 bytes took the kernel a fifth of the CPU time that eight nodes on two
    cores had, which no node would spend on a machine of its own."""
    return max(16_000, mbit * 125)


def sh(line: str) -> str:
    done = _ran(line)
    if done.returncode:
        raise NolocoError(f"'{line}' failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _ran(line: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(line.split(), capture_output=True, text=True, check=False, timeout=10)


def _remove(name: str) -> None:
    for pid in _ran(f"ip netns pids {name}").stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ran(f"ip netns delete {name}")


def _remove_left_over() -> None:
    for line in _ran("ip netns list").stdout.splitlines():
        name = line.partition(" ")[0]
        if (made := _NAMED.fullmatch(name)) and not Path("/proc", made[1]).exists():
            _remove(name)
