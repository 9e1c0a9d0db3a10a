"""How long the same training would take with a large model on a link of some rate: arithmetic, no training.

The losses are a small model's, the time is a large one's: a number of seconds a step, and a swap that takes as long as
its vector needs on the link, both ways at once. Eager and deferred overlap train on meanwhile: the correction comes
late by the steps that the swap takes. Blocking overlap waits for it in every round. Latency, finding a partner and
stragglers are left out, which favours blocking.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from noloco_node.simulate.settings import Curve

OVERLAPS = ("eager", "deferred", "blocking")
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
        """The overlap to simulate: it has the same number of steps between a boundary and its correction."""
        if overlap == "blocking":
            return overlap
        late = math.ceil(self.swap_s(mbit_s) / self.step_s)
        return f"{'delay' if overlap == 'eager' else overlap}={late}"

    def clock(self, overlap: str, mbit_s: float, steps: Sequence[int]) -> list[float]:
        """Seconds at each point of a curve; every point but the first is a boundary."""
        waits_s = self.swap_s(mbit_s) if overlap == "blocking" else 0.0
        return [step * self.step_s + point * waits_s for point, step in enumerate(steps)]


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

    @property
    def points(self) -> Points:
        return list(zip(self.seconds, self.losses, strict=True))


def timed(curves: Iterable[Curve], ways: Mapping[tuple[str, float], str], large: Large) -> list[Timed]:
    """Each overlap on each link, with the mean curve over the seeds. If several were trained, a
    curve's name ends with its overlap."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.algorithm, []).append(curve)
    found = []
    for (overlap, mbit_s), simulated in ways.items():
        for name, group in groups.items():
            algorithm, _, trained = name.partition(" ")
            if trained in ("", simulated):
                losses = [mean(point) for point in zip(*(c.averaged_model_loss for c in group), strict=True)]
                seconds = large.clock(overlap, mbit_s, group[0].steps)
                found.append(Timed(algorithm, overlap, mbit_s, simulated, seconds, losses))
    return found


def loss_after(points: Points, seconds: float) -> float:
    """Interpolated between two points; after the last one, its loss."""
    for (before, loss), (after, later) in pairwise(points):
        if before <= seconds <= after:
            return loss + (later - loss) * (seconds - before) / (after - before)
    return points[-1][1]


def seconds_to(points: Points, goal: float) -> float:
    """When the loss first reaches the goal; infinite if it never does."""
    for (before, loss), (after, later) in pairwise(points):
        if later <= goal:
            return before + (after - before) * max(0.0, loss - goal) / (loss - later) if later < loss else after
    return math.inf
