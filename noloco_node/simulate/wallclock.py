"""How long the same training would take with a large model on a link of some rate: arithmetic, no training.

The losses are a small model's, the time is a large one's: a number of seconds a step, and as long for what is sent as
its bytes need on the link, both ways at once. Eager overlap trains on meanwhile: a correction comes in slices until the
steps that the swap takes are over, and no swap begins before. Blocking overlap waits for all that is sent. Latency,
finding a partner and stragglers are left out, which favours blocking. What is on its way at the end lands at once,
which favours eager: after half an hour on 10, 100 and 1000 Mbit/s 97, 33 and 6 s of a swap are left. (The averaged
model hardly hears of it, since corrections of a pair cancel each other.)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import numpy as np

from noloco_node.simulate.settings import Curve

OVERLAPS = ("eager", "blocking")
"""The overlaps whose delay depends on the link."""
Points = Sequence[tuple[float, float]]
"""Seconds and losses."""


@dataclass(frozen=True, slots=True)
class Large:
    """The run whose time is modelled."""

    parameters: float
    step_s: float
    bytes_per_parameter: float

    def swap_s(self, mbit_s: float) -> float:
        return self.parameters * self.bytes_per_parameter * 8 / (mbit_s * 1e6)

    def simulated(self, overlap: str, mbit_s: float) -> str:
        """The overlap to simulate: a swap takes the same number of steps."""
        return overlap if overlap == "blocking" else f"delay={math.ceil(self.swap_s(mbit_s) / self.step_s)}"

    def clock(self, overlap: str, mbit_s: float, curve: Curve) -> list[float]:
        """Seconds at each point of a curve."""
        waits_s = self.parameters * 8 / (mbit_s * 1e6) if overlap == "blocking" else 0.0  # for a byte a parameter
        points = zip(curve.steps, curve.bytes_sent_per_param, strict=True)
        return [step * self.step_s + sent * waits_s for step, sent in points]


@dataclass(frozen=True, slots=True)
class Timed:
    """One way to overlap on one link."""

    algorithm: str
    overlap: str
    mbit_s: float
    simulated: str
    seconds: list[float]
    losses: list[float]
    """Held-out, of the averaged model."""
    bytes_per_param: float

    @property
    def points(self) -> Points:
        return list(zip(self.seconds, self.losses, strict=True))


def timed(curves: Iterable[Curve], ways: Mapping[tuple[str, float], str], large: Large) -> list[Timed]:
    """Each overlap on each link, with the mean curve over the seeds. A curve's name ends with what was simulated."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.algorithm, []).append(curve)
    found = []
    for (overlap, mbit_s), simulated in ways.items():
        for name, group in groups.items():
            algorithm, _, trained = name.partition(" ")
            if trained == simulated:
                losses = [mean(point) for point in zip(*(c.averaged_model_loss for c in group), strict=True)]
                seconds = large.clock(overlap, mbit_s, group[0])
                sent = mean(curve.bytes_per_param for curve in group)
                found.append(Timed(algorithm, overlap, mbit_s, simulated, seconds, losses, sent))
    return found


def loss_after(points: Points, seconds: float) -> float:
    """Interpolated between two points; after the last one, its loss."""
    at, losses = zip(*points, strict=True)
    return float(np.interp(seconds, at, losses))


def seconds_to(points: Points, goal: float) -> float:
    """When the loss first reaches the goal; infinite if it never does."""
    for (before, loss), (after, later) in pairwise(points):
        if later <= goal:
            return before + (after - before) * max(0.0, loss - goal) / (loss - later) if later < loss else after
    return math.inf
