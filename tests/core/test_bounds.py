"""How far one swap may move a replica: whatever a partner sends."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.core import outer
from noloco_node.core.bounds import HIGHEST, LEAST, LONGEST, PHASES, STILL, CorrectionBounds, Movement
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.errors import PeerFault

SIZES = (4 * BLOCK, 4 * BLOCK, 2 * BLOCK)
ALL = torch.ones(4 * BLOCK)
U = 100 * ALL


def length(elements: float) -> float:
    """Of a fragment in which each element is 1."""
    return math.sqrt(elements)


def bounds(*scales: float) -> CorrectionBounds:
    """Of a replica that moved each element by so much, boundary by boundary."""
    made = CorrectionBounds(SIZES)
    for scale in scales:
        made.moved(Movement(tuple(scale * length(size) for size in SIZES), (scale,) * 3))
    return made


def test_the_movement_of_each_fragment_comes_from_its_blocks() -> None:
    hyper = outer.OuterSettings(0.1, 0.5, 1.0)
    phi = torch.zeros(sum(SIZES) - 7)
    theta = torch.randn(len(phi))
    parts = torch.split(0.5 * theta, 4 * BLOCK)
    blocks = outer.BlockMovement(theta, phi, BLOCK)
    outer.local_step(theta.clone(), phi, phi.clone(), hyper, blocks)
    moved = Movement.of(blocks.peaks, blocks.squares, 4)
    assert moved.lengths == pytest.approx([float(part.norm()) for part in parts])
    assert moved.peaks == pytest.approx([float(part.abs().max()) for part in parts])


@pytest.mark.parametrize("times", [0.0, 0.7, 1.9])
def test_what_honest_partners_send_stays_as_it_is(times: float) -> None:
    assert bounds(1.0).scale(0, times * ALL, U) == 1


@pytest.mark.parametrize("times", [2.5, 8.0, 15.9])
def test_beyond_it_is_as_long_as_allowed(times: float) -> None:
    scale = bounds(1.0).scale(0, times * ALL, U)
    assert float((scale * times * ALL).norm()) == pytest.approx(LONGEST * length(4 * BLOCK), rel=1e-6)


def test_one_large_element_counts_as_much_as_its_size() -> None:
    c = torch.zeros(4 * BLOCK)
    c[3] = 40.0
    assert bounds(1.0).scale(0, c, U) == pytest.approx(HIGHEST / 40)


@pytest.mark.parametrize("c", [-U, U / 2, 4.5 * U, U * torch.randn(4 * BLOCK).sign() / 2, 1e30 * ALL])
def test_far_beyond_nothing_is_applied(c: torch.Tensor) -> None:
    """-u, 2u, 10u, noise of the length of u, and what a codec sent again."""
    with pytest.raises(PeerFault):
        bounds(1.0).scale(0, c, U)


def test_replicas_that_trained_apart_for_long_come_together_in_steps() -> None:
    """20 times the movement, but less than the weights differ from nothing."""
    assert bounds(1.0).scale(0, 20 * ALL, U) == pytest.approx(0.1)


@pytest.mark.parametrize("c", [torch.full_like(U, float(bad)) for bad in ("nan", "inf", "1e38")])
def test_what_is_not_finite_is_refused(c: torch.Tensor) -> None:
    with pytest.raises(PeerFault):
        bounds(1.0).scale(0, c, U)


def test_the_end_of_a_schedule_counts_what_was_moved_before() -> None:
    falling = [1.0, *[0.01] * (PHASES - 1)]
    assert bounds(*falling).scale(0, ALL, U) == 1
    assert bounds(*falling, 0.01).scale(0, ALL, U) == pytest.approx(0.1), "eight phases later it is forgotten"


def test_a_fragment_that_only_the_partner_has_trained() -> None:
    made = CorrectionBounds(SIZES)
    made.moved(Movement((0.0, length(4 * BLOCK), length(2 * BLOCK)), (0.0, 1.0, 1.0)))
    share = math.sqrt(4 / 10) * math.hypot(length(4 * BLOCK), length(2 * BLOCK))
    assert made.scale(0, ALL, U) == pytest.approx(LONGEST * LEAST * share / length(4 * BLOCK))


def test_a_replica_that_does_not_move_any_more_still_averages() -> None:
    assert bounds(0.0).scale(0, STILL * U, U) == 1
    assert bounds().scale(0, STILL * U, U) == 1


@given(
    c=st.lists(st.floats(width=32), min_size=1, max_size=40),
    moved=st.floats(0, 1e6),
    u=st.integers(-(10**30), 10**30).map(float),
)
def test_nothing_is_ever_longer_than_allowed(c: list[float], moved: float, u: float) -> None:
    made = CorrectionBounds([len(c)])
    made.moved(Movement((moved,), (moved,)))
    correction, own = torch.tensor(c), torch.full((len(c),), u)
    try:
        scale = made.scale(0, correction, own)
    except PeerFault:
        return
    assert 0 < scale <= 1
    allowed = max(LONGEST * moved, STILL * float(own.norm()))
    if math.isfinite(allowed) and scale > 2.0**-39:
        assert float((correction.double() * scale).norm()) <= allowed * (1 + 1e-4) + 1e-30
