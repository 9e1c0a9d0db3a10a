"""Where a peer can be called: one `Address` value, parsed once, where the text of a multiaddr comes in.

Text comes in from the settings (--bootstrap, --listen, --announce), from p2pd, from the signed records of peers, and
from the cache of peers. All other code passes `Address`; `str` gives the canonical text.
Standard library only, unless a peer id is in the text, so that a mistyped address is answered at once.
Format: https://github.com/multiformats/multiaddr
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from noloco_node.errors import UsageError

EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"

_ID = "[1-9A-HJ-NP-Za-km-z]+"
_FORM = re.compile(
    r"/(?P<kind>ip[46]|dns[46]?)/(?P<host>[0-9A-Za-z._:-]{1,253})/(?P<base>tcp|udp)/(?P<port>[0-9]{1,5})"
    rf"(?P<over>/quic-v1|/ws|/wss)?(/p2p/(?P<relay>{_ID})/p2p-circuit)?(/p2p/(?P<peer>{_ID}))?"
)
QUIC = "udp/quic-v1"
_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}


class WrongPeerId(UsageError):
    """The text has the form of an address, but letters of a peer id are missing or wrong."""


@dataclass(frozen=True, slots=True)
class Address:
    kind: str
    """Of its host: ip4, ip6, dns, dns4 or dns6."""
    host: str
    port: int
    peer: str = ""
    """The peer id of the node there; empty where the text names none."""
    relay: str = ""
    """Empty, or the peer id of the relay that listens at host and port and passes calls on to `peer`."""
    transport: str = "tcp"
    """tcp or udp, and what runs over it: QUIC."""

    def __str__(self) -> str:
        base, _, over = self.transport.partition("/")
        relay = f"/p2p/{self.relay}/p2p-circuit" if self.relay else ""
        peer = f"/p2p/{self.peer}" if self.peer else ""
        return f"/{self.kind}/{self.host}/{base}/{self.port}{over and '/' + over}{relay}{peer}"

    @property
    def host_and_port(self) -> str:
        """As people write it: [::1]:4001."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> int:
        """AF_UNSPEC for /dns/, which may resolve to either."""
        return _FAMILIES.get(self.kind, socket.AF_UNSPEC)

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """None for a name."""
        return None if self.kind.startswith("dns") else ipaddress.ip_address(self.host)

    @property
    def is_loopback(self) -> bool:
        return self.ip is not None and self.ip.is_loopback

    def without_peers(self) -> "Address":
        return replace(self, peer="", relay="")

    @property
    def both(self) -> "list[Address]":
        """That of a TCP port, and QUIC's at the same port."""
        return [self, replace(self, transport=QUIC)] if self.transport == "tcp" else [self]


ANY_PORT = Address("ip4", "0.0.0.0", 0)
ANY_LOCAL_PORT = Address("ip4", "127.0.0.1", 0)


@lru_cache(maxsize=4096)  # records bring the same few again and again, and a peer id takes 20 µs to check
def parse(text: str) -> Address:
    """Raises UsageError for anything else than a whole multiaddr of one TCP or UDP port."""
    form = _FORM.fullmatch(text)
    if form is None or not _is_host(form["kind"], form["host"]) or int(form["port"]) > 65535:
        raise UsageError(f"{text!r} is not an address of the kind {EXAMPLE}")
    peer, relay = form["peer"] or "", form["relay"] or ""
    if not all(map(_is_peer_id, filter(None, (peer, relay)))):
        raise WrongPeerId(f"{text!r} does not end in a whole peer id, as in {EXAMPLE}")
    return Address(form["kind"], form["host"], int(form["port"]), peer, relay, form["base"] + (form["over"] or ""))


def ip_address(host: str, port: int, peer: str = "") -> Address:
    """The Address of an IP address and port, as sockets write them."""
    return Address("ip6" if ":" in host else "ip4", host, port, peer)


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("dns"):  # Python's look-up of a name raises UnicodeError for an empty or longer label
        return ":" not in host and all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))
    try:
        return ipaddress.ip_address(host).version == int(kind[-1])
    except ValueError:
        return False


def _is_peer_id(text: str) -> bool:
    from noloco_node.base.identity import is_peer_id  # brings cryptography, which `status` can do without

    return is_peer_id(text)


def for_others(addresses: Sequence[Address]) -> list[Address]:
    """Those of this machine that are of use to others: never unspecified or link-local ones, and loopback only if there
    is nothing else (a swarm on one machine)."""
    usable = [a for a in addresses if a.ip is None or not (a.ip.is_unspecified or a.ip.is_link_local)]
    return [address for address in usable if not address.is_loopback] or usable


def seen_outside(addresses: Sequence[Address]) -> list[tuple[str, int]]:
    """Host and port of those at which another machine might reach this one."""
    return [
        (address.host, address.port)
        for address in for_others(addresses)
        if address.transport == "tcp" and not (address.is_loopback or address.relay)
    ]
