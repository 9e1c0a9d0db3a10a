"""The bytes of a micro-batch, or of its answer, in parts: at the pace that the volunteer allows, and counted."""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from noloco_node.errors import PeerLost, PeerMisbehaved
from noloco_node.host.traffic import Traffic
from noloco_node.stages.shown import LinkTotals
from noloco_node.transport.base import HUNG_UP
from noloco_node.wire import stage_messages as wire
from noloco_node.wire import stage_pb2 as pb


class Frames:
    def __init__(self, pace: Traffic, totals: LinkTotals) -> None:
        self._pace, self._totals = pace, totals

    async def sent(self, header: wire.MicroBatch | wire.Passed, payload: bytes) -> AsyncIterator[pb.StageFrame]:
        yield wire.encode(header)
        for start in range(0, len(payload), wire.MAX_PART_BYTES):
            part = payload[start : start + wire.MAX_PART_BYTES]
            self._totals.sent_bytes += len(part)
            await self._pace.sending(len(part))
            yield wire.encode(wire.Part(part))

    async def received(
        self, frames: AsyncIterator[pb.StageFrame], size: int, take: Callable[[int], None] = lambda size: None
    ) -> memoryview:
        """So many bytes; `take` is told of each part. Each but the last one is full, as any message costs this
        process up to 0.1 ms, also one of a byte. Raises PeerMisbehaved."""
        data = bytearray()
        while len(data) < size:
            await self._pace.receiving()
            frame = await next_frame(frames)
            if not isinstance(frame, wire.Part) or len(frame.data) != min(wire.MAX_PART_BYTES, size - len(data)):
                raise PeerMisbehaved("bad_part", type(frame).__name__)
            take(len(frame.data))
            data += frame.data
            self._totals.received_bytes += len(frame.data)
            self._pace.received(len(frame.data))
        return memoryview(data)


async def next_frame(frames: AsyncIterator[pb.StageFrame]) -> wire.Frame:
    with suppress(StopAsyncIteration):
        return wire.decode(await anext(frames))
    raise PeerLost(HUNG_UP)
