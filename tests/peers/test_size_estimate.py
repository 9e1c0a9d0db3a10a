"""Peers with estimates of their own find each other, and a small part of a split run finds the large one."""

from collections import Counter, defaultdict
from random import Random
from statistics import median

import pytest

from noloco_node.peers.size_estimate import BUCKET, MAX_DEPTH, SizeEstimate

TTL = 12
"""The lifetime of a record in turns, each of which is a read every 5 s."""
REFRESH = 4


class Swarm:
    """Peers with one board in place of the DHT; the `bits` of each are drawn as a hash would be."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = Random(seed)
        self.estimates: dict[int, SizeEstimate] = {}
        self.bits: dict[int, str] = {}
        self.board: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        """Bucket -> peer -> (its estimate, until which turn)."""
        self.turn = 0
        self.operations: Counter[int] = Counter()
        self.fetched: Counter[str] = Counter()
        """Records that readers got of each bucket."""

    def join(self, peers: int) -> list[int]:
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
        there = {p: estimate for p, (estimate, until) in self.board[bucket].items() if until >= self.turn and p != peer}
        self.fetched[bucket] += len(there)
        self.estimates[peer].found(depth, len(there) + (self.bits[peer][:depth] == bucket), list(there.values()))
        self.operations[peer] += 1
        return set(there)


@pytest.mark.parametrize("peers", [1, 2, 24, 64, 300, 1000])
def test_all_estimate_how_many_they_are(peers: int) -> None:
    swarm = Swarm()
    swarm.join(peers)
    swarm.live(40)
    guesses = [estimate.peers for estimate in swarm.estimates.values()]
    assert 0.8 * peers <= median(guesses) <= 1.25 * peers
    assert max(guesses) <= 2 * peers and min(guesses) >= peers / 2


def test_a_nodes_work_does_not_grow_with_the_number_of_peers() -> None:
    done = []
    for peers in (8, 64, 300):
        swarm = Swarm()
        swarm.join(peers)
        swarm.live(24)
        swarm.operations.clear()
        swarm.live(48)
        done.append(swarm.operations.total() / peers / 48)
    assert max(done) <= 1 + 3 / REFRESH
    assert max(done) < 1.2 * min(done)


def test_what_a_node_of_the_dht_sends_of_a_bucket_does_not_grow_with_the_number_of_peers() -> None:
    """Of depth 0 least: all peers share that bucket."""
    for peers in (64, 300, 1000):
        swarm = Swarm()
        swarm.join(peers)
        swarm.live(24)
        swarm.fetched.clear()
        swarm.live(24)
        assert 0 < swarm.fetched[""] / 24 <= 4 * BUCKET * BUCKET
        assert max(swarm.fetched.values()) / 24 <= 4 * BUCKET * BUCKET


@pytest.mark.parametrize("peers", [40, 300])
def test_readers_find_all_peers(peers: int) -> None:
    swarm = Swarm()
    swarm.join(peers)
    swarm.live(40)
    found = set().union(*(swarm.look(0) for _ in range(1000)))
    assert len(found) == peers - 1


def test_a_joining_node_learns_the_size_of_a_large_run_at_once() -> None:
    swarm = Swarm()
    swarm.join(1000)
    swarm.live(40)
    (joining,) = swarm.join(1)
    swarm.live(2)
    assert 500 <= swarm.estimates[joining].peers <= 2000


def test_a_small_part_of_a_split_run_finds_the_large_one() -> None:
    swarm = Swarm()
    few = swarm.join(8)
    swarm.live(20)
    many = swarm.join(300)
    board, swarm.board = swarm.board, defaultdict(dict)  # the many have another DHT
    estimates, swarm.estimates = swarm.estimates, {p: c for p, c in swarm.estimates.items() if p in many}
    swarm.live(40)
    for bucket, there in board.items():
        swarm.board[bucket] |= there
    swarm.estimates = estimates
    swarm.live(30)
    assert all(swarm.estimates[peer].peers >= 150 for peer in few)
    assert set().union(*(swarm.look(300) for _ in range(500))) >= set(few)


def test_the_few_that_are_left_of_a_large_run_find_each_other() -> None:
    swarm = Swarm()
    peers = swarm.join(300)
    swarm.live(30)
    swarm.leave(peers[6:])
    swarm.live(60)
    assert all(estimate.peers <= BUCKET for estimate in swarm.estimates.values())
    assert swarm.look(0) == set(peers[1:6])


def test_what_peers_say_is_not_believed_where_its_check_was_refused() -> None:
    estimate = SizeEstimate(Random(1))
    estimate.found(0, 12, [10**6] * 11)
    assert estimate.read_depth() > 10
    estimate.found(15, 0, [], whole=False)
    assert estimate.known and estimate.peers == 12


def test_a_few_exaggerated_estimates_change_nothing() -> None:
    estimate = SizeEstimate(Random(1))
    for _ in range(20):
        estimate.found(0, 12, [10**9] * 5 + [12] * 6)
    assert estimate.peers == 12
    assert max(estimate.write_depths()) == 1


@pytest.mark.parametrize("said", [100, 10**4, 10**9])
def test_many_exaggerated_estimates_send_nobody_to_empty_buckets(said: int) -> None:
    swarm = Swarm()
    honest = swarm.join(4)
    swarm.live(20)
    for _ in range(100):
        for liar in range(100, 112):
            swarm.board[""][liar] = (said, swarm.turn + TTL)
        swarm.live(1)
    assert all(estimate.peers <= 2 * (4 + 12) for estimate in swarm.estimates.values())
    (newcomer,) = swarm.join(1)
    swarm.live(4)
    assert set().union(*(swarm.look(newcomer) for _ in range(10))) >= set(honest)
