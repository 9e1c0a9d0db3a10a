"""Multiaddrs as text, and a first look at a bootstrap address: does anything listen there?

Standard library only: `join` answers a mistyped or dead address in a moment, before torch and hivemind are imported.
Whether the right peer answers is proved later, by libp2p.
"""

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass

from noloco_node.errors import SwarmUnreachable, UsageError
from noloco_node.identity import is_peer_id

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


async def probe(address: str, timeout_s: float) -> None:
    """Open a TCP connection to a bootstrap address and close it again; `SwarmUnreachable` says what is the matter."""
    target = parse_bootstrap(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(target.host, target.port, family=target.family)
    except socket.gaierror as error:
        raise _unreachable(
            f"the name {target.host} is not known. Is it spelled right, and is this machine online?"
        ) from error
    except ConnectionRefusedError as error:
        raise _unreachable(
            f"{target} refuses the connection. Is the bootstrap node running, and at this port?"
        ) from error
    except TimeoutError as error:
        raise _unreachable(
            f"{target} does not answer in {timeout_s:g} s. Is the address right, and the port open in its firewall?"
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unreachable(f"{target} cannot be reached from here ({reason}). Is this machine online?") from error
    writer.transport.abort()  # nothing was sent, so nothing need be waited for


def _unreachable(sentence: str) -> SwarmUnreachable:
    return SwarmUnreachable(f"cannot reach the swarm: {sentence}")
