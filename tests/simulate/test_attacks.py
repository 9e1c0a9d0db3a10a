"""What each attacker of a simulated swarm does, and what the defences of a node leave of it."""

import random
from collections import Counter

import pytest
import torch

from noloco_node.core.bounds import LONGEST
from noloco_node.core.outer import local_step
from noloco_node.simulate.attacks import Attackers, _first_allowed
from noloco_node.simulate.baselines import Outer
from noloco_node.simulate.defences import guards
from noloco_node.simulate.noloco import NoLoCo, algorithm
from noloco_node.simulate.settings import Settings, choice

LAYOUT = {"a": torch.Size((20, 30)), "b": torch.Size((40,))}
SIZE = 640
NOBODY = frozenset[frozenset[int]]()


def settings(attack: str, attackers: int = 1, **changed: object) -> Settings:
    plain = {"codec": "fp32", "overlap": "blocking", "replicas": 4, "defences": False}
    return Settings(**{**plain, "attack": attack, "attackers": attackers, **changed})  # type: ignore[arg-type]


def rule(given: Settings, evaluate=None) -> NoLoCo:
    made = algorithm(choice("noloco:keep_norm=0"), given, LAYOUT, evaluate)
    assert isinstance(made, NoLoCo)
    return made


def swarm(replicas: int = 4) -> Outer:
    """One weight vector; a phase has moved each replica its own way, by 1 of 25."""
    chance = torch.Generator().manual_seed(0)
    outer = Outer.start(torch.randn(SIZE, generator=chance).repeat(replicas, 1))
    train(outer, chance)
    return outer


def train(outer: Outer, chance: torch.Generator) -> None:
    outer.theta += 0.04 * torch.randn(outer.theta.shape, generator=chance)


def alone(outer: Outer) -> Outer:
    """After a boundary without partners."""
    made = Outer(outer.theta.clone(), outer.phi.clone(), outer.delta.clone())
    local_step(made.theta, made.phi, made.delta, rule(settings("", 0))._hyper)
    return made


def pushed(outer: Outer, before: Outer) -> list[float]:
    """How far corrections moved each replica, in units of what a phase moves it."""
    return [float(row.norm()) / (0.04 * SIZE**0.5) for row in outer.phi - before.phi]


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("scale", lambda u: 10 * u[3]),
        ("sign-flip", lambda u: -u[3]),
        ("capture", lambda u: u[1]),
        ("nan", lambda u: u[3]),
    ],
)
def test_what_is_offered_instead_of_u(attack, expected):
    u = torch.randn(4, SIZE)
    attackers = Attackers(settings(attack), [SIZE])
    torch.testing.assert_close(attackers.offered(u, 3, 1, 1.0), expected(u))
    assert torch.equal(attackers.offered(u, 1, 3, 1.0), u[1]), "an honest replica offers its own"


def test_noise_is_as_long_as_u_and_stale_stays_the_first():
    first, later = torch.randn(2, 4, SIZE)
    noise = Attackers(settings("noise"), [SIZE]).offered(first, 3, 1, 1.0)
    torch.testing.assert_close(noise.norm(), first[3].norm())
    stale = Attackers(settings("stale"), [SIZE])
    stale.offered(first, 3, 1, 1.0)
    assert torch.equal(stale.offered(later, 3, 2, 1.0), first[3])


def test_creep_pulls_back_as_far_as_it_may():
    first, later = torch.randn(2, 4, SIZE)
    attackers = Attackers(settings("creep"), [SIZE])
    attackers.offered(first, 3, 1, 1.0)
    c = (attackers.offered(later, 3, 1, 0.5) - later[1]) / 2
    assert float(c.norm()) == pytest.approx(0.5)
    assert float(c @ (first[3] - later[1])) > 0


@pytest.mark.parametrize("defences", [False, True])
def test_colluders_push_to_one_model_and_no_further_than_the_bounds_allow(defences):
    u = torch.randn(5, SIZE)
    attackers = Attackers(settings("collude", 2, replicas=5, defences=defences), [600, 40])
    ends = [attackers.offered(u, row, 1, 0.5) for row in (3, 4)]
    assert torch.equal(*ends)
    if defences:
        assert float((ends[0] - u[1]).norm()) == pytest.approx(1.0)
    else:
        assert torch.equal(ends[0][:600].sort().values, u[3, :600].sort().values)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "lattice:4"])
def test_nan_is_refused_and_moves_nobody(codec):
    outer = swarm()
    before = alone(outer)
    swapping = rule(settings("nan", codec=codec))
    swapping.boundary(outer)
    assert swapping.failed == 1
    assert sorted(move > 0 for move in pushed(outer, before)[:3]) == [False, True, True]
    assert outer.theta.isfinite().all()


@pytest.mark.parametrize("attack", ["sign-flip", "scale", "noise"])
def test_without_defences_one_swap_ruins_a_replica_and_with_them_it_is_refused(attack):
    for defences in (False, True):
        outer = swarm()
        before = alone(outer)
        swapping = rule(settings(attack, defences=defences))
        swapping.boundary(outer)
        assert (max(pushed(outer, before)[:3]) > 10) != defences
        assert swapping.failed == defences


@pytest.mark.parametrize("attack", ["creep", "collude"])
def test_what_stays_inside_the_bounds_moves_a_replica_no_further_than_they_say(attack):
    outer = swarm()
    before = alone(outer)
    rule(settings(attack, defences=True)).boundary(outer)
    assert max(pushed(outer, before)[:3]) < 1.05 * LONGEST


def test_what_makes_a_replica_worse_is_taken_back():
    outer = swarm(3)
    before = alone(outer)
    # before the training, at the boundary, without it, with it, of what the attacker sent
    loss = iter([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    swapping = rule(settings("creep", replicas=3, defences=True), lambda theta: next(loss))
    swapping._attackers.pairs = lambda *args: [(2, 0)]  # type: ignore[method-assign]
    swapping.boundary(outer)
    assert swapping.taken_back == 1
    for name in ("theta", "phi", "delta"):
        torch.testing.assert_close(getattr(outer, name)[:2], getattr(before, name)[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["noloco", "noloco:keep_norm=0"])
def test_a_late_correction_is_judged_and_taken_back_as_a_whole_when_its_last_slice_is_there(text):
    outer, asked = swarm(2), []
    before = alone(outer)
    losses = iter([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 1.0])

    def evaluate(theta):
        asked.append(theta.clone())
        return next(losses)

    given = settings("", 0, replicas=2, defences=True, overlap="delay=3")
    swapping = algorithm(choice(text), given, LAYOUT, evaluate)
    swapping._attackers.pairs = lambda *args: [(0, 1)]
    swapping.boundary(outer)
    for step in (1, 2):
        swapping.between(outer, step)
        assert len(asked) == 4, "only the beginning and the boundary asked"
    swapping.between(outer, 3)
    assert swapping.taken_back == 1
    without, with_it, theirs = asked[4:7]
    torch.testing.assert_close(without, before.theta[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs, 2 * with_it - without, rtol=1e-5, atol=1e-6)
    for name in ("theta", "phi", "delta"):
        torch.testing.assert_close(getattr(outer, name)[0], getattr(before, name)[0], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(getattr(outer, name)[1], getattr(before, name)[1], atol=1e-3)


def met(given: Settings, rounds: int) -> list[Counter[int]]:
    """Of each honest replica: how many of its rounds went to whom, and to -1 where it swapped with nobody."""
    attackers, watching, chance = Attackers(given, [SIZE]), guards(given, SIZE), random.Random(1)
    partners = [Counter[int]() for _ in range(given.honest)]
    for _ in range(rounds):
        for guard in watching.values():
            guard.boundary(torch.ones(3), torch.ones(3))
        pairs = attackers.pairs(chance, NOBODY, watching)
        of = {i: j for pair in pairs for i, j in (pair, pair[::-1])}
        for row, count in enumerate(partners):
            count[of.get(row, -1)] += 1
            if row in watching and row in of:
                watching[row].swapped(of[row])
    return partners


def test_a_captor_takes_every_round_or_little_more_than_its_share():
    assert all(count == {7: 40} for count in met(settings("capture", replicas=8), 40))
    shared = met(settings("capture", replicas=8, defences=True), 40)
    assert all(count[7] <= 2 * 40 / 7 and count[-1] <= 10 for count in shared)


def test_a_held_swap_costs_rounds_and_with_the_defences_few():
    lost = [
        sum(count[-1] for count in met(settings("hold", replicas=8, defences=defences), 40)) / (7 * 40)
        for defences in (False, True)
    ]
    assert lost[0] > 0.5
    assert lost[1] < 0.2


def test_a_matching_of_those_who_let_each_other_be():
    order = list(range(6))
    pairs = _first_allowed(order, lambda i, j: {i, j} != {0, 1} and 5 not in (i, j))
    assert pairs == [(0, 2), (1, 3)]


def test_an_honest_swarm_is_the_same_with_defences_and_without_while_nothing_is_unusual():
    ends = []
    for defences in (False, True):
        outer, swapping, chance = swarm(8), rule(settings("", 0, replicas=8, defences=defences)), torch.Generator()
        for _ in range(4):
            swapping.boundary(outer)
            train(outer, chance)
        assert (swapping.failed, swapping.scaled) == (0, 0)
        ends.append(outer.theta)
    assert torch.equal(*ends)
