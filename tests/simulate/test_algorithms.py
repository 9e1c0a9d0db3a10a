"""NoLoCo among many replicas against the paper's form, and each rival against its equations in numpy."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.errors import PeerMisbehaved
from noloco_node.simulate.baselines import (
    Ddp,
    DiLoCo,
    FedAvg,
    Gasloc,
    Outer,
    PaperNoLoCo,
    Sparta,
    Streaming,
    matching,
    partners,
)
from noloco_node.simulate.noloco import NoLoCo, algorithm
from noloco_node.simulate.settings import Choice, Settings, choice

LAYOUT = {"a": torch.Size((3, 4)), "b": torch.Size((5,))}
SIZE = 17
PHASES_OF_5 = Settings().inner.model_copy(update={"steps": 5})


def start(replicas, seed=0):
    """A swarm in the middle of things: replicas apart, momentum there, a phase just trained."""
    chance = torch.Generator().manual_seed(seed)
    theta, phi, delta = torch.randn(3, replicas, SIZE, generator=chance)
    return Outer(theta, phi, delta)


def copied(outer):
    return Outer(outer.theta.clone(), outer.phi.clone(), outer.delta.clone())


def noloco(text="noloco", **changed):
    return algorithm(choice(text), Settings(**{"codec": "fp32", "overlap": "blocking", **changed}), LAYOUT)


def train(outer, seed):
    outer.theta += torch.randn(outer.theta.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("replicas", [2, 7, 8])
def test_split_noloco_is_the_papers_with_the_same_partners(replicas):
    split = noloco("noloco:alpha=0.5:beta=0.7:gamma=0.7:keep_norm=0", replicas=replicas)
    paper = PaperNoLoCo(0.5, 0.7, 0.7, 4, random.Random(0))
    theirs, mine = start(replicas), start(replicas)
    for seed in range(4):
        train(mine, seed)
        train(theirs, seed)
        split._chance, paper._chance = random.Random(seed), random.Random(seed)
        split._lately.clear()
        split.boundary(mine)
        paper.boundary(theirs)
        for name in ("theta", "phi", "delta"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec_name", ["fp32", "bf16"])
@pytest.mark.parametrize("text", ["noloco", "noloco:swaps=3", "noloco:keep_norm=0"])
def test_whatever_is_tried_the_mean_is_as_without_partners(text, codec_name):
    alone, together = start(8), start(8)
    rules = noloco(text, replicas=8, codec=codec_name), noloco(text, replicas=8, codec=codec_name)
    rules[0]._swap_pairs = lambda outer: None
    for rule, outer in zip(rules, (alone, together), strict=True):
        rule.boundary(outer)
        rule.finish(outer)
    assert not torch.allclose(alone.phi, together.phi, atol=0.01)
    torch.testing.assert_close(together.phi.mean(0), alone.phi.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.delta.mean(0), alone.delta.mean(0), rtol=1e-5, atol=1e-5)


def test_three_swaps_leave_less_spread_than_one():
    spreads = []
    for text in ("noloco", "noloco:swaps=3"):
        outer = start(8)
        noloco(text).boundary(outer)
        spreads.append(float(outer.phi.var(dim=0).mean()))
    assert spreads[1] < 0.8 * spreads[0]


@pytest.mark.parametrize(("delay", "applied_at"), [(0, 0), (3, 3), (5, 5), (12, 12)])
def test_a_late_correction_is_applied_so_many_inner_steps_later_with_the_same_effect(delay, applied_at):
    """Phases of 5 steps: boundaries that come before its end make no outer step, and no other correction."""
    late, prompt = noloco(overlap=f"delay={delay}", inner=PHASES_OF_5), noloco()
    outers = start(8), start(8)
    for rule, outer in zip((late, prompt), outers, strict=True):
        rule.boundary(outer)
    apart = [not torch.equal(outers[0].phi, outers[1].phi)]
    for step in range(1, applied_at + 1):
        late.between(outers[0], (step - 1) % 5 + 1)
        apart.append(not torch.allclose(outers[0].phi, outers[1].phi, atol=1e-5))
        if step % 5 == 0 and step < applied_at:
            late.boundary(outers[0])
    assert apart.index(False) == applied_at
    torch.testing.assert_close(outers[0].delta, outers[1].delta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["noloco", "noloco:keep_norm=0", "noloco:swaps=2"])
def test_a_phase_that_a_swap_lasts_over_is_one_longer_phase(text):
    """Of 3 phases of 5 steps, where a swap takes 7: the offer after the second one would be due, and is not made."""
    long_phase = 15 if "swaps" in text else 10
    inner = [PHASES_OF_5.model_copy(update={"steps": steps}) for steps in (5, long_phase)]
    short, long = (noloco(text, overlap="delay=7", inner=of_one) for of_one in inner)
    outers = start(8), start(8)
    for step in range(31):
        for rule, outer, phase in ((short, outers[0], 5), (long, outers[1], long_phase)):
            if step:
                train(outer, step)
                rule.between(outer, (step - 1) % phase + 1)
            if step % phase == 0:
                rule.boundary(outer)
    for name in ("theta", "phi", "delta"):
        torch.testing.assert_close(getattr(outers[0], name), getattr(outers[1], name), rtol=1e-4, atol=1e-4)
    assert short.sent == long.sent > 0


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_a_partner_comes_again_when_others_had_their_turn(replicas):
    rule, outer, met = noloco(replicas=replicas), start(replicas), []
    rule._swap = lambda u, i, j, pending: met[-1].append({i, j})
    for _ in range(20):
        met.append([])
        rule.boundary(outer)
    window = {2: 0, 3: 2, 4: 2, 8: 3}[replicas]
    assert all(pair not in before for at, pairs in enumerate(met) for before in met[max(0, at - window) : at]
               for pair in pairs)  # fmt: skip


@pytest.mark.parametrize("text", ["noloco", "noloco:keep_norm=0"])
def test_a_late_correction_comes_in_a_slice_after_each_inner_step(text):
    late, prompt = noloco(text, overlap="delay=5", replicas=8), noloco(text, replicas=8)
    outers = start(8), start(8)
    for rule, outer in zip((late, prompt), outers, strict=True):
        rule.boundary(outer)
    there = []
    for step in range(6):
        if step:
            late.between(outers[0], step)
        same = torch.isclose(outers[0].phi, outers[1].phi, atol=1e-6)
        assert torch.equal(same, torch.isclose(outers[0].theta, outers[1].theta, atol=1e-6))
        there.append(same.sum(1).tolist())
    came = [[after - before for before, after in zip(*two, strict=True)] for two in pairwise(there)]
    assert there[0] == [0] * 8 and there[5] == [SIZE] * 8
    assert all(sorted(of_one) == [1, 4, 4, 4, 4] for of_one in zip(*came, strict=True))
    assert len({tuple(of_one) for of_one in zip(*came, strict=True)}) > 1, "each pair begins elsewhere"
    torch.testing.assert_close(outers[0].delta, outers[1].delta, rtol=1e-5, atol=1e-5)


def test_a_second_swap_begins_when_the_first_is_there():
    late, first = noloco("noloco:swaps=2", overlap="delay=3"), noloco("noloco", overlap="delay=3")
    outers = start(8), start(8)
    for rule, outer in zip((late, first), outers, strict=True):
        rule.boundary(outer)
    for step in range(1, 4):
        late.between(outers[0], step)
        first.between(outers[1], step)
        assert torch.equal(outers[0].phi, outers[1].phi)
    both = noloco("noloco:swaps=2")
    both.boundary(at_once := start(8))
    late.between(outers[0], 5)
    assert not torch.allclose(outers[0].phi, at_once.phi, atol=1e-4)
    late.between(outers[0], 6)
    torch.testing.assert_close(outers[0].phi, at_once.phi, rtol=1e-4, atol=1e-5)


def test_bytes_are_those_of_the_payloads():
    for text, codec_name, expected in (
        ("noloco", "fp32", 4),
        ("noloco:swaps=2", "bf16", 4),
        ("noloco-paper", "fp32", 8),
    ):
        rule = noloco(text, codec=codec_name)
        rule.boundary(start(8))
        assert rule.sent == expected
    assert noloco("diloco", codec="bf16").sent == 0
    rival = noloco("diloco", codec="bf16")
    rival.boundary(start(8))
    assert rival.sent == 2 * 7 / 8 * 2


def test_one_fragment_at_once_is_diloco():
    whole, one = start(4), start(4)
    one.phi[:] = whole.phi[:] = whole.phi[0]
    one.delta[:] = whole.delta[:] = whole.delta[0]
    rivals = DiLoCo(0.5, 0.7, 2), Streaming(Choice("streaming", 0.5, 0.7), 3, 0, 2)
    for step in range(1, 10):
        train(whole, step)
        train(one, step)
        rivals[1].between(one, (step - 1) % 3 + 1)
        if step % 3 == 0:
            rivals[0].boundary(whole)
    assert torch.equal(whole.theta, one.theta)
    assert torch.equal(whole.delta, one.delta)
    assert rivals[0].sent == rivals[1].sent == 3 * 2 * (3 / 4) * 2


def test_streaming_sends_one_fragment_after_the_other():
    """Phases of 6 steps, 2 fragments, which land 2 steps after they were sent: after steps 3 and 6. Of what a replica
    learned meanwhile a quarter stays."""
    outer = Outer.start(torch.zeros(2, 4))
    rival = Streaming(Choice("streaming", alpha=0.5, beta=0.7, fragments=2, own=0.25), 6, 2, width=0.5)
    phi, velocity, theta = np.zeros(4), np.zeros(4), np.zeros((2, 4))
    sent = {}
    for step in range(1, 16):
        outer.theta += torch.tensor([[1.0], [2.0]])
        theta += [[1.0], [2.0]]
        rival.between(outer, (step - 1) % 6 + 1)
        part = slice(0, 2) if (step + 2) % 6 == 3 else slice(2, 4)
        if (step + 2) % 3 == 0:
            sent[step + 2] = part, (theta - phi).mean(axis=0)[part]
        if step in sent:
            part, moved = sent[step]
            velocity[part] = 0.5 * velocity[part] + moved
            phi[part] += 0.7 * (moved + 0.5 * velocity[part])
            theta[:, part] = 0.75 * phi[part] + 0.25 * theta[:, part]
        np.testing.assert_allclose(outer.theta, theta, rtol=1e-5)
    assert rival.sent == len(sent) / 2 * 2 * (1 / 2) * 0.5
    rival.finish(outer)  # nothing is on its way after step 15
    np.testing.assert_allclose(outer.theta, theta, rtol=1e-5)


def test_streaming_lands_in_the_end_what_is_on_its_way():
    outer = Outer.start(torch.zeros(2, 4))
    outer.theta += torch.tensor([[1.0], [3.0]])
    rival = Streaming(Choice("streaming", alpha=0, beta=1), 6, 5, width=1)
    rival.between(outer, 1)
    assert outer.theta[:, 0].tolist() == [1, 3]
    rival.finish(outer)
    assert outer.theta.tolist() == [[2] * 4] * 2


def test_sparta_averages_some_weights_after_each_step():
    rival, outer = Sparta(0.25, 0.5, seed=1), Outer.start(torch.randn(4, 4000))
    before = outer.theta.clone()
    rival.between(outer, 1)
    averaged = (outer.theta != before).any(dim=0)
    assert 0.2 < averaged.double().mean() < 0.3
    torch.testing.assert_close(outer.theta[:, averaged], before.mean(dim=0)[averaged].expand(4, -1))
    assert rival.sent == pytest.approx(float(averaged.double().mean()) * 2 * (3 / 4) * 0.5)
    once = averaged.clone()
    rival.between(outer, 2)
    assert ((outer.theta != before).any(dim=0) & ~once).any()


def test_gasloc_is_the_papers_recursion():
    """θ ← z − γ Λ z + α (z − z') with z = θ + β g, g what a phase learned, Λ z = (z − z_j)/2 and z' the last z."""
    alpha, beta, gamma, outer = 0.6, 0.8, 0.9, Outer.start(torch.randn(6, SIZE))
    rival = Gasloc(alpha, beta, gamma, 2, random.Random(0))
    theta = last = outer.theta.double().numpy().copy()
    for seed in range(4):
        of = partners(matching(6, random.Random(seed)), 6)
        rival._chance = random.Random(seed)
        learned = outer.theta.clone()
        train(outer, seed)
        z = theta + beta * (outer.theta - learned).double().numpy()
        theta, last = z - gamma * (z - z[of]) / 2 + alpha * (z - last), z
        rival.boundary(outer)
        np.testing.assert_allclose(outer.theta, theta, rtol=1e-4, atol=1e-5)
    assert rival.sent == 4 * 2


def test_gaslocs_mean_is_diloco():
    """Pairs change no mean, and with momentum it is Nesterov's. The same gradients for both, whatever the weights."""
    pairs, ring = start(4), start(4)
    pairs.phi[:] = ring.phi[:] = ring.phi[0]
    pairs.delta[:] = ring.delta[:] = 0
    pairs.theta[:] = ring.theta[:] = ring.phi
    rivals = Gasloc(0.5, 0.7, 1.0, 4, random.Random(0)), DiLoCo(0.5, 0.7, 4)
    for seed in range(4):
        for rival, outer in zip(rivals, (pairs, ring), strict=True):
            train(outer, seed)
            rival.boundary(outer)
        torch.testing.assert_close(pairs.theta.mean(0), ring.theta.mean(0), rtol=1e-4, atol=1e-5)


def test_fedavg_and_ddp_average():
    outer = start(4)
    mean = outer.theta.mean(dim=0)
    FedAvg(4).boundary(outer)
    assert all(torch.equal(row, mean) for row in outer.theta)
    gradients = torch.randn(4, SIZE)
    expected = gradients.mean(dim=0)
    Ddp(4).gradients(gradients)
    assert all(torch.equal(row, expected) for row in gradients)


@given(st.integers(1, 20), st.integers(0, 100))
def test_a_matching_swap_pairss_everybody_once(replicas, seed):
    pairs = matching(replicas, random.Random(seed))
    met = [member for pair in pairs for member in pair]
    assert len(met) == len(set(met)) == replicas - replicas % 2
    of = partners(pairs, replicas)
    assert all(of[of[i]] == i for i in range(replicas))
    if replicas > 6:
        again = matching(replicas, random.Random(seed), frozenset(frozenset(pair) for pair in pairs))
        assert not {frozenset(pair) for pair in again} & {frozenset(pair) for pair in pairs}


def test_a_swap_that_the_codec_gives_up_leaves_both_without_a_partner(monkeypatch):
    """Row 0's codec refuses every payload; the other three pairs go on."""
    rule, alone, outer = noloco(), start(8), start(8)
    refused = rule._codecs[0].converse(torch.zeros(SIZE), 0, bytes(16))
    monkeypatch.setattr(refused, "receive", lambda payload: (_ for _ in ()).throw(PeerMisbehaved("diverged")))
    monkeypatch.setattr(rule._codecs[0], "converse", lambda *args: refused)
    rule.boundary(outer)
    solo = noloco()
    solo._swap_pairs = lambda outer: None
    solo.boundary(alone)
    unchanged = [torch.equal(a, b) for a, b in zip(outer.phi, alone.phi, strict=True)]
    assert rule.failed == 1
    assert unchanged[0]
    assert sum(unchanged) == 2


def test_the_daemons_own_step_is_used(monkeypatch):
    from noloco_node.core import outer as core

    def broken(*args):
        raise RuntimeError("the core's")

    monkeypatch.setattr(core, "local_step", broken)
    with pytest.raises(RuntimeError, match="the core's"):
        NoLoCo(Choice("noloco", 0.5, 0.7, 0.7), Settings(), [SIZE], random.Random(0)).boundary(start(8))
