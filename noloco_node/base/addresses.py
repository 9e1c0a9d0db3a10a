"""Multiaddrs as text: what a user writes (bootstrap, listen, announce), and what is worth telling others.

Standard library only, so that a mistyped address is answered before anything heavy is imported.
Format: https://github.com/multiformats/multiaddr
"""

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.base.identity import is_peer_id
from noloco_node.errors import NolocoError, UsageError

EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"

_FORM = re.compile(r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})(/p2p/(?P<peer>[^/]+))?")
_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    peer: str | None
    family: int
    """AF_UNSPEC for /dns/, which may resolve to either."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """A TCP multiaddr, with or without the peer id at its end."""
    form = _FORM.fullmatch(text)
    if form is None or not _is_host(form["kind"], form["host"]) or int(form["port"]) > 65535:
        raise UsageError(f"{text!r} is not an address of the kind {EXAMPLE}")
    if form["peer"] is not None and not is_peer_id(form["peer"]):
        raise UsageError(f"{text!r} does not end in a whole peer id, as in {EXAMPLE}")
    return Address(form["host"], int(form["port"]), form["peer"], _FAMILIES.get(form["kind"], socket.AF_UNSPEC))


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("dns"):
        return re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host) is not None
    try:
        return ipaddress.ip_address(host).version == int(kind[-1])
    except ValueError:
        return False


def parse_bootstrap(text: str) -> Address:
    """An address to join by: it must say which peer is to answer, and at which port."""
    address = parse(text)
    if address.peer is None:
        raise UsageError(f"{text!r} does not name the peer that is to answer there, as in {EXAMPLE}")
    if address.port == 0:
        raise UsageError(f"{text!r} has port 0, which only a listener can ask for. An address looks like {EXAMPLE}")
    return address


def announced(text: str, peer_id: str) -> str:
    """An address that the user wants told to others, with our peer id at its end."""
    address = parse(text)
    if address.port == 0 or address.peer not in (None, peer_id):
        raise UsageError(f"{text!r} cannot be announced: it needs a port of its own, and no other peer's id")
    return text if address.peer else f"{text}/p2p/{peer_id}"


def check_port(address: Address) -> None:
    """p2pd shares its port with whoever else asks the kernel for that, another p2pd too, and then each gets a part of
    the connections. So find out by a socket that does not share."""
    if address.port == 0:
        return
    with socket.socket(address.family or socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may still linger
        try:
            trial.bind((address.host, address.port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            reason = "is in use by another program" if in_use else f"is refused: {error.strerror}"
            raise NolocoError(
                f"the port {address.port} on {address.host} {reason}. Choose another one with --listen."
            ) from error


def worth_telling(addresses: Sequence[str]) -> list[str]:
    """Loopback only if there is nothing else (a swarm on one machine); unspecified and link-local addresses never."""
    usable = [text for text in addresses if not (_is(text, "is_unspecified") or _is(text, "is_link_local"))]
    return [text for text in usable if not is_loopback(text)] or usable


def seen_outside(addresses: Sequence[str]) -> list[tuple[str, int]]:
    """Host and port of those at which another machine might reach this one."""
    words = [text.split("/") for text in worth_telling(addresses) if not is_loopback(text)]
    return [(host, int(port)) for _, _, host, kind, port, *more in words if kind == "tcp" and not more]


def is_of_this_machine(host: str) -> bool:
    """Whether a network interface here has this IP address: only then may a socket be bound to it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((host, 0))
        except OSError:
            return False
    return True


def is_loopback(address: str) -> bool:
    return _is(address, "is_loopback")


def _is(text: str, property_name: str) -> bool:
    kind, host = text.split("/")[1:3]
    return kind in ("ip4", "ip6") and bool(getattr(ipaddress.ip_address(host), property_name))
