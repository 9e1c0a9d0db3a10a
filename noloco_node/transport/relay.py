"""A reservation with a relay, so that others can call a node behind a router that lets no call in.

p2pd's own AutoRelay looks for relays three minutes after its start and wants four of them, also where fewer are named
to it (`-trustedRelays`: a single one was not asked in 200 s). A reservation takes one message, and p2pd accepts the
calls that come through the relay; so it is made here, and renewed before it expires. It is bound to our connection to
the relay: when that breaks, it is gone.
Protocol: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

import asyncio

from noloco_node.transport.p2pd.control import P2pdControl, read, write
from noloco_node.wire import circuit_pb2 as pb

_HOP = "/libp2p/circuit/relay/0.2.0/hop"
_GRANTED = 100
_RESERVE_S = 5.0
_LEAST_BYTES = 1 << 30
"""What a relayed connection must carry each way to be of use. p2pd forwards 4 GiB where it was started as a relay, and
128 KiB where it was not."""


async def reserve(control: P2pdControl, relay: str) -> bool:
    """Make or renew a reservation. False where the relay is full, forwards too little, or does not answer."""
    try:
        async with asyncio.timeout(_RESERVE_S):
            (reader, writer), far_end = await control.open_stream(relay, _HOP)
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
