"""Statistics of pairing: how many rounds are committed, with how many partners, by how many calls. 64 nodes.

`pytest -s` shows the numbers.
"""

import asyncio
import random
from collections import Counter
from concurrent.futures import Future

import pytest
import virtual_nodes
from virtual_clock import run_virtual
from virtual_nodes import Offer, VirtualSwarm, done

from noloco_node.base.events import RoundCommitted
from noloco_node.core.codecs.codec import Payload
from noloco_node.core.partners import no_repeat

EQUAL = [10.0] * 64
MIXED = [1] * 22 + [2] * 21 + [4] * 21
"""How many times longer a step takes."""


def figures(swarm: VirtualSwarm) -> str:
    return f"{swarm.committed_share():.1%} of rounds committed, {swarm.calls_per_pair():.2f} calls a pair"


def test_equal_nodes_commit_with_many_partners_and_few_calls() -> None:
    swarm = VirtualSwarm(EQUAL)
    run_virtual(swarm.run(50))
    partners = [len({e.partner for e in n.committed}) for n in swarm.nodes]
    print(f"\nequal nodes: {figures(swarm)}, {min(partners)} to {max(partners)} partners in 50 rounds")  # noqa: T201
    assert swarm.committed_share() >= 0.95
    assert min(partners) >= 20
    assert swarm.calls_per_pair() < 1.8
    spread = max(max(n.x) for n in swarm.nodes) - min(min(n.x) for n in swarm.nodes)
    assert spread < 0.5, "without any all-reduce the swarm has come together"


@pytest.mark.parametrize(
    ("nodes", "rounds"), [(12, 200), pytest.param(64, 500, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_partners_are_uniform_in_the_long_run_and_do_not_come_again_soon(nodes: int, rounds: int) -> None:
    """Chi-square over the pairs. Its degrees of freedom are the pairs less one for each node, whose number of rounds
    is given; the limit is the 99.9% quantile by Wilson and Hilferty for independent draws. Where partners do not come
    again soon, pairs meet more evenly than by such draws: the sum is below its degrees of freedom."""
    swarm = VirtualSwarm([10.0] * nodes)
    run_virtual(swarm.run(rounds))
    names = [n.name for n in swarm.nodes]
    met = Counter(tuple(sorted((n.name, e.partner))) for n in swarm.nodes for e in n.committed if n.name < e.partner)
    pairs = [(a, b) for a in names for b in names if a < b]
    expected = sum(met.values()) / len(pairs)
    chi = sum((met[pair] - expected) ** 2 / expected for pair in pairs)
    freedom = len(pairs) - len(names)
    window = no_repeat(nodes)
    partners = [[e.partner for e in n.committed] for n in swarm.nodes]
    again = sum(peer in met[max(0, k - window) : k] for met in partners for k, peer in enumerate(met))
    share = again / sum(map(len, partners))
    print(  # noqa: T201
        f"\npartners of {nodes} over {rounds} rounds: chi-square {chi:.0f} of {freedom} degrees of freedom; "
        f"{share:.1%} met again within {window} rounds"
    )
    assert share < 0.01
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi < limit, f"{chi:.0f} for {freedom} degrees of freedom, of {expected:.0f} meetings a pair"


def test_speeds_one_two_four_by_time() -> None:
    swarm = VirtualSwarm(EQUAL, steps_s=[0.3 * slow for slow in MIXED])
    run_virtual(swarm.run(25))
    print(f"\nspeeds of 1:2:4, phases by time: {figures(swarm)}")  # noqa: T201
    assert swarm.committed_share() >= 0.9
    for slow in (1, 2, 4):
        nodes = [n for n, s in zip(swarm.nodes, MIXED, strict=True) if s == slow]
        assert sum(len(n.committed) for n in nodes) / sum(n.steps for n in nodes) >= 0.8
    assert swarm.calls_per_pair() < 2


@pytest.mark.slow
def test_speeds_one_two_four_by_steps() -> None:
    swarm = VirtualSwarm([10.0 * slow for slow in MIXED])
    run_virtual(swarm.run(25))
    share = {
        slow: sum(len(n.committed) for n, s in zip(swarm.nodes, MIXED, strict=True) if s == slow)
        / 25
        / MIXED.count(slow)
        for slow in (1, 2, 4)
    }
    rounds = ", ".join(f"{part:.0%} of those {slow} times as slow" for slow, part in share.items())
    print(f"\nspeeds of 1:2:4, phases by steps: {figures(swarm)}; committed {rounds}")  # noqa: T201
    assert swarm.committed_share() >= 0.6
    assert swarm.calls_per_pair() < 3


@pytest.mark.parametrize(
    ("nodes", "swaps", "rounds"),
    [
        pytest.param(256, 1, 8, marks=pytest.mark.slow),
        pytest.param(64, None, 8, marks=pytest.mark.slow),
        (20, None, 8),
    ],
)
def test_calls_stay_few_in_larger_swarms_and_with_further_partners(nodes: int, swaps: int | None, rounds: int) -> None:
    swarm = VirtualSwarm([10.0] * nodes, swaps=swaps)
    run_virtual(swarm.run(rounds))
    assert swarm.committed_share() >= 0.9
    assert swarm.calls_per_pair() < 3


@pytest.mark.slow
def test_lost_messages_and_a_tenth_that_vanishes() -> None:
    """A lost message silences its stream: 30 s until it is given up, which a phase must leave time for."""
    swarm = VirtualSwarm([600.0] * 64, loss=0.05)
    chance = random.Random(5)

    async def vanish() -> None:
        for node in chance.sample(swarm.nodes, 6):
            await asyncio.sleep(chance.uniform(0, 3000))
            swarm.vanish(node)

    run_virtual(swarm.run(25, vanish()))
    print(f"\n5% of messages lost, a tenth of the nodes gone: {figures(swarm)}")  # noqa: T201
    assert swarm.committed_share() >= 0.75


@pytest.mark.parametrize("swaps", [2, None])
def test_further_partners(swaps: int | None) -> None:
    swarm = VirtualSwarm([10.0] * 16, swaps=swaps)
    mean = sum(n.x[0] for n in swarm.nodes)
    run_virtual(swarm.run(15))
    assert swarm.committed_share() >= 0.9
    assert all(len(n.committed) + n.solo.total() == n.steps for n in swarm.nodes), "a round counts once"
    swaps_by_round = [Counter(e.round for e in n.events if isinstance(e, RoundCommitted)) for n in swarm.nodes]
    assert max(max(rounds.values()) for rounds in swaps_by_round) >= 2
    if swaps:
        assert max(max(rounds.values()) for rounds in swaps_by_round) == swaps
    more = sum(isinstance(e, RoundCommitted) for n in swarm.nodes for e in n.events)
    assert more >= 1.5 * sum(len(n.committed) for n in swarm.nodes)
    assert sum(n.x[0] for n in swarm.nodes) == pytest.approx(mean, abs=1e-12), "what one gains, the other gives"


class Shortened(Offer):
    """The first node's own bounds leave an eighth of each correction."""

    def receive(self, index: int, payload: Payload) -> "Future[float]":
        super().receive(index, payload)
        return done(0.125 if self.node.name == "n000" else 1.0)


def test_a_committed_round_says_what_the_nodes_own_bounds_left_and_not_its_partners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(virtual_nodes, "Offer", Shortened)
    swarm = VirtualSwarm([10.0, 10.0])
    run_virtual(swarm.run(6))
    slow, other = swarm.nodes
    assert slow.name == "n000"
    assert slow.committed and {e.allowed for e in slow.committed} == {0.125}
    assert {e.allowed for e in other.committed} == {1.0}
