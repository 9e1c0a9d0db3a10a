"""The learning rate over the run's progress: warm-up, then the manifest's schedule. Pure arithmetic.

It follows the run and not this process: a node that joins in round 40 decays with the others.
"""

import math

from noloco_node.run.schema import InnerSpec


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
