"""What averaging takes from Δ's length, learned from corrections alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.core import outer
from noloco_node.core.length_correction import LARGEST_SCALE, LengthCorrection

HYPER = outer.OuterSettings(alpha=0.3, beta=1.0, gamma=1.0)


class Replica:
    def __init__(self, sizes: list[int]) -> None:
        self.theta, self.phi, self.delta = (torch.zeros(sum(sizes)) for _ in range(3))
        self.norms = LengthCorrection(sizes)

    def boundary(self, moved: Tensor) -> Tensor:
        """Δ of a phase in, u out."""
        self.theta = self.phi + moved
        u = torch.empty_like(self.theta)
        self.norms.offer(self.theta, self.phi, HYPER, u)
        outer.local_step(self.theta, self.phi, self.delta, HYPER)
        return u

    def complete(self, c: Tensor, fragment: int) -> None:
        for start in range(0, len(c), fragment):
            part = slice(start, start + fragment)
            with self.norms.completed(start, c[part]) as owed:
                outer.correct(self.theta[part], self.phi[part], self.delta[part], c[part], HYPER, 0, *owed)


def met(one: Replica, other: Replica, moves: tuple[Tensor, Tensor], fragment: int = 1000) -> None:
    us = one.boundary(moves[0]), other.boundary(moves[1])
    c = outer.correction(*us)
    one.complete(c, fragment)
    other.complete(-c, fragment)


def orthogonal(size: int, length: float = 1.0) -> tuple[Tensor, Tensor]:
    one, other = torch.zeros(size), torch.zeros(size)
    one[: size // 2] = length / math.sqrt(size // 2)
    other[size - size // 2 :] = length / math.sqrt(size // 2)
    return one, other


def test_two_orthogonal_phases_lose_a_factor_root_two() -> None:
    one, other = Replica([64]), Replica([64])
    for _ in range(12):
        one.phi, other.phi = torch.zeros(64), torch.zeros(64)  # the phases' own differences, and nothing else
        met(one, other, orthogonal(64))
    assert one.norms.scales == other.norms.scales == [pytest.approx(math.sqrt(2), abs=2e-3)]  # what is owed is rounded


def test_two_equal_phases_lose_nothing_and_stay_bit_identical() -> None:
    one, other, plain = Replica([100]), Replica([100]), Replica([100])
    moved = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        met(one, other, (moved, moved))
        plain.theta = plain.phi + moved
        outer.local_step(plain.theta, plain.phi, plain.delta, HYPER)
    assert one.norms.scales == [1.0]
    assert torch.equal(one.phi, other.phi) and torch.equal(one.phi, plain.phi)


def test_each_tensor_has_its_own() -> None:
    one, other = Replica([64, 32]), Replica([64, 32])
    a, b = orthogonal(64)
    same = torch.ones(32)
    met(one, other, (torch.cat([a, same]), torch.cat([b, same])))
    assert one.norms.scales == [pytest.approx((1 + math.sqrt(2)) / 2, rel=1e-5), 1.0]


@given(fragment=st.integers(1, 100))
def test_fragments_may_be_cut_anywhere(fragment: int) -> None:
    sizes = [10, 1, 49, 40]
    moves = torch.arange(100.0), torch.arange(100.0).flip(0)
    whole, cut = (Replica(sizes), Replica(sizes)), (Replica(sizes), Replica(sizes))
    met(*whole, moves, fragment=100)
    met(*cut, moves, fragment=fragment)
    assert cut[0].norms.scales == pytest.approx(whole[0].norms.scales, rel=1e-5)


def test_a_swap_that_fails_teaches_only_what_was_received_whole() -> None:
    one, (a, b) = Replica([64, 64]), orthogonal(64)
    one.boundary(torch.cat([a, a]))
    with one.norms.completed(0, (torch.cat([b, b]) - torch.cat([a, a]))[:100] / 2):
        pass
    assert one.norms.scales[0] > 1 and one.norms.scales[1] == 1


def test_a_further_partner_teaches_nothing_more() -> None:
    one, (a, b) = Replica([64]), orthogonal(64)
    one.boundary(a)
    with one.norms.completed(0, (b - a) / 2):
        pass
    learned = one.norms.scales
    with one.norms.completed(0, 100 * b):
        pass
    assert one.norms.scales == learned


@pytest.mark.parametrize("length", [0.0, 1e3, 1e-30])
def test_whatever_a_partner_says_the_scale_stays_in_bounds(length: float) -> None:
    one = Replica([64])
    for _ in range(20):
        one.boundary(orthogonal(64)[0])
        with one.norms.completed(0, torch.full((64,), length)):
            pass
    assert 1 <= one.norms.scales[0] <= LARGEST_SCALE


def test_a_checkpoint_keeps_the_scales() -> None:
    one, _ = learned([64], orthogonal(64))
    again = LengthCorrection([64])
    again.load(one.norms.scales)
    assert again.scales == one.norms.scales != [1.0]


def learned(sizes: list[int], moves: tuple[Tensor, Tensor]) -> tuple[Replica, Replica]:
    pair = Replica(sizes), Replica(sizes)
    for _ in range(3):
        met(*pair, moves)
    return pair


def test_a_solo_round_is_the_plain_local_step() -> None:
    one, _ = learned([64], orthogonal(64))
    assert one.norms.scales[0] > 1.1
    theta, phi, delta = one.phi + orthogonal(64)[0], one.phi.clone(), one.delta.clone()
    outer.local_step(theta, phi, delta, HYPER)
    one.boundary(orthogonal(64)[0])
    assert torch.equal(one.phi, phi) and torch.equal(one.delta, delta) and torch.equal(one.theta, phi)


def test_the_length_comes_with_the_correction_and_once() -> None:
    one, other = learned([64], orthogonal(64))
    scale = one.norms.scales[0]
    before, delta = one.phi.clone(), one.delta.clone()
    moves = orthogonal(64)
    us = one.boundary(moves[0]), other.boundary(moves[1])
    assert us[0] == pytest.approx(HYPER.gamma * before + HYPER.beta * scale * moves[0], abs=1e-3)
    one.complete(outer.correction(*us), 10)
    mean = HYPER.alpha * delta + (us[0] + us[1]) / 2
    assert one.phi == pytest.approx(mean, abs=1e-3)
    with one.norms.completed(0, torch.zeros(64)) as owed:
        assert not owed


def test_of_a_failed_swap_only_what_was_applied_is_longer() -> None:
    one, other = learned([64], orthogonal(64))
    moves = orthogonal(64)
    us = one.boundary(moves[0]), other.boundary(moves[1])
    plain = one.phi.clone()
    one.complete(outer.correction(*us)[:32], 32)
    assert not torch.equal(one.phi[:32], plain[:32]) and torch.equal(one.phi[32:], plain[32:])
    one.boundary(torch.zeros(64))
    with one.norms.completed(0, torch.zeros(64)) as owed:
        assert not owed[0].any(), "the next round owes nothing of the last"
