"""Two replicas that trained apart, as a codec meets them: real snapshots, not noise.

Both are the tiny model on the standard library's sources. They train apart for a while, meet, swap (exactly, so that
all codecs see the same vectors), and go on. Also how two sides hold a whole conversation without anything between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.core.codec import BLOCK, Conversation
from noloco_node.run.schema import InnerSpec, Manifest
from noloco_node.training.replica import Replica
from noloco_node.training.thread import FRAGMENT_ELEMENTS

PLAN = (1, 1, 1, 1, 5, 5, 20)
"""Rounds apart before each meeting: a few alike, for what a codec learns from them."""
STEPS = 10
"""Of a round. Fewer than a run's, so that it takes half a minute."""


@dataclass(frozen=True, slots=True)
class Side:
    u: Tensor
    moved: Tensor
    """The largest |βΔ| of each block."""

    def fragments(self, device: str = "cpu") -> "list[Side]":
        us = torch.split(self.u, FRAGMENT_ELEMENTS)
        return [
            Side(u.to(device), moved)
            for u, moved in zip(us, torch.split(self.moved, FRAGMENT_ELEMENTS // BLOCK), strict=True)
        ]

    def part(self, start: int, end: int) -> "Side":
        """From a whole block to a whole block, or the end."""
        return Side(self.u[start:end], self.moved[start // BLOCK : -(-end // BLOCK)])

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


def meetings(plan: Sequence[int] = PLAN, steps: int = STEPS) -> list[PairMeeting]:
    threads = torch.get_num_threads()
    try:
        return _meetings(plan, steps)
    finally:
        torch.set_num_threads(threads)


def _meetings(plan: Sequence[int], steps: int) -> list[PairMeeting]:
    manifest = Manifest(name="bench", rounds=sum(plan), inner=InnerSpec(steps=steps))
    replicas = [Replica.build(manifest, peer, device="cpu", threads=1) for peer in ("one", "other")]
    met = []
    for apart in plan:
        one, other = (_train_apart(replica, apart) for replica in replicas)
        met.append(PairMeeting(apart, one, other))
        c = (other.u - one.u) / 2
        for replica, correction in zip(replicas, (c, -c), strict=True):
            replica.apply(0, correction, replica.round)
    return met


def _train_apart(replica: Replica, rounds: int) -> Side:
    """Solo rounds; the last one's snapshot is what the partner gets."""
    for _ in range(rounds):
        while not replica.phase_over:
            replica.step()
        side = Side(replica.snapshot(), replica.movement())
        replica.boundary()
    return side


def talk(mine: Conversation, theirs: Conversation) -> tuple[Tensor, list[bytes]]:
    """A whole conversation: our correction, and what we said."""
    say, reply = mine.open(), theirs.open()
    said = [say]
    while True:
        heard, answered = mine.hear(reply), theirs.hear(say)
        if heard.correction is not None:
            return heard.correction, said
        if heard.say is None or answered.say is None:
            raise RuntimeError("a conversation ended without a correction")
        say, reply = heard.say, answered.say
        said.append(say)
