"""Where a replica is in its run, and the learning rate there: warm-up, then the manifest's schedule. Pure arithmetic.

Both follow the run and not this process: a node that joins in round 40 decays with the others. A phase lasts so many
steps, or so many seconds, counted by `spend`. Time beyond the end of a phase by time counts for the next one, so that
machines with short and with long steps do not drift apart.
"""

import math
from dataclasses import dataclass

from noloco_node.run.schema import InnerSpec


@dataclass(slots=True)
class Position:
    spec: InnerSpec
    budget: int
    """The run's rounds."""
    round: int = 0
    """Boundaries that are past."""
    phase_step: int = 0
    """Steps since the last boundary."""
    phase_s: float = 0.0
    """Seconds since the last boundary, of a phase by time."""
    taken: int = 0
    """Steps of this replica, over restarts."""

    @property
    def phase_over(self) -> bool:
        """Whether the boundary is due: after H steps, or after the time of a phase and at least one step."""
        if self.spec.seconds is None:
            return self.phase_step >= self._phase_steps
        return self.phase_step > 0 and self.phase_s >= self.spec.seconds

    @property
    def phase_part(self) -> float:
        """The share of the phase that is over, 0 to 1."""
        done = self.phase_step / self._phase_steps if self.spec.seconds is None else self.phase_s / self.spec.seconds
        return min(1.0, done)

    def steps_left(self, step_s: float) -> int:
        """Steps until the boundary; with a phase by time, if each takes `step_s`."""
        if self.spec.seconds is None:
            return max(1, self._phase_steps - self.phase_step)
        return max(1, math.ceil((self.spec.seconds - self.phase_s) / max(step_s, 1e-6)))

    @property
    def steps(self) -> int:
        """With phases by steps: the position in the run's schedule, so the steps before the replica joined count too.
        With phases by time: its own steps."""
        return self.round * self._phase_steps + self.phase_step if self.spec.seconds is None else self.taken

    @property
    def learning_rate(self) -> float:
        """Of the step under way."""
        return learning_rate(self.spec, self.progress)

    @property
    def progress(self) -> float:
        """The share of the run that is over, 0 to 1, with the step under way."""
        if self.spec.seconds is None:
            return (self.steps + 1) / (self.budget * self._phase_steps)
        return (self.round + self.phase_part) / self.budget

    @property
    def _phase_steps(self) -> int:
        return self.spec.steps or 1

    def spend(self, seconds: float) -> None:
        """So much time of the phase has passed: it ends phases by time, and their schedule follows it."""
        if self.spec.seconds is not None:
            self.phase_s += seconds

    def step(self) -> None:
        self.phase_step += 1
        self.taken += 1

    def next_round(self) -> None:
        self.round += 1
        self.phase_step = 0
        if self.spec.seconds is not None:
            self.phase_s %= self.spec.seconds

    def move_to(self, round: int) -> None:
        """To the beginning of another round."""
        self.round, self.phase_step, self.phase_s = round, 0, 0.0


def learning_rate(spec: InnerSpec, progress: float) -> float:
    """At `progress` of the run, from 0 to 1."""
    if progress < spec.warmup:
        return spec.learning_rate * progress / spec.warmup
    left = _FALLS[spec.schedule](spec, min(progress, 1.0))
    return spec.learning_rate * (spec.final_learning_rate + (1 - spec.final_learning_rate) * left)


def _cosine(spec: InnerSpec, progress: float) -> float:
    along = (progress - spec.warmup) / (1 - spec.warmup) if spec.warmup < 1 else 0.0
    return (1 + math.cos(math.pi * along)) / 2


def _warmup_stable_decay(spec: InnerSpec, progress: float) -> float:
    """The root falls faster than a line at first: a lower final loss in arXiv 2405.18392."""
    along = 1 - (1 - progress) / spec.cooldown if spec.cooldown else 0.0
    return 1 - math.sqrt(max(0.0, along))


_FALLS = {"cosine": _cosine, "wsd": _warmup_stable_decay}
