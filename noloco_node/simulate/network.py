"""How long a synchronisation takes, by method and number of nodes, in virtual time. No training, no tensors.

A message takes a log-normal time, as in the NoLoCo paper (arXiv 2506.10911), plus its bytes over the bandwidth of one
link. Without a bandwidth the log-normal time includes the transfer, as in the paper. Every node sends and receives at
once. The methods, each in its most favourable form:

    pair        two partners send each other their vector; a node is done when it has its partner's
    ring        2 (n − 1) steps around a ring, each with 1/n of the vector
    tree        binomial: reduce up to one node, broadcast down, 2 log2 n messages deep
    butterfly   recursive doubling: log2 n such exchanges of the whole vector (powers of two only)
    server      all send to one node and it answers; it has one link like the others

A pair is the butterfly of two nodes. The butterfly takes somewhat more than log2 n times as long, as each exchange
begins when the later of the two has ended the one before.

That a pair which trains on meanwhile loses no accelerator time is assumed here: its round would at worst be solo.
Real nodes measure it (tests/system/test_slow_link.py).

`Chain` is about another need: of stages of one model, one node each, between which micro-batches travel.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

_DRAWS = 8192
"""At least so many nodes are simulated for each row: small swarms are repeated until their mean is precise."""
_STRAGGLER_ROUNDS = 50
IN_FLIGHT = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Network:
    latency_s: float = 1.0
    """Median time of a message."""
    sigma: float = 0.5
    """Of its logarithm: 0.5 makes one message in 20 take more than 2.3 times the median."""
    bandwidth_bytes_s: float = math.inf
    """Of one link, either way."""
    vector_bytes: float = 250e6
    """What a node sends in one synchronisation: 125 M parameters in bf16."""

    def messages(self, chance: np.random.Generator, count: int, share: float = 1.0) -> Times:
        """How long each of `count` messages takes, with this share of the vector."""
        return self.latency_s * chance.lognormal(0, self.sigma, count) + self.transfer_s(share)

    def transfer_s(self, share: float = 1.0) -> float:
        return self.vector_bytes * share / self.bandwidth_bytes_s


@dataclass(frozen=True, slots=True)
class NetworkRow:
    method: str
    n: int
    sync_seconds: float
    """From the start until a node has what it waits for; mean over nodes."""
    idle_seconds: float
    """How long its accelerator is idle meanwhile: all that time, but 0 for the pair that trains on."""
    bytes_per_node: float
    """Sent, mean over nodes."""


@dataclass(frozen=True, slots=True)
class Straggling:
    method: str
    n: int
    idle_fraction: float
    """Of all accelerator time, spent waiting for slower nodes."""


def costs(network: Network, sizes: Sequence[int], seed: int) -> list[NetworkRow]:
    chance = np.random.default_rng(seed)
    return [row for n in sizes for row in _costs_at(network, n, chance)]


def _costs_at(network: Network, n: int, chance: np.random.Generator) -> list[NetworkRow]:
    rows = []
    for method, finish in METHODS.items():
        if method == "butterfly" and n & (n - 1):
            continue
        seconds = float(np.mean([finish(network, n, chance).mean() for _ in range(max(1, _DRAWS // n))]))
        sent = network.vector_bytes * _vectors_sent(method, n)
        if method == "pair":
            rows.append(NetworkRow("pair", n, seconds, 0.0, sent))  # assumed: training goes on meanwhile
        rows.append(NetworkRow("pair, blocking" if method == "pair" else method, n, seconds, seconds, sent))
    return rows


def _vectors_sent(method: str, n: int) -> float:
    everybody = 2 * (n - 1) / n
    return {"pair": 1.0, "ring": everybody, "tree": everybody, "butterfly": math.log2(n), "server": everybody}[method]


def _pair(network: Network, n: int, chance: np.random.Generator) -> Times:
    return network.messages(chance, n)


def _ring(network: Network, n: int, chance: np.random.Generator) -> Times:
    times = np.zeros(n)
    for _ in range(2 * (n - 1)):
        times = np.maximum(times, np.roll(times, 1) + network.messages(chance, n, 1 / n))
    return times


def _tree(network: Network, n: int, chance: np.random.Generator) -> Times:
    times = np.zeros(n)
    strides = [1 << k for k in range((n - 1).bit_length())]
    for stride in strides:
        children = np.arange(stride, n, 2 * stride)
        parents = children - stride
        times[parents] = np.maximum(times[parents], times[children] + network.messages(chance, len(children)))
    for stride in reversed(strides):
        children = np.arange(stride, n, 2 * stride)
        parents = children - stride
        times[children] = times[parents] + network.messages(chance, len(children))
        times[parents] += network.transfer_s()  # its link is taken until the next child's turn
    return times


def _butterfly(network: Network, n: int, chance: np.random.Generator) -> Times:
    times = np.zeros(n)
    for level in range((n - 1).bit_length()):
        times = np.maximum(times, times[np.arange(n) ^ (1 << level)] + network.messages(chance, n))
    return times


def _server(network: Network, n: int, chance: np.random.Generator) -> Times:
    others = n - 1
    arrived = np.sort(network.messages(chance, others) - network.transfer_s())
    queued = arrived - np.arange(others) * network.transfer_s()  # when the queue begins to be busy without a break
    complete = queued.max() + others * network.transfer_s()
    answers = complete + network.messages(chance, others) + np.arange(others) * network.transfer_s()
    return np.append(answers, complete)


METHODS: dict[str, Callable[[Network, int, np.random.Generator], Times]] = {
    "pair": _pair,
    "ring": _ring,
    "tree": _tree,
    "butterfly": _butterfly,
    "server": _server,
}


def stragglers(sizes: Sequence[int], spread: float, jitter: float, seed: int) -> list[Straggling]:
    """Phases of so many steps on machines of log-normal speed: sigma `spread` between machines, `jitter` between its
    phases. Exchanges take no time here: only the waiting counts.

    A pair that blocks waits for one partner, but that partner has waited for others before: in the long run a slow
    machine delays all. A pair that trains on waits for nobody, by definition: it has no row.
    """
    chance = np.random.default_rng(seed)
    rows = []
    for n in sizes:
        swarms = [
            chance.lognormal(0, spread, n) * chance.lognormal(0, jitter, (_STRAGGLER_ROUNDS, n))
            for _ in range(max(4, 512 // n))
        ]
        for method, join in (("barrier", lambda times, _: np.full_like(times, times.max())), ("pair, blocking", _meet)):
            rows.append(Straggling(method, n, float(np.mean([_waited(phases, join, chance) for phases in swarms]))))
    return rows


def _waited(phases: Times, join: Callable[[Times, np.random.Generator], Times], chance: np.random.Generator) -> float:
    times = np.zeros(phases.shape[1])
    for phase in phases:
        times = join(times + phase, chance)
    return 1 - float(phases.sum() / times.sum())


def _meet(times: Times, chance: np.random.Generator) -> Times:
    order = chance.permutation(len(times))
    first, second = order[: len(order) // 2], order[len(order) // 2 : len(order) // 2 * 2]
    times = times.copy()
    times[first] = times[second] = np.maximum(times[first], times[second])
    return times


# ---- stages ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cost:
    """What a causal model needs between its stages, and from those who compute them."""

    width: int
    layers: float
    """Parameters of all layers,"""
    head: float
    """and of the head, which is the last stage's. An embedding is looked up and computes nothing."""

    def compute_s(self, stages: int, tokens: int, flops: float) -> tuple[float, ...]:
        """Of each stage, for a micro-batch of so many tokens; `flops`: of a node in a second. Attention's own products
        are left out."""
        forward = 2 * tokens * self.layers / stages / flops
        return (*[4 * forward] * (stages - 1), 3 * (forward + 2 * tokens * self.head / flops))


@dataclass(frozen=True, slots=True)
class Chain:
    """A node for each stage. Seconds are of one micro-batch.

    Forward keeps no graph and backward computes forward again, but in the last stage, which computes once. `rate` is
    the lower of two bounds: what comes back in time, and what the busiest node or link does. Two stages reach it; where
    there are more, micro-batches wait for each other: up to 26% with 2 or 4 in flight, 15% with 8.
    """

    compute_s: tuple[float, ...]
    """Of each stage, forward and back."""
    transfer_s: float
    """Of activations over one link; of the gradients at them as long."""
    latency_s: float
    """One way."""

    @property
    def sent(self) -> int:
        """What the busiest link carries of a micro-batch: a node between two others sends activations to one of them,
        and gradients to the other."""
        return 1 if len(self.compute_s) == 2 else 2

    @property
    def way_s(self) -> float:
        """Of a micro-batch that is alone, through all stages and back."""
        return sum(self.compute_s) + 2 * (len(self.compute_s) - 1) * (self.transfer_s + self.latency_s)

    def rate(self, in_flight: int) -> float:
        """Micro-batches a second, with so many in flight."""
        return min(in_flight / self.way_s, 1 / max(*self.compute_s, self.sent * self.transfer_s))

    def busy(self, in_flight: int) -> float:
        """The share of the nodes' time in which they compute; 1 only where all take equally long."""
        return self.rate(in_flight) * sum(self.compute_s) / len(self.compute_s)


@dataclass(frozen=True, slots=True)
class StageRow:
    model: str
    tflops: float
    activations: str
    bytes_per_token: float
    """Of activations and gradients, over one boundary."""
    needed_mbit_s: float
    """Of a node's link, each way, so that nobody waits for its bandwidth."""
    busy: dict[int, float]
    """By micro-batches in flight, with the link that was given."""


def stage_rows(  # noqa: PLR0913, PLR0917 - a table has as many sides
    models: Mapping[str, Cost],
    network: Network,
    stages: int,
    tflops: Sequence[float],
    codecs: Mapping[str, Callable[[int], int]],
    tokens: int,
) -> list[StageRow]:
    """`codecs`: by name, the bytes of a token's activations, of so many elements."""
    rows = []
    for (model, cost), speed, (name, encoded) in product(models.items(), tflops, codecs.items()):
        each = encoded(cost.width)
        seconds = tokens * each / network.bandwidth_bytes_s
        chain = Chain(cost.compute_s(stages, tokens, speed * 1e12), seconds, network.latency_s)
        needed = chain.sent * tokens * each / max(chain.compute_s)
        rows.append(StageRow(model, speed, name, 2 * each, 8e-6 * needed, {n: chain.busy(n) for n in IN_FLIGHT}))
    return rows
