"""Two offers that swap: what a replica moved, and what it did not, in its phase; and large vectors."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
from torch import Tensor

from noloco_node.core.bounds import CorrectionBounds, Movement
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.training.mailbox import Command, Correct
from noloco_node.training.offer import CodecThread, Offer

BLOCKS = 200
"""Of a fragment; there are two."""
MOVED = 1e-2
"""The root mean square of the movement, where there is one."""
DEADLINE_S = 60.0


def noise(seed: int, size: int = 2 * BLOCKS * BLOCK) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def drop(_: Command) -> None:
    pass


@contextmanager
def nodes(
    name: str, posts: tuple[Callable[[Command], None], ...] = (drop, drop), elements: int = BLOCKS * BLOCK
) -> Iterator[list[CodecThread]]:
    with ExitStack() as closed:
        yield [closed.enter_context(closing(CodecThread(codec(name), post, elements))) for post in posts]


def movement(moved: Tensor) -> tuple[Tensor, Tensor]:
    rows = moved.view(-1, BLOCK)
    return rows.abs().amax(1), rows.square().sum(1)


def swapped(offers: list[Offer], index: int, exchange: bytes = bytes(16)) -> tuple[Tensor, float]:
    """Our correction of a fragment, and the share of its blocks that was sent again. Raises PeerFault."""
    said = [offer.open(index, exchange).result(DEADLINE_S) for offer in offers]
    while isinstance(said[0], bytes):
        said = [o.receive(index, p).result(DEADLINE_S) for o, p in zip(offers, reversed(said), strict=True)]
    return offers[0]._corrections[index].here, offers[0].stats().result(DEADLINE_S).missed_share


def test_subnormal_numbers_count_as_zeros() -> None:
    """They take a CPU many times as long. So it is whatever thread begins this one."""
    with nodes("fp32") as (thread, _):
        found = thread.do(0, lambda: float(torch.full((8,), 2.0**-130).mul(2.0**10).sum()))
        assert found.result(DEADLINE_S) == 0


def test_coding_takes_one_core_and_leaves_the_others_to_threads_that_begin_later() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with nodes("fp32") as (thread, _), ThreadPoolExecutor(1) as later:
            assert thread.do(0, torch.get_num_threads).result(DEADLINE_S) == 1
            assert torch.get_num_threads() == later.submit(torch.get_num_threads).result(DEADLINE_S) == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["lattice:3", "lattice:4"])
@pytest.mark.parametrize("few", [BLOCKS, 4], ids=["none of a fragment", "few blocks of all"])
def test_a_side_may_have_moved_none_of_the_rows_that_the_other_moved(name: str, few: int) -> None:
    """A table with a row for each user, most of whom only one side has seen."""
    moved = [MOVED * noise(seed) for seed in (1, 2)]
    moved[1][few * BLOCK :] = 0
    with nodes(name) as threads:
        offers = [Offer(t, 1, noise(0) + m, movement(m)) for t, m in zip(threads, moved, strict=True)]
        for index in range(2):
            c, missed = swapped(offers, index)
            apart = (moved[1] - moved[0])[index * BLOCKS * BLOCK :][: BLOCKS * BLOCK]
            assert missed <= 0.05
            assert float((2 * c - apart).norm() / apart.norm()) < 0.65


def test_the_figures_are_of_the_last_swap_and_not_of_one_before_it_that_broke() -> None:
    moved = [MOVED * noise(seed) for seed in (1, 2, 3)]
    moved[1][: 4 * BLOCK] *= 50  # out of the range that both agree on, so they are sent again
    with nodes("lattice:3", (drop, drop, drop)) as threads:
        ours, first, second = (
            Offer(t, 1, noise(0) + m, movement(MOVED * noise(4))) for t, m in zip(threads, moved, strict=True)
        )
        _, missed = swapped([ours, first], 0, b"1" * 16)
        assert missed > 0, "and the partner has gone"
        for index in range(2):
            swapped([ours, second], index, b"2" * 16)
        of_both = [offer.stats().result(DEADLINE_S) for offer in (ours, second)]
    assert [of_one.blocks for of_one in of_both] == [2 * BLOCKS] * 2
    assert of_both[0].missed_share == of_both[1].missed_share == 0


def test_what_a_partner_may_move_follows_from_the_movement_alone() -> None:
    moved = MOVED * noise(1)
    moved[4 * BLOCK :] = 0
    peaks, squares = movement(moved)
    bounds = CorrectionBounds([BLOCKS * BLOCK] * 2)
    bounds.moved(Movement.of(peaks, squares, BLOCKS))
    u = noise(0)
    with nodes("lattice:3") as threads:
        offer = Offer(threads[0], 1, u.clone(), (peaks, squares))
        offer.open(0, bytes(16)).result(DEADLINE_S)
        held = threads[0].bounds
        assert held is not None
        for index, seed in ((0, 2), (1, 3)):
            c, part = (x[index * BLOCKS * BLOCK :][: BLOCKS * BLOCK] for x in (MOVED * noise(seed), u))
            assert held.scale(index, c, part) == bounds.scale(index, c, part) < 1


def test_a_large_vector_is_swapped_in_larger_fragments_and_all_of_it_once() -> None:
    size, least = 512 * BLOCK, BLOCK
    posts: list[list[Command]] = [[], []]
    moved = [MOVED * noise(seed, size) for seed in (1, 2)]
    with nodes("lattice:4", (posts[0].append, posts[1].append), least) as threads:
        offers = [Offer(t, 1, noise(0, size) + m, movement(m)) for t, m in zip(threads, moved, strict=True)]
        assert offers[0].fragments == 128
        for index in range(128):
            swapped(offers, index)
            for offer in offers:
                offer.apply(index, 1.0)
        for offer in offers:
            offer.stats().result(DEADLINE_S)
    ours, theirs = ([each for each in found if isinstance(each, Correct)] for found in posts)
    assert [each.start for each in ours] == list(range(0, size, 4 * least))
    c = torch.cat([each.correction for each in ours])
    assert len(c) == size and float(c.norm()) > 0
    assert torch.equal(c, -torch.cat([each.correction for each in theirs]))
