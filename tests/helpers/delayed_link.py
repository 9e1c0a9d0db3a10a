"""Two hosts on one machine, with a link between them that has a rate and a delay.

A kernel without netem holds a rate (tc's tbf), but no delay. So here a thread carries the packets: each host has a TUN
device, and what its kernel sends through it is given to the other's when rate and delay let it arrive. TCP, its
windows and its queues are the kernel's own.
"""

import fcntl
import os
import selectors
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from noloco_node.bench import links
from noloco_node.bench.links import Host, sh, space, spaces

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
QUEUE_S = 0.05
"""What waits in front of the link at most; more is dropped."""
TICK_S = 0.001
MTU = 1500
TUN = "/dev/net/tun"


def why_not() -> str | None:
    """Why there can be no such link on this machine; None if there can."""
    return links.why_not() or (None if Path(TUN).exists() else f"needs {TUN}")


@dataclass
class _Way:
    """From one host to the other."""

    source: int
    target: int
    bytes_s: float
    delay_s: float
    free_at: float = 0.0
    """When the link has sent what it was given."""
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> None:
        while True:
            try:
                packet = os.read(self.source, 1 << 16)
            except BlockingIOError:
                return
            if self.free_at < now + QUEUE_S:
                self.free_at = max(now, self.free_at) + len(packet) / self.bytes_s
                self.under_way.append((self.free_at + self.delay_s, packet))

    def deliver(self, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            os.write(self.target, self.under_way.popleft()[1])


def _device(name: str) -> int:
    tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def _carry(ways: list[_Way], stop: threading.Event) -> None:
    with selectors.DefaultSelector() as ready:
        for way in ways:
            ready.register(way.source, selectors.EVENT_READ, way)
        while not stop.is_set():
            busy = any(way.under_way for way in ways)
            for key, _ in ready.select(TICK_S if busy else 10 * TICK_S):
                key.data.take(time.monotonic())
            for way in ways:
                way.deliver(time.monotonic())


@contextmanager
def delayed_link(mbit: float, delay_s: float) -> Iterator[list[Host]]:
    """So many Mbit/s each way, and so long one way."""
    hosts = [Host(f"end{side}", f"10.87.0.{side}") for side in (1, 2)]
    with spaces(*(host.name for host in hosts)), ExitStack() as stack:
        tuns = []
        for side, host in enumerate(hosts):
            name, there = f"nn{os.getpid()}-{side}", space(host.name)
            tuns.append(_device(name))
            stack.callback(os.close, tuns[-1])
            sh(f"ip link set {name} netns {there}")
            sh(f"ip -n {there} link set {name} mtu {MTU} txqueuelen 10000 up")
            sh(f"ip -n {there} address add {host.address} peer {hosts[1 - side].address} dev {name}")
        ways = [_Way(one, other, mbit * 1e6 / 8, delay_s) for one, other in (tuns, tuns[::-1])]
        stop = threading.Event()
        carrier = threading.Thread(target=_carry, args=(ways, stop))
        carrier.start()
        stack.callback(carrier.join)
        stack.callback(stop.set)
        yield hosts
