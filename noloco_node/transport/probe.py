"""A first look at a bootstrap address: does anything listen there?

Standard library only: `join` answers a mistyped or dead address in a moment, before torch and hivemind are imported.
Whether the right peer answers is proved later, by libp2p.
"""

import asyncio
import socket

from noloco_node.base.addresses import parse_bootstrap
from noloco_node.errors import SwarmUnreachable


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
