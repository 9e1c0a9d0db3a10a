"""Virtual time against what can be worked out by hand, and the paper's claim about pairs."""

import math

import numpy as np
import pytest

from noloco_node.simulate.network import METHODS, Network, costs, stragglers

EVEN = Network(latency_s=1.0, sigma=0.0)


def seconds(network, n):
    return {row.method: row.sync_seconds for row in costs(network, [n], seed=1)}


def test_without_chance_every_method_takes_its_number_of_messages():
    depth_in_the_tree = [0, 1, 1, 2, 1, 2, 2, 3]
    assert seconds(EVEN, 8) == pytest.approx(
        {"pair": 1, "pair, blocking": 1, "ring": 14, "butterfly": 3, "server": (7 * 2 + 1) / 8}
        | {"tree": 3 + sum(depth_in_the_tree) / 8}
    )


def test_bandwidth_alone_gives_the_known_volumes():
    """One second a vector, no latency: a ring needs 2 (n − 1)/n, a server serves one after the other."""
    network = Network(latency_s=1e-9, sigma=0, bandwidth_bytes_s=1e6, vector_bytes=1e6)
    at = seconds(network, 8)
    assert at["pair"] == pytest.approx(1)
    assert at["ring"] == pytest.approx(2 * 7 / 8)
    assert at["butterfly"] == pytest.approx(3)
    assert at["server"] == pytest.approx(7 + (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7) / 8)


def test_bytes_a_node():
    sent = {row.method: row.bytes_per_node for row in costs(Network(vector_bytes=80), [8], seed=1)}
    assert sent == {"pair": 80, "pair, blocking": 80, "ring": 140, "tree": 140, "butterfly": 240, "server": 140}


def test_pairs_are_flat_and_everybody_together_grows_like_the_logarithm():
    small, large = seconds(Network(), 16), seconds(Network(), 1024)
    assert large["pair"] == pytest.approx(small["pair"], rel=0.05)
    advantage = {n: at["butterfly"] / at["pair"] for n, at in ((16, small), (1024, large))}
    assert 10 < advantage[1024] < 14
    assert advantage[1024] / advantage[16] == pytest.approx(math.log2(1024) / math.log2(16), rel=0.2)
    assert large["tree"] > large["butterfly"]


def test_a_pair_is_done_as_the_paper_has_it():
    """One message of median 1 takes exp(σ²/2) on average, the slower of two (1 + erf(σ/2)) times that."""
    sigma = 0.5
    times = METHODS["pair"](Network(sigma=sigma), 40_000, np.random.default_rng(1))
    assert times.mean() == pytest.approx(math.exp(sigma * sigma / 2), rel=0.02)
    slower = (1 + math.erf(sigma / 2)) * math.exp(sigma * sigma / 2)
    assert times.reshape(-1, 2).max(axis=1).mean() == pytest.approx(slower, rel=0.02)


def test_a_pair_is_the_butterfly_of_two():
    pair, butterfly = (METHODS[name](Network(), 2, np.random.default_rng(1)) for name in ("pair", "butterfly"))
    assert np.array_equal(pair, butterfly)


def test_who_blocks_idles_all_the_while_and_odd_sizes_have_no_butterfly():
    rows = {row.method: row for row in costs(Network(), [6], seed=1)}
    assert all(row.idle_seconds == row.sync_seconds > 0 for name, row in rows.items() if name != "pair")
    assert rows["pair, blocking"].sync_seconds == rows["pair"].sync_seconds
    assert "butterfly" not in rows


def test_a_barrier_waits_for_the_slowest_and_a_blocking_pair_for_less():
    waiting = {(row.method, row.n): row.idle_fraction for row in stragglers([2, 64], 0.3, 0.1, seed=1)}
    assert waiting["barrier", 64] > waiting["pair, blocking", 64] > waiting["barrier", 2] > 0
    assert all(row.idle_fraction == 0 for row in stragglers([8], 0, 0, seed=1))
