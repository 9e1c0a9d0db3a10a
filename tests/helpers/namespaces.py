"""Network namespaces of this test process: several hosts on one machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from noloco_node.bench.links import inside, sh, space, spaces, why_not

__all__ = ["cut_link", "half_address", "inside", "sh", "slow_link", "space", "spaces", "two_halves", "why_not"]


@contextmanager
def slow_link(name: str, rate_bits_s: float) -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with the address of its end of the link."""
    burst = max(16_000, rate_bits_s / 8000)  # a millisecond: with less, the kernel would be woken for every packet
    names = [f"{name}-{side}" for side in (1, 2)]
    ends = [(space(name), f"10.83.0.{side}") for side, name in enumerate(names, 1)]
    with spaces(*names):
        (one, _), (other, _) = ends
        sh(f"ip link add link0 netns {one} type veth peer name link0 netns {other}")
        for there, address in ends:
            sh(f"ip -n {there} address add {address}/24 dev link0")
            sh(f"ip -n {there} link set link0 up")
            limit = f"rate {rate_bits_s / 1000:.0f}kbit burst {burst:.0f} latency 400ms"
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
