"""One of our nodes, without the training: the transport, the rounds and the codec thread of a node, and weights.

It swaps with whom the bench tells it: the bench draws pairs, as all of its nodes meet at the same moment.
"""

import asyncio
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import grpc.aio
import torch
from torch import Tensor

from noloco_node.base.addresses import Address, parse
from noloco_node.base.events import Event, RoundCommitted, WentSolo
from noloco_node.base.identity import Identity
from noloco_node.bench.rivals import vectors
from noloco_node.bench.workers import Answer, serve
from noloco_node.core.codecs.by_name import codec, rehearse
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.core.fragments import Cut
from noloco_node.core.verdict import SOMEBODY
from noloco_node.errors import NolocoError
from noloco_node.rounds.service import RoundService, RoundTerms
from noloco_node.rounds.swap import Vectors
from noloco_node.training.mailbox import Command, Correct
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.thread import FRAGMENT_ELEMENTS
from noloco_node.transport.libp2p import Libp2pTransport

PHASE_S = 60.0
"""What the nodes take for the length of a phase: a call waits for its answer up to 10 s."""
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


class Weights:
    """What a training thread does with corrections: adds them, one after the other."""

    def __init__(self, parameters: int) -> None:
        self.vector = torch.empty(parameters)
        self.added = 0
        self.all_added = asyncio.Event()
        self._expected = Cut.of(parameters, FRAGMENT_ELEMENTS).count
        self._loop = asyncio.get_running_loop()
        self._corrections: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=self._add, daemon=True).start()

    def post(self, command: Command) -> None:
        self._corrections.put(command)

    def begin(self) -> None:
        self.added = 0
        self.all_added.clear()

    def _add(self) -> None:
        torch.set_num_threads(1)
        while True:
            match self._corrections.get():
                case Correct(_, start, correction, added):
                    self.vector[start : start + len(correction)] += correction
                    self.added += 1
                    added.set_result(None)
                    if self.added == self._expected:
                        self._loop.call_soon_threadsafe(self.all_added.set)


class Node:
    """The transport and the rounds of a node."""

    add_services: Callable[[grpc.aio.Server], None] | None = None
    """In place of the rounds."""

    async def open(self, host: str, count: int) -> str:
        """`count`: fragments of its vector. Its address."""
        folder = tempfile.TemporaryDirectory(prefix="bench-noloco-")
        _FOLDERS.append(folder)
        identity = Identity.load_or_create(Path(folder.name, "identity.key"))
        self.transport = Libp2pTransport(identity, Address("ip4", host, 0))
        self._rounds = RoundService(self.transport, random.Random(), self, self._observe)
        self.transport.serve(self.add_services or self._rounds.add_to)
        self.transport.is_partner = lambda peer: self._rounds.standing(peer).committed > 0
        await self.transport.start()
        self._rounds.begin(RoundTerms(bytes(32), bytes(32), count))
        self.round = 0
        return str(self.transport.addresses()[0])

    def connect(self, addresses: Sequence[str]) -> None:
        self.addresses = [parse(address) for address in addresses]
        self.peers = [address.peer for address in self.addresses]
        others = [address for address in self.addresses if address.peer != self.transport.peer_id]
        self.transport.introduce({address.peer: [address] for address in others})

    async def swap(self, partners: Sequence[int], offer: Vectors) -> RoundCommitted:
        event = await self.meet(partners, offer)
        if isinstance(event, WentSolo):
            raise NolocoError(f"the round went solo: {event.reason}")
        return event

    async def meet(self, partners: Sequence[int], offer: Vectors) -> RoundCommitted | WentSolo:
        """One round with whichever of them is free."""
        self._over: asyncio.Future[RoundCommitted | WentSolo] = asyncio.get_running_loop().create_future()
        self._rounds.candidates({self.peers[partner]: f"place{partner}" for partner in partners})
        self._rounds.boundary(self.round, PHASE_S, offer, None)
        return await self._over

    # ---- what rounds/service.py calls ----
    def swapping(self, under_way: bool, source: frozenset[str] = SOMEBODY) -> None:
        pass

    def round_over(self, round: int) -> None:
        pass

    def _observe(self, event: Event) -> None:
        if isinstance(event, RoundCommitted | WentSolo) and event.round == self.round and not self._over.done():
            self._over.set_result(event)


class Member:
    async def start(self, host: str, params: int, worker: int, variant: str) -> Answer:
        """`variant`: a codec."""
        torch.set_num_threads(1)
        self._worker = worker
        rehearse(variant, torch.device("cpu"))
        self._node = Node()
        address = await self._node.open(host, Cut.of(params, FRAGMENT_ELEMENTS).count)
        self._weights = Weights(params)
        self._codec = CodecThread(codec(variant), self._weights.post, FRAGMENT_ELEMENTS)
        self._u = torch.empty(params)
        return {"address": address}

    async def connect(self, addresses: Sequence[str]) -> None:
        self._node.connect(addresses)

    def prepare(self, step: int, partners: Sequence[int]) -> Answer:
        """The vector before a step, and with whom to swap it."""
        moved = vectors.weights(self._u, self._worker, step)
        self._weights.vector.copy_(self._u)
        self._weights.begin()
        self._movement = _movement(moved, len(self._u))
        self._partners = partners
        return {"probe": vectors.probe(self._weights.vector)}

    async def step(self) -> None:
        self._node.round += 1
        await self._node.swap(self._partners, Offer(self._codec, self._node.round, self._u, self._movement))
        await self._weights.all_added.wait()

    def brings(self) -> Answer:
        """The vector before all rounds, whose partner may be anybody."""
        return self.prepare(1, [each for each in range(len(self._node.peers)) if each != self._worker])

    async def rounds(self, count: int, patience_s: float) -> Answer:
        """So many, and then others that count for nobody, so that who is slower still finds somebody."""
        began = time.monotonic()
        succeeded = sum([await self._round(patience_s) for _ in range(count)])
        answer = {"succeeded": succeeded, "seconds": time.monotonic() - began, **self.result()}
        self._goes_on = True
        self._more = asyncio.create_task(self._go_on(succeeded, patience_s))
        return answer

    async def end(self) -> Answer:
        """How many rounds found somebody, those that count for nobody among them, once none is under way."""
        self._goes_on = False
        return {"rounds": await self._more}

    async def _go_on(self, succeeded: int, patience_s: float) -> int:
        while self._goes_on:
            succeeded += await self._round(patience_s)
        return succeeded

    async def _round(self, patience_s: float) -> bool:
        self._node.round += 1
        self._weights.begin()
        self._u.copy_(self._weights.vector)
        offer = Offer(self._codec, self._node.round, self._u, self._movement)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                if isinstance(await self._node.meet(self._partners, offer), RoundCommitted):
                    await self._weights.all_added.wait()
                    return True
        return False

    def result(self) -> Answer:
        return {"probe": vectors.probe(self._weights.vector)}


def _movement(moved: Tensor, parameters: int) -> tuple[Tensor, Tensor]:
    """Of each block, as `outer.BlockMovement` has it."""
    blocks = moved.view(-1, BLOCK)
    count = -(-parameters // BLOCK)
    times = -(-count // len(blocks))
    return tuple(of.repeat(times)[:count].clone() for of in (blocks.abs().amax(1), blocks.square().sum(1)))  # type: ignore[return-value]


if __name__ == "__main__":
    serve(Member())
