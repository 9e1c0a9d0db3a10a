"""A place with a relay, so that others can call a node that no router lets them reach.

p2pd's own AutoRelay looks for relays three minutes after its start and wants four of them. To name them to it
(`-trustedRelays`, hivemind's `trusted_relays=`) does not shorten that: a single one was found at once and asked for
nothing in 200 s; of four, the first was asked after 0.1 s, but hardly anybody knows four. To ask one that is known for
a place takes one message, and p2pd takes the calls that come through it; so it is asked here, and again before it
forgets. The place is bound to our connection to the relay: it is gone when that breaks.
Protocol: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

import asyncio

from noloco_node.transport.p2pd.control import P2pdControl, read, write
from noloco_node.wire import circuit_pb2 as pb

_HOP = "/libp2p/circuit/relay/0.2.0/hop"
_GRANTED = 100
_RESERVE_S = 5.0
_LEAST_BYTES = 1 << 30
"""What a relayed connection must carry each way to be of use. p2pd passes 4 GiB on where it is told to be a relay, and
128 KiB where it is not."""


async def reserve(orders: P2pdControl, relay: str) -> bool:
    """Ask a relay for a place, or to keep ours. False where it has none, is no relay for bulk, or does not answer."""
    try:
        async with asyncio.timeout(_RESERVE_S):
            (reader, writer), far_end = await orders.open_stream(relay, _HOP)
            try:
                write(writer, pb.HopMessage(type=pb.HopMessage.RESERVE))
                answer = pb.HopMessage()
                await read(reader, answer)
            finally:
                writer.transport.abort()
    except OSError:
        return False
    enough = not answer.limit.data or answer.limit.data >= _LEAST_BYTES  # 0: no limit
    return bool(answer.status == _GRANTED and enough and not far_end.relayed)


def relayed(by: str, peer_id: str) -> str:
    """The address of a peer behind the relay at `by`, which ends in the relay's id."""
    return f"{by}/p2p-circuit/p2p/{peer_id}"
