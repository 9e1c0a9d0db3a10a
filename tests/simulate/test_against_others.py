"""NoLoCo and the rivals against figures that came out of other people's code. That code is not here, only its results.

- pytorch/torchft 73dafea: the six files test_fixtures/torchft.diloco_regression_test.*.test_diloco_mocked_updates_*.
- gensyn-ai/noloco a1b4a42, src/noloco/sparse_optimizer_c.py: run once by four processes with gloo on loopback. Its
  inner optimizer was replaced by the movements below.
- exo-explore/gym 9fa323c, FedAvgStrategy and DiLoCoStrategy of exogym/strategy/: run once by four processes with gloo
  on loopback, called as its trainer does. It communicates after its third step, then after every second one. For DiLoCo
  its first process's weights were copied from the outer optimizer's: on a CPU it trains these themselves, so that from
  its second outer step on the outer gradient is 0. On a GPU it copies them.
"""

import random

import pytest
import torch

from noloco_node.simulate.baselines import DiLoCo, Outer, PaperNoLoCo, Streaming
from noloco_node.simulate.noloco import NoLoCo, algorithm
from noloco_node.simulate.settings import Choice, Settings, choice

START = torch.tensor([1.0, -2.0, 0.5])


class Drawn(random.Random):
    """Draws the replicas in this order, so that neighbours are partners."""

    def __init__(self, pairs):
        super().__init__(0)
        self._order = [replica for pair in pairs for replica in pair]

    def sample(self, population, k, *, counts=None):
        return self._order


def one_vector_form(text, pairs):
    settings = Settings(replicas=4, codec="fp32", overlap="blocking", defences=False)
    rule = algorithm(choice(text), settings, {"w": torch.Size([3])})
    assert isinstance(rule, NoLoCo)
    rule._chance = Drawn(pairs)
    return rule


# ---- torchft: streaming DiLoCo ----
PLAIN = [1.0 - 2 * step for step in range(16)]
TORCHFT = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        {3: (-11, 1), 6: (-11, -23), 9: (-35, -23), 12: (-35, -47)},
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        {3: (-11, 1), 6: (-11, -23), 9: (-29, -23), 12: (-29, -35)},
    ),
    (0, 1.0): (PLAIN, PLAIN, {3: (-11, 1), 6: (-11, -23), 9: (-23, -23), 12: (-23, -23)}),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        {3: (-7, 1), 6: (-7, -19), 9: (-27, -19), 12: (-27, -39)},
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        {3: (-7, 1), 6: (-7, -19), 9: (-25, -19), 12: (-25, -31)},
    ),
    (1, 1.0): (PLAIN, PLAIN, {3: (-7, 1), 6: (-7, -19), 9: (-23, -19), 12: (-23, -23)}),
}
"""(delay, share of its own weights that a replica keeps) -> the weights of two fragments of one element after each
step, and the slow weights of both. Two replicas, phases of 6 steps, inner steps of -2, a plain outer step of rate 2."""


@pytest.mark.parametrize(("delay", "own"), TORCHFT)
def test_streaming_is_torchfts(delay, own):
    first, second, slow = TORCHFT[delay, own]
    outer = Outer.start(torch.ones(2, 2))
    rule = Streaming(Choice("streaming", alpha=0, beta=2, fragments=2, own=own), 6, delay, width=4)
    for step in range(1, 16):
        outer.theta -= 2
        rule.between(outer, (step - 1) % 6 + 1)
        assert outer.theta.tolist() == [[first[step], second[step]]] * 2
        if step in slow:
            assert outer.phi.tolist() == [list(slow[step])] * 2


# ---- gensyn-ai/noloco: the paper's authors ----
GENSYN = (
    (
        [(3, 0), (2, 1)],
        [[1.4375, -2.175, 0.10625], [1.5125, -2.325, 0.14375], [1.5875, -2.475, 0.18125], [1.6625, -2.625, 0.21875]],
        [[0.4375, -0.175, -0.39375], [0.2625, 0.175, -0.48125], [0.0875, 0.525, -0.56875], [-0.0875, 0.875, -0.65625]],
    ),
    (
        [(3, 1), (2, 0)],
        [
            [1.63875, -2.5075, 0.145625],
            [1.59125, -2.5525, 0.244375],
            [1.50875, -2.2475, 0.080625],
            [1.46125, -2.2925, 0.179375],
        ],
        [
            [0.20125, -0.3325, 0.039375],
            [0.07875, -0.2275, 0.100625],
            [-0.07875, 0.2275, -0.100625],
            [-0.20125, 0.3325, -0.039375],
        ],
    ),
    (
        [(3, 1), (0, 2)],
        [
            [1.833875, -2.3027494, -0.2774375],
            [1.795125, -2.1552501, -0.3580625],
            [1.654875, -1.9447495, -0.3669375],
            [1.616125, -1.7972500, -0.4475625],
        ],
        [
            [0.195125, 0.2047502, -0.4230625],
            [0.203875, 0.3972499, -0.6024375],
            [0.146125, 0.3027502, -0.4475625],
            [0.154875, 0.4952500, -0.6269375],
        ],
    ),
)
"""Who met, and all replicas' weights and momenta after that: momentum 0.5, outer rate 0.7, groups of two."""


@pytest.mark.parametrize("form", ["the paper's", "one vector"])
def test_an_outer_step_is_that_of_the_papers_authors(form):
    """Their code has one rate for both: γ = β."""
    replicas = torch.arange(4.0)[:, None]
    outer = Outer.start(START * (1 + replicas / 4))
    for moves, (pairs, weights, momenta) in zip((1, -0.5, 1), GENSYN, strict=True):
        outer.theta += torch.tensor([0.1, 0.2, -0.3]) * (replicas + 1) * moves
        if form == "one vector":
            one_vector_form("noloco:alpha=0.5:beta=0.7:gamma=0.7:keep_norm=0", pairs).boundary(outer)
        else:
            PaperNoLoCo(0.5, 0.7, 0.7, 4, Drawn(pairs)).boundary(outer)
        torch.testing.assert_close(outer.theta, torch.tensor(weights), rtol=0, atol=2e-6)
        torch.testing.assert_close(outer.delta, torch.tensor(momenta), rtol=0, atol=2e-6)
        assert torch.equal(outer.theta, outer.phi)


# ---- EXO Gym: federated averaging in islands, and DiLoCo ----
ISLANDS = {3: [(0, 3), (1, 2)], 5: [(0, 2), (1, 3)], 7: [(0, 2), (1, 3)], 9: [(0, 1), (2, 3)]}
FEDAVG = (
    [1.0, 1.0, 1.4065, 1.36585, 1.5192651, 1.4673386, 1.6106048, 1.5495443, 1.7288694],
    [1.1, 1.19, 1.4065, 1.46585, 1.709265, 1.7383385, 1.9545047, 1.9590542, 1.7288694],
    [1.2, 1.38, 1.4065, 1.56585, 1.5192651, 1.6673386, 1.6106048, 1.7495443, 2.1088693],
    [1.3, 1.57, 1.4065, 1.66585, 1.709265, 1.9383385, 1.9545047, 2.1590543, 2.1088693],
)
DILOCO = (
    [1.0, 1.0, 1.540645, 1.4865805, 2.0135596, 1.9122037, 2.4472713, 2.3025441, 2.7927094],
    [1.1, 1.19, 1.540645, 1.5865805, 2.0135596, 2.0122037, 2.4472713, 2.4025443, 2.7927094],
    [1.2, 1.38, 1.540645, 1.6865805, 2.0135596, 2.1122036, 2.4472713, 2.5025442, 2.7927094],
    [1.3, 1.57, 1.540645, 1.7865804, 2.0135596, 2.2122037, 2.4472713, 2.6025443, 2.7927094],
)
DILOCO_ENDS = [2.7927094, 0.3902791, -3.0854189]
"""The first of three weights of each replica r after each step of gradient descent of rate 0.1; the loss is
‖w − (r + 1) (1, 0, −1)‖²/2. DiLoCo has momentum 0.9 and outer rate 0.7; all its replicas end at DILOCO_ENDS."""


def descend(rules):
    """Yields the step's number and the outer state after it. `rules`: the algorithm of each boundary."""
    outer = Outer.start(START.repeat(4, 1))
    targets = torch.tensor([1.0, 0.0, -1.0]) * torch.arange(1.0, 5)[:, None]
    for step in range(1, 10):
        outer.theta -= 0.1 * (outer.theta - targets)
        if step in rules:
            rules[step].boundary(outer)
        yield step, outer


def test_noloco_without_momentum_is_exo_gyms_federated_averaging_in_islands_of_two():
    plain = "noloco:alpha=0:beta=1:gamma=1:keep_norm=0"
    for step, outer in descend({step: one_vector_form(plain, pairs) for step, pairs in ISLANDS.items()}):
        assert outer.theta[:, 0].tolist() == pytest.approx([row[step - 1] for row in FEDAVG], abs=2e-6)


def test_diloco_is_exo_gyms():
    rule = DiLoCo(0.9, 0.7, width=4)
    for step, outer in descend(dict.fromkeys(ISLANDS, rule)):
        assert outer.theta[:, 0].tolist() == pytest.approx([row[step - 1] for row in DILOCO], abs=2e-6)
    for row in outer.theta.tolist():
        assert row == pytest.approx(DILOCO_ENDS, abs=2e-6)
