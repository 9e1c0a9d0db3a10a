"""Two offers of one large vector, swapped whole."""

import torch

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.training.mailbox import Command, Correct
from noloco_node.training.offer import CodecThread, Offer

LEAST = BLOCK
SIZE = 512 * LEAST + 100
MOVED = 1e-3


def test_a_large_vector_is_swapped_in_larger_fragments_and_all_of_it_once() -> None:
    u = 0.05 * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    blocks = -(-SIZE // BLOCK)
    posts: list[list[Command]] = [[], []]
    threads = [CodecThread(codec("lattice:4"), each.append, LEAST) for each in posts]
    offers = []
    for seed, thread in enumerate(threads, 2):
        apart = MOVED * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        movement = torch.full((blocks,), 3 * MOVED), torch.full((blocks,), BLOCK * MOVED**2)
        offers.append(Offer(thread, 1, u + apart, movement))
    one, other = offers
    try:
        assert one.fragments == -(-SIZE // (4 * LEAST))
        for index in range(one.fragments):
            said, answer = (each.open(index, bytes(16)).result(10) for each in offers)
            while isinstance(said, bytes) and isinstance(answer, bytes):
                received = one.receive(index, answer), other.receive(index, said)
                said, answer = (each.result(10) for each in received)
            for each in offers:
                each.apply(index, 1.0)
        for each in offers:
            each.stats().result(10)
    finally:
        for thread in threads:
            thread.close()
    ours, theirs = ([each for each in found if isinstance(each, Correct)] for found in posts)
    assert [each.start for each in ours] == list(range(0, SIZE, 4 * LEAST))
    c = torch.cat([each.correction for each in ours])
    assert len(c) == SIZE and float(c.norm()) > 0
    assert torch.equal(c, -torch.cat([each.correction for each in theirs]))
