"""Two replicas that trained apart, as a codec finds them: real snapshots, not noise.

Both are the tiny model on the standard library's sources. They train apart for a while, meet, swap (exactly, so that
all codecs see the same vectors), and go on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from noloco_node.bench import Say
from noloco_node.core.codecs.codec import BLOCK, CodecStats, Conversation, Payload, Received, hints
from noloco_node.run.schema import InnerSpec, Manifest
from noloco_node.training.build import build_replica
from noloco_node.training.replica import Replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS

T = TypeVar("T")

PLAN = (1, 1, 1, 1, 5, 5, 20)
"""Rounds apart before each swap; some are equal, so that a codec can learn from them."""
STEPS = 10
"""Of a round. Fewer than in a run, so that this takes half a minute."""
QUICK_PLAN, QUICK_STEPS = (1, 1, 5), 5
"""Replicas that hardly trained: a tenth of the steps."""


@dataclass(frozen=True, slots=True)
class Side:
    u: Tensor
    moved: Tensor
    """Of each block: a codec's hint."""

    def fragments(self, device: str = "cpu") -> "list[Side]":
        us = torch.split(self.u, FRAGMENT_ELEMENTS)
        return [
            Side(u.to(device), moved)
            for u, moved in zip(us, torch.split(self.moved, FRAGMENT_ELEMENTS // BLOCK), strict=True)
        ]

    def repeated(self, parameters: int) -> "Side":
        """A longer vector, its length rounded up to whole blocks: fragments that are all alike, each made of the whole
        blocks of this vector over and over."""
        fragment = self._tiled(FRAGMENT_ELEMENTS)
        return fragment._tiled(parameters)

    def _tiled(self, parameters: int) -> "Side":
        blocks, wanted = len(self.u) // BLOCK, -(-parameters // BLOCK)
        times = -(-wanted // blocks)
        u = self.u[: blocks * BLOCK].repeat(times)[: wanted * BLOCK]
        return Side(u, self.moved[:blocks].repeat(times)[:wanted].contiguous())


@dataclass(frozen=True, slots=True)
class PairMeeting:
    apart_rounds: int
    one: Side
    other: Side


def meetings(say: Say, plan: Sequence[int] = PLAN, steps: int = STEPS) -> list[PairMeeting]:
    threads = torch.get_num_threads()
    try:
        return _meetings(say, plan, steps)
    finally:
        torch.set_num_threads(threads)


def _meetings(say: Say, plan: Sequence[int], steps: int) -> list[PairMeeting]:
    manifest = Manifest(name="bench", rounds=sum(plan), inner=InnerSpec(steps=steps))
    replicas = [build_replica(manifest, peer, device="cpu", threads=1) for peer in ("one", "other")]
    met, total = [], sum(plan) * len(replicas)

    def rounds_done() -> None:
        say("training two replicas apart", sum(replica.round for replica in replicas), total)

    rounds_done()
    for apart in plan:
        one, other = (_train_apart(replica, apart, rounds_done) for replica in replicas)
        met.append(PairMeeting(apart, one, other))
        c = (other.u - one.u) / 2
        for replica, correction in zip(replicas, (c, -c), strict=True):
            replica.slow.apply(0, correction, replica.round)
    return met


def _train_apart(replica: Replica, rounds: int, round_done: Callable[[], None]) -> Side:
    """Solo rounds; the last one's snapshot is what the partner gets."""
    for _ in range(rounds):
        while not replica.position.phase_over:
            replica.step()
        u, (peaks, _) = replica.snapshot()
        replica.boundary()
        side = Side(u, hints(peaks.cpu()))
        round_done()
    return side


class Watched:
    """One side of a conversation, with what it sends and how long each of its turns takes."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.sent: list[bytes] = []
        self.turns_s: list[float] = []

    @property
    def stats(self) -> CodecStats:
        return self._conversation.stats

    def open(self) -> bytes:
        payload = self._timed(self._conversation.open)
        self.sent.append(payload)
        return payload

    def receive(self, payload: Payload) -> Received:
        received = self._timed(lambda: self._conversation.receive(payload))
        self.sent += [received.reply] if received.reply is not None else []
        return received

    def learn(self) -> None:
        self._conversation.learn()

    def _timed(self, turn: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = turn()
        self.turns_s.append(time.perf_counter() - began)
        return result
