"""A newcomer fetches a donor's state over the in-memory network: whole or not at all."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest

from noloco_node import statesync
from noloco_node.errors import PeerFault, PeerLost, PeerMisbehaved, PeerRefused
from noloco_node.statesync import LiveState, StateService, Terms, fetch
from noloco_node.transport.clock import run_virtual
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import StateServicer, add_StateServicer_to_server

TERMS = Terms(b"r" * 32, b"l" * 32)
DATA = random.Random(0).randbytes(3 * statesync.CHUNK_BYTES + 17)


class Donor:
    def live_state(self) -> "Future[tuple[int, bytes]]":
        future: Future[tuple[int, bytes]] = Future()
        future.set_result((12, DATA))
        return future


class Liar(StateServicer):
    def __init__(self, frames: list[wire.StateFrame], silent: bool = False) -> None:
        self.frames, self.silent = frames, silent

    async def Fetch(  # noqa: N802 (the name is the service's)
        self, request: pb.StateRequest, context: Any
    ) -> AsyncIterator[pb.StateFrame]:
        for frame in self.frames:
            yield wire.encode_state(frame)
        if self.silent:
            await asyncio.Event().wait()


async def world(servicer: Any, **links: Any) -> tuple[MemoryTransport, MemoryTransport]:
    network = MemoryNetwork(random.Random(1), delay_s=0.02, **links)
    donor, newcomer = network.join("donor"), network.join("newcomer")
    service = servicer(donor) if isinstance(servicer, type) else servicer
    donor.serve(lambda server: add_StateServicer_to_server(service, server))
    await donor.start()
    await newcomer.start()
    if isinstance(service, StateService):
        service.begin(TERMS, Donor())
    return donor, newcomer


async def ask(servicer: Any, terms: Terms = TERMS, total: int = len(DATA)) -> tuple[LiveState, list[int]]:
    donor, newcomer = await world(servicer)
    heard: list[int] = []
    try:
        return await fetch(newcomer.channel("donor"), terms, total, lambda done, _: heard.append(done)), heard
    finally:
        await newcomer.close()
        await donor.close()


def test_the_state_arrives_whole_with_progress() -> None:
    state, heard = asyncio.run(ask(StateService))
    assert state == LiveState(12, DATA)
    assert heard == sorted(heard)
    assert heard[-1] == len(DATA)
    assert len(heard) == 4


def test_another_run_or_layout_is_refused() -> None:
    for terms in (Terms(b"R" * 32, b"l" * 32), Terms(b"r" * 32, b"L" * 32)):
        with pytest.raises(PeerRefused, match="incompatible"):
            asyncio.run(ask(StateService, terms))


def test_a_second_download_waits_its_turn() -> None:
    async def main() -> None:
        donor, newcomer = await world(StateService)
        downloads = [fetch(newcomer.channel("donor"), TERMS, len(DATA), lambda *_: None) for _ in range(2)]
        results = await asyncio.gather(*downloads, return_exceptions=True)
        assert sorted(str(result) for result in results if isinstance(result, PeerRefused)) == ["busy"]
        assert [result.data for result in results if isinstance(result, LiveState)] == [DATA]
        await newcomer.close()
        await donor.close()

    asyncio.run(main())


HEADER = wire.StateHeader(1, 10, hashlib.sha256(b"0123456789").digest())


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([], PeerLost),
        ([HEADER, wire.StateChunk(b"01234")], PeerLost),
        ([HEADER, wire.StateChunk(b"0123456780")], PeerMisbehaved),
        ([HEADER, wire.StateChunk(b"0123456789x")], PeerMisbehaved),
        ([HEADER, wire.StateChunk(b"")], PeerMisbehaved),
        ([HEADER, HEADER], PeerMisbehaved),
        ([wire.StateChunk(b"0123456789")], PeerMisbehaved),
        ([wire.StateHeader(1, 1 << 40, b"d" * 32)], PeerMisbehaved),
        ([wire.Refusal(wire.Code.BUSY)], PeerRefused),
    ],
)
def test_a_donor_that_lies_or_stops_is_a_fault_of_its_own(
    frames: list[wire.StateFrame], fault: type[PeerFault]
) -> None:
    with pytest.raises(fault):
        asyncio.run(ask(Liar(frames), total=10))


def test_a_donor_that_falls_silent_is_given_up() -> None:
    with pytest.raises(PeerLost, match="silent"):
        run_virtual(ask(Liar([HEADER], silent=True), total=10))


def test_what_donor_and_newcomer_agree_on_is_the_whole_answer() -> None:
    state, _ = asyncio.run(ask(Liar([HEADER, wire.StateChunk(b"01234"), wire.StateChunk(b"56789")]), total=10))
    assert state == LiveState(1, b"0123456789")
