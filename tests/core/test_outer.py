"""The outer step against the papers' equations, written once more in numpy float64 and from the equations alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretended_device import pretended_gpu

from noloco_node.core import outer, stability
from noloco_node.core.outer import OuterSettings

SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([(torch.float32, 2e-6), (torch.float64, 1e-12)])


@st.composite
def hypers(draw):
    alpha = draw(st.floats(0, 0.95))
    gamma = draw(st.floats(0.01, 0.99)) * stability.largest_gamma(alpha)
    beta = draw(st.floats(0.01, 0.99)) * stability.largest_beta(alpha, gamma)
    return OuterSettings(alpha, beta, gamma)


def group_correction(us):
    """c_i = mean(u) − u_i for a group of any size. DiLoCo is the group of everybody."""
    return [sum(us) / len(us) - u for u in us]


class Paper:
    """arXiv 2506.10911, eq. (1)-(3) for a group (the pair is n = 2), with the sign of its appendix and code (+β)."""

    def __init__(self, thetas, phis, deltas, hyper):
        self.thetas, self.phis, self.deltas = (np.array(rows, dtype=np.float64) for rows in (thetas, phis, deltas))
        self.hyper = hyper

    def step(self, moved):
        """`moved`: what each replica's inner phase added to φ."""
        momentum = self.hyper.alpha * self.deltas
        towards = self.hyper.beta * moved.mean(axis=0)
        together = self.hyper.gamma * (self.phis - self.phis.mean(axis=0))
        self.deltas = momentum + towards - together
        self.phis = self.phis + self.deltas


class Replica:
    def __init__(self, phi, delta, dtype=torch.float64):
        self.phi = torch.tensor(phi, dtype=dtype)
        self.theta = self.phi.clone()
        self.delta = torch.tensor(delta, dtype=dtype)

    def phase(self, moved, hyper):
        """Trains, snapshots, steps; gives u."""
        self.theta += torch.tensor(moved, dtype=self.theta.dtype)
        u = torch.empty_like(self.theta)
        outer.snapshot(self.theta, self.phi, hyper, u)
        outer.local_step(self.theta, self.phi, self.delta, hyper)
        return u

    def correct(self, c, hyper, late=0):
        outer.correct(self.theta, self.phi, self.delta, c, hyper, late)


def drawn(seed, replicas, size):
    rng = np.random.default_rng(seed)
    phis, deltas = rng.normal(size=(2, replicas, size))
    return rng, phis, deltas, [Replica(phi, delta) for phi, delta in zip(phis, deltas, strict=True)]


def rows(replicas, name):
    return np.stack([getattr(replica, name).double().numpy() for replica in replicas])


def close(measured, expected, tolerance=1e-12):
    np.testing.assert_allclose(measured, expected, rtol=tolerance, atol=tolerance)


@given(SEEDS, SIZES, hypers(), st.integers(2, 6), DTYPES)
def test_split_form_is_the_papers_form_over_rounds_and_group_sizes(seed, size, hyper, group, precision):
    dtype, tolerance = precision
    rng, phis, deltas, _ = drawn(seed, group, size)
    replicas = [Replica(phi, delta, dtype) for phi, delta in zip(phis, deltas, strict=True)]
    paper = Paper(phis, phis, deltas, hyper)
    for _ in range(3):
        moved = rng.normal(size=(group, size))
        us = [replica.phase(m, hyper) for replica, m in zip(replicas, moved, strict=True)]
        for replica, c in zip(replicas, group_correction(us), strict=True):
            replica.correct(c, hyper)
        paper.step(moved)
    scale = 1 + np.abs(paper.phis).max()
    close(rows(replicas, "phi") / scale, paper.phis / scale, tolerance)
    close(rows(replicas, "delta") / scale, paper.deltas / scale, tolerance)
    np.testing.assert_array_equal(rows(replicas, "theta") / scale, rows(replicas, "phi") / scale)


@given(SEEDS, SIZES, hypers())
def test_pair_correction_is_the_group_of_two_and_opposite_to_the_bit(seed, size, hyper):
    rng, _, _, replicas = drawn(seed, 2, size)
    mine, theirs = (replica.phase(m, hyper) for replica, m in zip(replicas, rng.normal(size=(2, size)), strict=True))
    c = outer.correction(mine, theirs)
    assert torch.equal(c, -outer.correction(theirs, mine))
    torch.testing.assert_close(c, group_correction([mine, theirs])[0], rtol=1e-12, atol=1e-14)


@given(SEEDS, SIZES, hypers(), st.integers(2, 9))
def test_a_group_conserves_its_means(seed, size, hyper, group):
    """What the mean does must not depend on who met whom: it is what solo steps alone give."""
    rng, phis, deltas, replicas = drawn(seed, group, size)
    moved = rng.normal(size=(group, size))
    us = [replica.phase(m, hyper) for replica, m in zip(replicas, moved, strict=True)]
    before = {name: rows(replicas, name).mean(axis=0) for name in ("theta", "phi", "delta")}
    for replica, c in zip(replicas, group_correction(us), strict=True):
        replica.correct(c, hyper)
    for name, mean in before.items():
        close(rows(replicas, name).mean(axis=0), mean)
    close(before["delta"], (hyper.alpha * deltas + hyper.beta * moved).mean(axis=0))
    close(before["phi"], before["delta"] + phis.mean(axis=0))


@given(SEEDS, SIZES, hypers(), st.integers(0, 5))
def test_a_late_correction_comes_to_the_same_as_one_in_time(seed, size, hyper, late):
    rng, _, _, (prompt, tardy) = drawn(seed, 2, size)
    tardy.theta, tardy.phi, tardy.delta = (x.clone() for x in (prompt.theta, prompt.phi, prompt.delta))
    c = torch.tensor(rng.normal(size=size))
    phases = rng.normal(size=(late + 1, size))
    prompt.phase(phases[0], hyper)
    prompt.correct(c, hyper)
    tardy.phase(phases[0], hyper)
    for moved in phases[1:]:
        prompt.phase(moved, hyper)
        tardy.phase(moved, hyper)
    tardy.correct(c, hyper, late)
    for name in ("theta", "phi", "delta"):
        torch.testing.assert_close(getattr(tardy, name), getattr(prompt, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_momentum_carries_a_correction_on(late):
    """Replicas that learn nothing more: what a correction comes to after many boundaries."""
    hyper = OuterSettings(0.3, 0.7, 1.0)
    theta, phi, delta, c = (torch.tensor([x], dtype=torch.float64) for x in (2.0, 2.0, 0.0, 0.5))
    outer.correct(theta, phi, delta, c, hyper, late)
    landed = phi.item() - 2
    for _ in range(60):
        outer.local_step(theta, phi, delta, hyper)
    assert phi.item() - 2 == pytest.approx(landed * outer.carried_on(hyper, late))


def test_a_correction_in_the_middle_of_a_phase_keeps_what_was_learned():
    hyper = OuterSettings(0.5, 0.7, 0.7)
    replica = Replica([1.0, 2.0], [0.0, 0.0])
    replica.theta += 10
    replica.correct(torch.tensor([0.5, -0.5], dtype=torch.float64), hyper, late=1)
    assert replica.theta.tolist() == [11.75, 11.25]
    assert replica.phi.tolist() == [1.75, 1.25]
    assert replica.delta.tolist() == [0.25, -0.25]


@given(SEEDS, st.integers(2, 40), hypers(), st.data())
def test_fragments_together_are_the_whole(seed, size, hyper, data):
    rng, phis, deltas, (whole,) = drawn(seed, 1, size)
    parts = Replica(phis[0], deltas[0])
    c = torch.tensor(rng.normal(size=size))
    cut = data.draw(st.integers(1, size - 1))
    whole.correct(c, hyper, 2)
    for part in (slice(cut, None), slice(0, cut)):
        outer.correct(parts.theta[part], parts.phi[part], parts.delta[part], c[part], hyper, 2)
    for name in ("theta", "phi", "delta"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))


@given(SEEDS, SIZES, st.floats(0, 0.9), st.floats(0.1, 1))
def test_diloco_is_the_group_of_everybody_with_equal_slow_weights(seed, size, alpha, beta):
    """arXiv 2311.08105, algorithm 1 with Nesterov's outer step as torch.optim.SGD takes it, from the gradient −mean Δ.

    NoLoCo's momentum is plain heavy-ball. Over the same Δ, Nesterov's iterate stands α δ ahead of it, exactly.
    """
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=size)
    hyper = OuterSettings(alpha, beta, 0.9 * 2 * (1 - alpha**2))
    replicas = [Replica(phi, np.zeros(size)) for _ in range(4)]
    diloco, velocity = phi.copy(), np.zeros(size)
    for _ in range(4):
        moved = rng.normal(size=(4, size))
        us = [replica.phase(m, hyper) for replica, m in zip(replicas, moved, strict=True)]
        for replica, c in zip(replicas, group_correction(us), strict=True):
            replica.correct(c, hyper)
        gradient = -moved.mean(axis=0)
        velocity = alpha * velocity + gradient
        diloco = diloco - beta * (gradient + alpha * velocity)
        for replica in replicas:
            close(replica.phi + alpha * replica.delta, diloco)


def test_nothing_is_copied_but_the_correction_of_a_fragment():
    """Allocations of a step on vectors of 4 MiB stay below one of them."""
    size = 1 << 20
    hyper = OuterSettings(0.5, 0.7, 0.7)
    theta, phi, delta, u, c = (torch.ones(size) for _ in range(5))
    moved = outer.BlockMovement(theta, phi, 256)

    def everything():
        outer.snapshot(theta, phi, hyper, u)
        outer.local_step(theta, phi, delta, hyper, moved)
        outer.correct(theta, phi, delta, c, hyper, 1)

    assert allocated(everything) < 4 * size // 16
    assert 4 * size <= allocated(lambda: outer.correction(u, c)) < 4 * size * 1.1
    assert allocated(lambda: outer.BlockMovement(theta, phi, 256)) < 4 * size // 12


def allocated(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


def test_vectors_longer_than_a_piece(monkeypatch):
    hyper = OuterSettings(0.5, 0.7, 0.7)
    rng, _, _, (whole, pieced) = drawn(1, 2, 1000)
    pieced.theta, pieced.phi, pieced.delta = (x.clone() for x in (whole.theta, whole.phi, whole.delta))
    moved = rng.normal(size=1000)
    u = whole.phase(moved, hyper)
    whole.correct(u, hyper)
    monkeypatch.setattr(outer, "CORE_PIECE", 64)
    assert torch.equal(pieced.phase(moved, hyper), u)
    pieced.correct(u, hyper)
    assert torch.equal(pieced.theta, whole.theta)
    assert torch.equal(pieced.delta, whole.delta)


def test_a_correction_for_which_memory_is_missing_changes_nothing(monkeypatch):
    """It is added again, and then once in all."""
    brought, calls = outer._brought, 0

    def short(part, like):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return brought(part, like)

    monkeypatch.setattr(outer, "_brought", short)
    theta, phi, delta, c = (torch.full((8,), float(i)) for i in range(4))
    with pytest.raises(torch.OutOfMemoryError):
        outer.correct(theta, phi, delta, c, OuterSettings(0.5, 0.7, 0.7))
    assert (theta == 0).all() and (phi == 1).all() and (delta == 2).all()


def test_a_gpu_gets_few_and_large_operations():
    hyper = OuterSettings(0.5, 0.7, 0.7)
    with pretended_gpu() as gpu:
        theta, phi, delta, u = (torch.zeros(4 * outer.PIECE, device="cuda") for _ in range(4))
        before = sum(gpu.stream.clock.values())
        outer.snapshot(theta, phi, hyper, u)
        outer.local_step(theta, phi, delta, hyper, outer.BlockMovement(theta, phi, 256))
        assert sum(gpu.stream.clock.values()) - before < 24, "as many as for one piece"
        assert not gpu.races


def test_a_matrix_of_replicas_is_as_good_as_its_rows():
    hyper = OuterSettings(0.3, 0.7, 0.7)
    _, phis, deltas, replicas = drawn(7, 3, 20)
    matrix = Replica(phis, deltas)
    moved = np.random.default_rng(8).normal(size=(3, 20))
    us = matrix.phase(moved, hyper)
    for row, replica in enumerate(replicas):
        assert torch.equal(replica.phase(moved[row], hyper), us[row])
        assert torch.equal(replica.phi, matrix.phi[row])


def test_mismatched_vectors_and_negative_lateness_are_refused():
    hyper = OuterSettings(0.5, 0.7, 0.7)
    a, b = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ValueError, match="differ in shape"):
        outer.local_step(a, b, a.clone(), hyper)
    with pytest.raises(ValueError, match="0 or more"):
        outer.correct(a, a.clone(), a.clone(), a.clone(), hyper, -1)


def test_unstable_hyper_parameters_cannot_be_made():
    with pytest.raises(ValueError, match=r"below 0\.38"):
        OuterSettings(0.9, 0.7, 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("host_state", [False, True])
def test_outer_state_on_the_gpu_or_in_host_memory(host_state):
    hyper = OuterSettings(0.5, 0.7, 0.7)
    _, _, _, (expected, moved) = drawn(3, 2, 5000)
    cpu, gpu = (Replica(expected.phi.tolist(), expected.delta.tolist(), torch.float32) for _ in range(2))
    gpu.theta = gpu.theta.cuda()
    if not host_state:
        gpu.phi, gpu.delta = gpu.phi.cuda(), gpu.delta.cuda()
    for replica in (cpu, gpu):
        replica.theta += moved.phi.to(replica.theta)
        u = torch.empty_like(cpu.theta)
        outer.snapshot(replica.theta, replica.phi, hyper, u)
        outer.local_step(replica.theta, replica.phi, replica.delta, hyper)
        outer.correct(replica.theta, replica.phi, replica.delta, u, hyper)
    torch.testing.assert_close(gpu.theta.cpu(), cpu.theta)
    torch.testing.assert_close(gpu.delta.cpu(), cpu.delta)
