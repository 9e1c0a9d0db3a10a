"""Donors: real StateServices with made-up numbers, and faulty ones."""

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import grpc
from memory_network.network import MemoryNetwork, MemoryTransport

from noloco_node.core.verdict import Trial
from noloco_node.errors import PeerMisbehaved
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.host.policy import Policy
from noloco_node.peers.record import PeerRecord
from noloco_node.state_transfer.choose_donor import Checks
from noloco_node.state_transfer.client import LiveState, StateTerms
from noloco_node.state_transfer.cross_check import CrossCheck
from noloco_node.state_transfer.server import StateService
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format
from noloco_node.wire.peer_pb2_grpc import StateServicer, add_StateServicer_to_server
from noloco_node.wire.state_format import CHUNK_BYTES

TERMS = StateTerms(b"r" * 32, b"l" * 32)
FRAGMENTS = 20
NUMBERS = (FRAGMENTS * CHUNK_BYTES - 400) // 4
BUDGET = 1000


def numbers(seed: int, count: int = NUMBERS) -> bytes:
    """Of some fp32 vectors: finite, and different for each seed."""
    rng = random.Random(seed)
    return b"".join(rng.randbytes(3) + b"\x3f" for _ in range(1000)) * (count // 1000) + bytes(4 * (count % 1000))


def blocks_of(data: bytes, blocks: Collection[int]) -> bytes:
    """Of the slow weights, the first half of these bytes."""
    end, size = len(data) // 2, 4 * wire.BLOCK
    if any(block * size >= end for block in blocks):
        raise PeerMisbehaved("bad_blocks")
    return b"".join(data[block * size : min(end, (block + 1) * size)] for block in blocks)


def answer(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Owner:
    """Stands for the training thread; `at_once=False`: the test completes the copy. `loss`: what it says it has."""

    def __init__(self, data: bytes, round: int = 12, at_once: bool = True, loss: float | None = None) -> None:
        self.data, self.round, self.at_once, self.loss = data, round, at_once, loss
        self.asked: list[Future[tuple[int, memoryview]]] = []
        self.trials: dict[bytes, float] = {}
        """The losses of some states that others may send it."""

    def live_state(self) -> "Future[tuple[int, memoryview]]":
        future: Future[tuple[int, memoryview]] = Future()
        self.asked.append(future)
        if self.at_once:
            future.set_result((self.round, memoryview(self.data)))
        return future

    def try_state(self, state: memoryview) -> "Future[Trial]":
        return answer(Trial(own=2.0, theirs=self.trials.get(bytes(state), 2.0), later=2.0, added=0.1, new=5.0))

    def sample(self, blocks: Sequence[int]) -> "Future[tuple[int, bytes]]":
        future: Future[tuple[int, bytes]] = Future()
        try:
            future.set_result((self.round, blocks_of(self.data, blocks)))
        except PeerMisbehaved as fault:
            future.set_exception(fault)
        return future


class FaultyDonor(StateServicer):
    """Sends these frames to every caller, after these `gaps`; `silent`: and hangs then. `shows`: the state that its
    samples are of, and the loss that it claims; without, it gives none."""

    def __init__(  # noqa: PLR0917
        self,
        frames: list[wire.StateFrame],
        round: int = 0,
        silent: bool = False,
        shows: bytes | None = None,
        loss: float | None = None,
        gaps: Sequence[float] = (),
    ) -> None:
        self.frames, self.round, self.silent, self.shows, self.loss = frames, round, silent, shows, loss
        self.gaps = gaps
        self.asked = 0

    async def Sample(self, request: pb.SampleRequest, context: Any) -> pb.StateSample:  # noqa: N802
        if self.shows is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        blocks = blocks_of(self.shows or b"", request.blocks)
        return pb.StateSample(round=self.round, eval_loss=self.loss or 0.0, blocks=blocks)  # `wire` sends no false loss

    async def Fetch(  # noqa: N802 (the name is the service's)
        self, request: pb.StateRequest, context: Any
    ) -> AsyncIterator[pb.StateFrame]:
        self.asked += 1
        for frame, gap_s in zip(self.frames, chain(self.gaps, repeat(0.0)), strict=False):
            if gap_s:
                await asyncio.sleep(gap_s)
            yield wire.encode_state(frame)
        if self.silent:
            await asyncio.Event().wait()

    async def Progress(self, request: pb.StateRequest, context: Any) -> pb.StateProgress:  # noqa: N802
        return pb.StateProgress(round=self.round)


def header(data: bytes, round: int = 12, **changes: Any) -> wire.StateHeader:
    size = state_format.fragment_bytes(len(data))
    digests = b"".join(state_format.digest(data[at : at + size]) for at in range(0, len(data), size))
    whole = {"total_bytes": len(data), "digests": digests, **changes}
    root = state_format.root(round, whole["total_bytes"], whole["digests"])
    return wire.StateHeader(round, root=whole.pop("root", root), **whole)


def chunks(data: bytes) -> list[wire.StateFrame]:
    return [wire.StateChunk(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]


def record(peer: str, round: int, state: str = "training") -> PeerRecord:
    figures = {"step": 50 * round, "loss": 0.0, "tokens_per_s": 0.0, "addresses": ()}
    told = {"boot": b"", "time": 0.0, "version": "0", "peers": 0, "expires": 1e12}
    return PeerRecord(peer_id=peer, state=state, round=round, **figures, **told)


def policy(**limits: float) -> Policy:
    """Of a volunteer with these settings, whose home does not exist."""
    home = Path("/nowhere")
    return Policy(NodeConfig(home=home, **limits), Home(home), lambda: None)


class DonorNetwork:
    """An in-memory network with donors, faulty donors and joining nodes."""

    def __init__(self, **links: Any) -> None:
        self.network = MemoryNetwork(random.Random(1), **{"delay_s": 0.02, **links})
        self.transports: dict[str, MemoryTransport] = {}

    async def donor(self, name: str, owner: Owner, terms: StateTerms = TERMS, **limits: float) -> StateService:
        transport = self.transports[name] = self.network.join(name)

        def place(context: Any) -> str:
            caller = transport.caller(context)
            return self.network.places.get(caller, caller)

        service = StateService(transport.caller, place, lambda: (owner.round, owner.loss), policy(**limits))
        service.begin(terms, owner, len(owner.data))
        transport.serve(lambda server: add_StateServicer_to_server(service, server))
        await transport.start()
        return service

    async def faulty_donor(self, name: str, faulty: FaultyDonor) -> None:
        transport = self.transports[name] = self.network.join(name)
        transport.serve(lambda server: add_StateServicer_to_server(faulty, server))
        await transport.start()

    async def joining_node(self, name: str = "joining") -> MemoryTransport:
        """It joins, unless it is there."""
        if name not in self.transports:
            self.transports[name] = self.network.join(name)
            await self.transports[name].start()
        return self.transports[name]


def checks(transport: MemoryTransport, count: int) -> Checks:
    """That accept every state."""

    async def sample(blocks: Collection[int]) -> bytes:
        return blocks_of(bytes(4 * count), blocks)

    async def judge(_donor: str, _state: LiveState) -> str | None:
        return None

    return Checks(CrossCheck(TERMS, count // 2, transport.channel, transport.place_of, sample), judge)
