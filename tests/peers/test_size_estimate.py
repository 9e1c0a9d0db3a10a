"""Where peers stand and look: with estimates of their own they find each other, and islands find the continent."""

from collections import Counter, defaultdict
from random import Random
from statistics import median

import pytest

from noloco_node.peers.size_estimate import BUCKET, MAX_DEPTH, SizeEstimate

TTL = 12
"""Turns that a record lives: a turn is a look every 5 s."""
REFRESH = 4


class Town:
    """Peers on one board; `bits` of each are drawn as a hash would be."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = Random(seed)
        self.estimates: dict[int, SizeEstimate] = {}
        self.bits: dict[int, str] = {}
        self.board: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        """Bucket -> peer -> (its estimate, until which turn)."""
        self.turn = 0
        self.operations: Counter[int] = Counter()

    def arrive(self, peers: int) -> list[int]:
        new = [len(self.estimates) + number for number in range(peers)]
        for peer in new:
            self.estimates[peer] = SizeEstimate(Random(self.rng.random()))
            self.bits[peer] = f"{self.rng.getrandbits(MAX_DEPTH + 1):0{MAX_DEPTH + 1}b}"
        return new

    def leave(self, peers: list[int]) -> None:
        for peer in peers:
            del self.estimates[peer]

    def live(self, turns: int) -> None:
        for _ in range(turns):
            self.turn += 1
            for peer, estimate in self.estimates.items():
                if (self.turn + peer) % REFRESH == 0 and estimate.known:
                    for depth in estimate.write_depths():
                        self.board[self.bits[peer][:depth]][peer] = (estimate.peers, self.turn + TTL)
                        self.operations[peer] += 1
                self.look(peer)

    def look(self, peer: int) -> set[int]:
        depth = self.estimates[peer].read_depth()
        bucket = f"{self.rng.getrandbits(depth):0{depth}b}" if depth else ""
        there = {p: said for p, (said, until) in self.board[bucket].items() if until >= self.turn and p != peer}
        self.estimates[peer].found(depth, len(there) + (self.bits[peer][:depth] == bucket), list(there.values()))
        self.operations[peer] += 1
        return set(there)


@pytest.mark.parametrize("peers", [1, 2, 24, 64, 300, 1000])
def test_everybody_learns_how_many_there_are(peers: int) -> None:
    town = Town()
    town.arrive(peers)
    town.live(40)
    guesses = [estimate.peers for estimate in town.estimates.values()]
    assert 0.8 * peers <= median(guesses) <= 1.25 * peers
    assert max(guesses) <= 2 * peers and min(guesses) >= peers / 2


def test_what_a_node_does_depends_on_no_number_of_peers() -> None:
    done = []
    for peers in (8, 64, 300):
        town = Town()
        town.arrive(peers)
        town.live(24)
        town.operations.clear()
        town.live(48)
        done.append(town.operations.total() / peers / 48)
    assert max(done) <= 1 + 3 / REFRESH
    assert max(done) < 1.2 * min(done)


@pytest.mark.parametrize("peers", [40, 300])
def test_readers_find_everybody(peers: int) -> None:
    town = Town()
    town.arrive(peers)
    town.live(40)
    found = set().union(*(town.look(0) for _ in range(1000)))
    assert len(found) == peers - 1


def test_one_that_comes_into_a_large_run_learns_its_size_at_once() -> None:
    town = Town()
    town.arrive(1000)
    town.live(40)
    (newcomer,) = town.arrive(1)
    town.live(2)
    assert 500 <= town.estimates[newcomer].peers <= 2000


def test_an_island_finds_the_continent() -> None:
    town = Town()
    islanders = town.arrive(8)
    town.live(20)
    continent = town.arrive(300)
    board, town.board = town.board, defaultdict(dict)  # the continent grows up elsewhere
    estimates, town.estimates = town.estimates, {p: c for p, c in town.estimates.items() if p in continent}
    town.live(40)
    for bucket, there in board.items():
        town.board[bucket] |= there
    town.estimates = estimates
    town.live(30)
    assert all(town.estimates[peer].peers >= 150 for peer in islanders)
    assert set().union(*(town.look(300) for _ in range(500))) >= set(islanders)


def test_a_run_that_shrinks_comes_together_again() -> None:
    town = Town()
    peers = town.arrive(300)
    town.live(30)
    town.leave(peers[6:])
    town.live(60)
    assert all(estimate.peers <= BUCKET for estimate in town.estimates.values())
    assert town.look(0) == set(peers[1:6])


def test_a_few_who_exaggerate_move_nobody() -> None:
    estimate = SizeEstimate(Random(1))
    for _ in range(20):
        estimate.found(0, 12, [10**9] * 5 + [12] * 6)
    assert estimate.peers == 12
    assert max(estimate.write_depths()) == 1
