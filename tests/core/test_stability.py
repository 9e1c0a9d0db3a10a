"""The stability condition against its known figures, and replicas really paired at random.

The noisy quadratic is the NoLoCo paper's own setting (arXiv 2506.10911, section 4): each replica runs stochastic
gradient descent on ½ (θ − θ*)² with gradient noise, and meets random partners.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.core import outer, stability
from noloco_node.core.outer import OuterSettings


@pytest.mark.parametrize(
    ("alpha", "limit", "factor"), [(0.5, 1.5, 0.70), (0.3, 1.82, 0.55), (0.0, 2.0, 0.545), (0.9, 0.38, 0.98)]
)
def test_known_figures(alpha, limit, factor):
    gamma = min(0.7, 0.3 if alpha == 0.9 else 0.7)
    assert stability.variance_factor(alpha, gamma) == pytest.approx(factor, abs=0.005)
    assert stability.largest_gamma(alpha) == pytest.approx(limit)
    stability.check(alpha, 0.7, limit - 1e-6)
    with pytest.raises(ValueError, match="does not shrink"):
        stability.check(alpha, 0.7, limit + 1e-6)


@given(st.floats(0, 0.99), st.floats(0.01, 3))
def test_the_factor_crosses_one_at_the_limit(alpha, gamma):
    factor = stability.variance_factor(alpha, gamma)
    limit = stability.largest_gamma(alpha)
    if abs(gamma / limit - 1) > 1e-3:
        assert (factor < 1) == (gamma < limit)


@given(st.floats(0, 0.99), st.floats(0.01, 0.99), st.floats(0, 1))
def test_the_largest_beta_is_where_mean_or_spread_are_stable_no_more(alpha, share, kappa):
    gamma = share * stability.largest_gamma(alpha)
    most = stability.largest_beta(alpha, gamma)
    below, above = ((1 + alpha - b, b) for b in (0.999 * kappa * most, 1.001 * most))
    roots = [np.abs(np.roots([1, -first, alpha])).max() for first, _ in (below, above)]
    factors = [stability.variance_factor(alpha, gamma, b) for _, b in (below, above)]
    assert factors[0] < 1 and roots[0] <= 1 + 1e-9 < max(factors[1], roots[1])


def test_for_pairs_the_spread_may_bound_beta_more_than_heavy_ball():
    assert stability.largest_beta(0.3, 0.7) == pytest.approx(2.548, abs=0.001), "below 2.6"
    assert stability.largest_beta(0.1, 1.0) == pytest.approx(2 * 1.1, abs=0.02)


@given(st.floats(0, 0.99))
def test_nesterov_overshoots_from_its_bound_on(alpha):
    for share, stable in ((0.999, True), (1.001, False)):
        kept = 1 - share * stability.largest_nesterov_beta(alpha)
        assert (np.abs(np.roots([1, -(1 + alpha) * kept, alpha * kept])).max() < 1) == stable


@given(st.floats(0, 0.95), st.floats(0.05, 2.5), st.floats(0, 2.5))
def test_the_moments_are_those_of_random_pairs(alpha, gamma, b):
    """One round of really drawn pairs, over many replicas, against the matrix."""
    rng = np.random.default_rng(5)
    count = 40_000
    phi = rng.normal(size=count)
    delta = 0.5 * phi + rng.normal(size=count)
    before = np.array([np.mean(phi * phi), np.mean(phi * delta), np.mean(delta * delta)])
    order = rng.permutation(count).reshape(-1, 2)
    mean = np.empty(count)
    mean[order] = phi[order].mean(axis=1, keepdims=True)
    delta = alpha * delta - b * mean - gamma * (phi - mean)
    phi = phi + delta
    after = np.array([np.mean(phi * phi), np.mean(phi * delta), np.mean(delta * delta)])
    expected = np.array(stability.moment_matrix(alpha, gamma, b)) @ before
    np.testing.assert_allclose(after, expected, rtol=0.05, atol=0.05 * before.max())


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "says"),
    [
        (
            0.9,
            0.7,
            1.0,
            r"1\.21 times.*above 0 and below 0\.38.*alpha from 0 to 0\.7 would.*sqrt.*0\.9 < gamma < 1\.68",
        ),
        (0.5, 0.7, 0.0, "must be above 0 and below 1.5"),
        (0.5, 0.7, 2.5, "no alpha would do"),
        (0.5, 0.7, float("nan"), "below 1.5"),
        (1.0, 0.7, 0.7, "from 0 to below 1"),
        (-0.1, 0.7, 0.7, "from 0 to below 1"),
        (0.5, 0.0, 0.7, "above 0"),
        (0.5, float("inf"), 0.7, "finite"),
        (0.3, 9.9, 0.7, r"overshoots.*beta must be below 2\.55.*2 \(1 \+ alpha\) = 2\.6 for the mean"),
        (0.9, 1.5, 0.3, r"beta must be below 0\.945"),
    ],
)
def test_the_error_says_what_would_be_stable(alpha, beta, gamma, says):
    with pytest.raises(ValueError, match=says):
        stability.check(alpha, beta, gamma)


def test_nothing_heavy_is_imported():
    heavy = "import sys, noloco_node.core.stability; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout == "set()\n"


OPTIMUM, REPLICAS, COORDINATES = 3.0, 64, 64


def quadratic(alpha, beta, gamma, learning_rate, rounds, *, inner_steps=10, seed=0):
    """Replicas (64, 64 independent coordinates) by the core's own functions; the slow weights after each round."""
    chance = torch.Generator().manual_seed(seed)
    hyper = unchecked(alpha, beta, gamma)
    theta = torch.zeros(REPLICAS, COORDINATES, dtype=torch.float64)
    phi, delta, u = theta.clone(), torch.zeros_like(theta), torch.empty_like(theta)
    seen = []
    for _ in range(rounds):
        for _ in range(inner_steps):
            noise = torch.randn(theta.shape, generator=chance, dtype=theta.dtype)
            theta -= learning_rate * (theta - OPTIMUM + noise)
        outer.snapshot(theta, phi, hyper, u)
        outer.local_step(theta, phi, delta, hyper)
        partner = matched(torch.randperm(REPLICAS, generator=chance))
        outer.correct(theta, phi, delta, outer.correction(u, u[partner]), hyper)
        seen.append(phi.clone())
    return seen


def unchecked(alpha, beta, gamma):
    """A Hyper that its own check would refuse: divergence has to be seen."""
    hyper = object.__new__(OuterSettings)
    for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
        object.__setattr__(hyper, name, value)
    return hyper


def matched(order):
    partner = torch.empty_like(order)
    partner[order[::2]], partner[order[1::2]] = order[1::2], order[::2]
    return partner


def variance(phis):
    return torch.stack([phi.var(dim=0, correction=1).mean() for phi in phis])


def test_noisy_quadratic_the_mean_converges():
    phis = quadratic(0.5, 0.7, 0.7, 0.01, 300)
    start, end = OPTIMUM, (torch.stack(phis[-100:]).mean() - OPTIMUM).abs()
    assert end < 0.01 * start


def test_noisy_quadratic_the_variance_falls_with_the_square_of_the_learning_rate():
    rates = np.array([1e-4, 2e-4, 4e-4, 8e-4])  # small, so that a phase stays in the linear range
    spread = [float(variance(quadratic(0.5, 0.7, 0.7, rate, 150, seed=4))[50:].mean()) for rate in rates]
    slope = np.polyfit(np.log(rates), np.log(spread), 1)[0]
    assert slope == pytest.approx(2, abs=0.02)


def test_noisy_quadratic_diverges_where_the_matrix_says_so_at_its_rate():
    """Inside the paper's bound, 0.9 < 1.0 < sqrt(2.81)."""
    spread = variance(quadratic(0.9, 0.7, 1.0, 1e-4, 120, seed=2))
    measured = float((spread[-1] / spread[40]) ** (1 / 79))
    assert measured == pytest.approx(stability.variance_factor(0.9, 1.0), rel=0.05)
    assert spread[-1] > 1000 * spread[40]


def test_noisy_quadratic_stays_together_where_the_matrix_says_stable():
    spread = variance(quadratic(0.5, 0.7, 1.4, 1e-3, 400, seed=3))
    early, late = spread[100:200].mean(), spread[300:].mean()
    assert late < 1.5 * early


@pytest.mark.parametrize(("beta", "stable"), [(2.3, True), (2.6, False)])
def test_noisy_quadratic_whose_phases_reach_the_minimum_overshoots_from_the_largest_beta_on(beta, stable):
    """The mean alone would be stable with both, below 3."""
    spread = variance(quadratic(0.5, beta, 0.7, 0.5, 120, seed=6))
    factor = stability.variance_factor(0.5, 0.7, b=beta * (1 - 0.5**10))
    assert (beta < stability.largest_beta(0.5, 0.7)) == (factor < 1) == stable
    if stable:
        assert spread[-40:].mean() < 1.5 * spread[40:80].mean()
    else:
        assert float((spread[-1] / spread[60]) ** (1 / 59)) == pytest.approx(factor, rel=0.05)
