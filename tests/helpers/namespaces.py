"""Network namespaces of this test process: several hosts on one machine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def why_not(*tools: str) -> str | None:
    """Why there can be no namespaces with these tools on this machine; None if there can."""
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
    """Namespaces with these names, each with its own loopback. They are removed at the end, with the links in them."""
    try:
        for name in names:
            sh(f"ip netns add {space(name)}")
            sh(f"ip -n {space(name)} link set lo up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", space(name)], capture_output=True, check=False, timeout=10)


@contextmanager
def slow_link(name: str, rate_bits_s: float) -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with the address of its end of the link."""
    names = [f"{name}-{side}" for side in (1, 2)]
    ends = [(space(name), f"10.83.0.{side}") for side, name in enumerate(names, 1)]
    with spaces(*names):
        (one, _), (other, _) = ends
        sh(f"ip link add link0 netns {one} type veth peer name link0 netns {other}")
        for there, address in ends:
            sh(f"ip -n {there} address add {address}/24 dev link0")
            sh(f"ip -n {there} link set link0 up")
            limit = f"rate {rate_bits_s / 1000:.0f}kbit burst 16kb latency 400ms"
            sh(f"tc -n {there} qdisc add dev link0 root tbf {limit}")
        yield ends


HOSTS_OF_A_HALF = 40


def half_address(half: int, number: int) -> str:
    return f"10.85.0.{(half - 1) * 100 + number}"


@contextmanager
def two_halves() -> Iterator[None]:
    """The namespaces `half1` and `half2` with a link between them. Each has addresses for HOSTS_OF_A_HALF hosts, as if
    each were another machine: 10.85.0.1, .2 ... in one, 10.85.0.101, .102 ... in the other."""
    with spaces("half1", "half2"):
        sh(f"ip link add link0 netns {space('half1')} type veth peer name link0 netns {space('half2')}")
        for half in (1, 2):
            for number in range(1, HOSTS_OF_A_HALF + 1):
                sh(f"ip -n {space(f'half{half}')} address add {half_address(half, number)}/24 dev link0")
            sh(f"ip -n {space(f'half{half}')} link set link0 up")
        yield


def cut_link(*, cut: bool) -> None:
    """Between the two halves. What is sent is dropped without a word: no packet fits into a bucket of one byte."""
    for half in (1, 2):
        limit = "add dev link0 root tbf rate 8bit burst 1 latency 1ms" if cut else "del dev link0 root"
        sh(f"tc -n {space(f'half{half}')} qdisc {limit}")


def inside(name: str) -> list[str]:
    """The words to put before a command so that it runs there."""
    return ["ip", "netns", "exec", space(name)]


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode == 0, (line, done.stderr)
