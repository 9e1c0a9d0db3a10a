"""Tune every algorithm with the same effort: one grid of α and β for all that have them, and the best cell of each.

They are ranked by the final held-out loss of the averaged model, which is what a run publishes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, stdev

from noloco_node.errors import UsageError
from noloco_node.simulate.settings import SETTINGS, Choice, Curve, check


def grid(choices: Iterable[Choice], alphas: Sequence[float], betas: Sequence[float]) -> list[Choice]:
    """One setting per grid cell of each algorithm that has both, one for each other algorithm. Unstable cells are left
    out; raises UsageError if an algorithm has no stable cell."""
    cells: dict[Choice, None] = {}
    for choice in choices:
        if "beta" not in SETTINGS.get(choice.name, ()):
            cells[choice] = None
            continue
        whole = [replace(choice, alpha=alpha, beta=beta) for alpha, beta in product(alphas, betas)]
        stable = [cell for cell in whole if _is_stable(cell)]
        if not stable:
            check(whole[0])  # says why
        cells |= dict.fromkeys(stable)
    return list(cells)


def _is_stable(cell: Choice) -> bool:
    try:
        check(cell)
    except UsageError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Result:
    """One algorithm over its seeds."""

    algorithm: str
    seeds: int
    averaged_model_loss: float
    averaged_model_loss_sd: float
    """Standard deviation between seeds; 0 for one."""
    replica_mean_loss: float
    replica_mean_loss_sd: float
    replica_std: float
    bytes_per_param: float
    bytes_per_token: float
    failed_swaps: int
    """Over all seeds, as all that is counted below."""
    wall_s: float
    scaled_swaps: int
    taken_back: int
    taken_back_from_honest: int


def results(curves: Iterable[Curve]) -> list[Result]:
    by_algorithm: dict[str, list[Curve]] = {}
    for curve in curves:
        by_algorithm.setdefault(curve.algorithm, []).append(curve)
    return [_result(name, group) for name, group in by_algorithm.items()]


def by_loss(result: Result) -> tuple[bool, float]:
    """One that ended in NaN is last."""
    return not math.isfinite(result.averaged_model_loss), result.averaged_model_loss


def best(found: Sequence[Result]) -> list[Result]:
    """The result with the lowest loss of each algorithm, the best algorithm first. Where several ways are compared, as
    `noloco:alpha=0.1 eager` and `noloco blocking`, that of each algorithm in each way."""
    first: dict[tuple[str, str], Result] = {}
    for result in sorted(found, key=by_loss):
        label, _, way = result.algorithm.partition(" ")
        first.setdefault((label.partition(":")[0], way), result)
    return list(first.values())


def _result(name: str, curves: Sequence[Curve]) -> Result:
    averaged = [curve.averaged_model_loss[-1] for curve in curves]
    own = [curve.replica_mean_loss[-1] for curve in curves]
    return Result(
        algorithm=name,
        seeds=len(curves),
        averaged_model_loss=mean(averaged),
        averaged_model_loss_sd=_sd(averaged),
        replica_mean_loss=mean(own),
        replica_mean_loss_sd=_sd(own),
        replica_std=mean(curve.replica_std[-1] for curve in curves),
        bytes_per_param=mean(curve.bytes_per_param for curve in curves),
        bytes_per_token=curves[0].bytes_per_token,
        failed_swaps=sum(curve.failed_swaps for curve in curves),
        wall_s=mean(curve.wall_s for curve in curves),
        scaled_swaps=sum(curve.scaled_swaps for curve in curves),
        taken_back=sum(curve.taken_back for curve in curves),
        taken_back_from_honest=sum(curve.taken_back_from_honest for curve in curves),
    )


def _sd(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0
