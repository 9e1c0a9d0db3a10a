"""What nodes that each hold a stage come to by the formulas, beside micro-batches that really queue up."""

import heapq
from collections import deque
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.simulate.network import Chain, Cost, Network, stage_rows


class Queues:
    """Nodes and links that do one thing after the other. A node's forward pass comes before what waits there."""

    def __init__(self, forward, chain):
        self.forward, self.chain, self.last = forward, chain, len(forward) - 1
        self.now, self.events, self.order = 0.0, [], count()
        self.waiting, self.busy, self.back = {}, set(), []

    def rate(self, in_flight, micro_batches=120):
        for _ in range(in_flight):
            self.go(0)
        while len(self.back) < micro_batches:
            self.now, _, then = heapq.heappop(self.events)
            then()
        early = micro_batches // 4  # until then they may still bunch up
        return (micro_batches - 1 - early) / (self.back[-1] - self.back[early])

    def later(self, seconds, then):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), then))

    def use(self, what, seconds, then, first=False):
        queue = self.waiting.setdefault(what, deque())
        (queue.appendleft if first else queue.append)((seconds, then))
        self.serve(what)

    def serve(self, what):
        if what in self.busy or not self.waiting[what]:
            return
        self.busy.add(what)
        seconds, then = self.waiting[what].popleft()

        def done():
            self.busy.remove(what)
            then()
            self.serve(what)

        self.later(seconds, done)

    def send(self, stage, then):
        self.use(("link", stage), self.chain.transfer_s, lambda: self.later(self.chain.latency_s, then))

    def go(self, stage):
        if stage == self.last:
            self.use(stage, self.chain.compute_s[stage], lambda: self.send(stage, lambda: self.come_back(stage - 1)))
        else:
            self.use(stage, self.forward[stage], lambda: self.send(stage, lambda: self.go(stage + 1)), first=True)

    def come_back(self, stage):
        def returned():
            if stage:
                self.send(stage, lambda: self.come_back(stage - 1))
            else:
                self.back.append(self.now)
                self.go(0)

        self.use(stage, self.chain.compute_s[stage] - self.forward[stage], returned)


seconds = st.floats(0.2, 3)


@settings(max_examples=40, deadline=None)
@given(
    forward=st.lists(seconds, min_size=2, max_size=4),
    transfer=st.sampled_from([0.0, 0.3, 1, 4]),
    latency=st.sampled_from([0.0, 0.3, 1, 4]),
    in_flight=st.sampled_from([1, 2, 4, 8]),
)
def test_micro_batches_that_queue_up_come_as_often_as_the_bounds_say(forward, transfer, latency, in_flight):
    chain = Chain((*[4 * f for f in forward[:-1]], 3 * forward[-1]), transfer, latency)
    ratio = Queues(forward, chain).rate(in_flight) / chain.rate(in_flight)
    assert ratio <= 1.03, "bounds are bounds"
    assert ratio >= (0.97 if in_flight == 1 or len(forward) == 2 else 0.7)


def test_a_link_that_is_as_fast_as_needed_is_not_what_others_wait_for():
    cost = Cost(2048, 1.2e9, 65e6)
    (row,) = stage_rows({"1b": cost}, Network(0.0, bandwidth_bytes_s=1e6), 2, [20], {"bf16": lambda w: 2 * w}, 4096)
    needed = row.needed_mbit_s * 1e6 / 8
    chain = Chain(cost.compute_s(2, 4096, 20e12), 4096 * 4096 / needed, 0.0)
    assert chain.transfer_s == pytest.approx(max(chain.compute_s))
    assert chain.busy(100) == pytest.approx(sum(chain.compute_s) / 2 / max(chain.compute_s))
    assert row.busy[8] < 0.1
