"""Whatever a partner sends instead of its u, one swap moves no more than honest ones may, and the next one is fine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from noloco_node.core.bounds import LONGEST
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, Codec
from noloco_node.errors import PeerFault
from noloco_node.training.mailbox import Command, Correct
from noloco_node.training.offer import CodecThread, Offer

SIZE = 40 * BLOCK
MOVED = 1e-3
"""The root mean square of the movement."""
CODECS = "lattice:4", "bf16", "int8", "fp32"


def noise(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "-u": lambda u: -u,
    "2u": lambda u: 2 * u,
    "10u": lambda u: 10 * u,
    "zeros": torch.zeros_like,
    "noise": lambda u: 0.05 * noise(9),
    "every element": lambda u: u + 50 * 4 * MOVED * noise(8).sign(),
    "one element": lambda u: u + 1e4 * (torch.arange(SIZE) == 5),
    "all that is sent again": lambda u: torch.where(torch.arange(SIZE) < 5 * BLOCK, 1e30, u),
}


class Node:
    def __init__(self, name: str) -> None:
        self.posts: list[Command] = []
        self.thread = CodecThread(codec(name), self.posts.append, 1 << 20)
        self.round = 0

    def offer(self, u: Tensor) -> Offer:
        self.round += 1
        squares = torch.full((40,), BLOCK * MOVED**2)
        return Offer(self.thread, self.round, u.clone(), (torch.full((40,), 3 * MOVED), squares))

    def swap(self, u: Tensor, partner: Codec, theirs: Tensor, moved: float) -> Tensor:
        """The correction, as it would be added. Raises PeerFault."""
        offer, exchange = self.offer(u), self.round.to_bytes(16, "big")
        other = partner.converse(theirs, 0, exchange, torch.full((40,), moved))
        said, answer = offer.open(0, exchange).result(10), other.open()
        while isinstance(reply := offer.receive(0, answer).result(10), bytes):
            answer, said = other.receive(said).reply or b"", reply
        offer.apply(0, reply)
        offer.stats().result(10)
        command = self.posts.pop()
        assert isinstance(command, Correct)
        return command.correction


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("moved", [MOVED, 1e-25], ids=["usual wishes", "tiny wishes"])
def test_one_swap_moves_no_more_than_twice_what_honest_ones_do(name: str, attack: str, moved: float) -> None:
    node, honest = Node(name), codec(name)
    u = 0.05 * noise(1)
    try:
        for seed in range(3):
            assert torch.isfinite(node.swap(u, honest, u + MOVED * noise(10 + seed), MOVED)).all()
        for _ in range(3):
            try:
                c = node.swap(u, codec(name), ATTACKS[attack](u), moved)
            except PeerFault:
                continue
            assert float(c.norm()) <= 1.01 * LONGEST * MOVED * SIZE**0.5
        for seed in range(3):
            theirs = u + MOVED * noise(20 + seed)
            c = node.swap(u, honest, theirs, MOVED)
            error = float((2 * c - (theirs - u)).norm() / (theirs - u).norm())
            assert error < (0.35 if name.startswith("lattice") else 1.0), "the next honest swap is as good as before"
    finally:
        node.thread.close()
