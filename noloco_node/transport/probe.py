"""What plain sockets show about an address: does anything listen there, is it this machine's, is its port free?

Standard library only: `join` answers a mistyped or dead address in a moment, before torch and hivemind are imported.
Whether the right peer answers is proved later, by libp2p.
"""

import asyncio
import errno
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from noloco_node.base.addresses import Address, ip_address
from noloco_node.errors import PortInUse, SwarmUnreachable, UsageError

PROBE_S = 5.0
"""A TCP handshake across the world takes well under one."""
_NEXT_S = 0.3  # until the next address of a name is tried, too
_TRIES = 8  # for a port


async def probe(address: Address, timeout_s: float = PROBE_S) -> None:
    """Open a TCP connection to a bootstrap address and close it again. Raises SwarmUnreachable, which says why not.
    `timeout_s`: for finding the name, and again for the connection."""
    host, target = address.host, address.host_and_port
    try:
        async with asyncio.timeout(timeout_s):
            hosts = [host] if address.ip else await _look_up(address)
    except (socket.gaierror, TimeoutError) as error:
        raise _unreachable(f"the name {host} is not known. Is it spelled right, and is this machine online?") from error
    try:
        async with asyncio.timeout(timeout_s):
            await _connect(hosts, address.port)
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


async def _look_up(address: Address) -> list[str]:
    about = {"family": address.family, "type": socket.SOCK_STREAM}
    return [str(at[0]) for *_, at in await asyncio.get_running_loop().getaddrinfo(address.host, address.port, **about)]


async def _connect(hosts: Sequence[str], port: int) -> None:
    """To the first of a name's IP addresses that answers. One of them may lead nowhere, as those of IPv6 on many
    machines, so the next one does not wait until it fails (RFC 8305). Raises the first one's OSError."""

    async def attempt(start_s: float, host: str) -> None:
        await asyncio.sleep(start_s)
        _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()  # nothing was sent, so there is nothing to wait for

    attempts = [asyncio.create_task(attempt(place * _NEXT_S, host)) for place, host in enumerate(hosts)]
    try:
        for ended in asyncio.as_completed(attempts):
            with suppress(OSError):
                return await ended
        await attempts[0]
    finally:
        for each in attempts:
            each.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)


async def reach(addresses: Sequence[Address]) -> None:
    """Check that at least one of them accepts connections. Raises SwarmUnreachable."""
    found = await asyncio.gather(*(probe(address) for address in addresses), return_exceptions=True)
    failures = [outcome for outcome in found if outcome is not None]
    for failure in failures:
        if len(addresses) == 1 or not isinstance(failure, SwarmUnreachable):
            raise failure
    if len(failures) == len(addresses):
        raise SwarmUnreachable(f"none of the {len(addresses)} bootstrap addresses answers. The first: {failures[0]}")


def check_port(address: Address) -> None:
    """Raises PortInUse where another program listens there, UsageError where nobody can.

    p2pd itself would go on where it can still listen for QUIC.
    """
    try:
        with socket.socket(address.family or socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # those of an earlier run may still linger
            trial.bind((address.host, address.port))
    except OSError as error:
        port, another = f"the port {address.port} on {address.host}", "choose another one with --listen"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"{port} is in use by another program: {another}") from error
        if error.errno == errno.EADDRNOTAVAIL:  # which may come: of a VPN, as the machine starts
            raise PortInUse(f"{address.host} is no address of this machine at this moment: {another}") from error
        raise UsageError(f"{port} is refused ({error.strerror}): {another}") from error


def free_port(address: Address) -> int:
    """A port of its host that is free for TCP and, if one is soon found, for UDP."""
    port = 0
    for _ in range(_TRIES):
        with socket.socket(address.family or socket.AF_INET, socket.SOCK_STREAM) as tcp:
            tcp.bind((address.host, 0))
            port = tcp.getsockname()[1]
            if is_free_for_udp(replace(address, port=port)):
                break
    return port


def is_free_for_udp(address: Address) -> bool:
    with socket.socket(address.family or socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address.host, address.port))
        except OSError:
            return False
    return True


def is_of_this_machine(host: str) -> bool:
    """Whether a network interface here has this IP address: only then may a socket be bound to it."""
    return is_free_for_udp(ip_address(host, 0))


def _unreachable(sentence: str) -> SwarmUnreachable:
    return SwarmUnreachable(f"cannot reach the swarm: {sentence}")
