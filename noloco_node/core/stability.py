"""Whether replicas that average with random partners stay together and do not overshoot: the exact second moments.

Δ depends on φ: in a direction in which an inner phase goes the part κ of the way to a minimum, from 0 (flat) to 1 (it
gets there), Δ is −κ φ, with φ counted from the minimum. Let b = β κ. The mean over the swarm then moves like heavy
ball, φ_t+1 = (1 + α − b) φ_t − α φ_t−1, and stays bounded where b < 2 (1 + α).

Write φ and δ of a replica as deviations from the mean over the swarm. In one outer step with a random partner (pairs
drawn anew each time, many replicas, so partners are independent), with a = (γ + b)/2 and q = (γ − b)²/4,

    δ ← α δ − a φ + noise of the partners' φ with variance q E[φ²] + noise of Δ          φ ← φ + δ

and (E[φ²], E[φδ], E[δ²]) is multiplied by the 3×3 matrix of `moment_matrix`. The spread stays bounded exactly when
that matrix's spectral radius, here the *variance factor* of a round, is below 1: in a flat direction that is a bound on
γ; where b is not 0, γ² + b² − 2αγb < 2 (1 − α²) (γ + b). A run must be stable in every direction, so β has
to be below `largest_beta`, the bound for κ = 1. The NoLoCo paper (arXiv 2506.10911) bounds the mean of φ alone,
α < γ < sqrt(2 + α²); that is neither necessary nor sufficient: α = 0.9, γ = 1 lies inside it and diverges.

Knows no tensors and loads neither torch nor numpy: a manifest is checked with it before anything heavy is loaded.
"""

import math

Matrix = tuple[tuple[float, float, float], ...]


def check(alpha: float, beta: float, gamma: float) -> None:
    """Raises ValueError, with what would be stable, unless the replicas' mean and their spread both stay bounded."""
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be from 0 to below 1 (the outer momentum would never fade), not {alpha:g}")
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"beta must be a finite number above 0, not {beta:g}")
    limit = largest_gamma(alpha)
    if 0 < gamma < limit:
        if beta < (most := largest_beta(alpha, gamma)):
            return
        raise ValueError(
            f"with alpha {alpha:g}, beta {beta:g} and gamma {gamma:g} the outer step overshoots where a phase reaches "
            f"a minimum: beta must be below {most:.3g} (exact; below 2 (1 + alpha) = {2 * (1 + alpha):g} for the mean "
            "of the replicas, the rest for the variance between them)"
        )
    factor = f" ({variance_factor(alpha, gamma):.3g} times a round)" if math.isfinite(gamma) else ""
    raise ValueError(
        f"with alpha {alpha:g} and gamma {gamma:g} the variance between replicas does not shrink{factor}: for alpha "
        f"{alpha:g}, gamma must be above 0 and below {limit:.3g} (exact), and for gamma {gamma:g} "
        f"{_stable_alpha(gamma)}; the paper's bound alpha < gamma < sqrt(2 + alpha^2), here {alpha:g} < gamma "
        f"< {math.sqrt(2 + alpha * alpha):.3g}, does not decide"
    )


def variance_factor(alpha: float, gamma: float, b: float = 0.0) -> float:
    """By how much a round multiplies the variance between replicas, in the long run: below 1 is stable."""
    import numpy as np  # late: only an error says it

    return float(np.abs(np.linalg.eigvals(moment_matrix(alpha, gamma, b))).max())


def largest_gamma(alpha: float) -> float:
    """Below it, and above 0, the spread is stable: where the moment matrix first has the eigenvalue 1."""
    return 2 * (1 - alpha * alpha)


def largest_beta(alpha: float, gamma: float) -> float:
    """Below it the mean and the spread are stable for each κ from 0 to 1, if γ is below `largest_gamma`.

    In b, the moment matrix has the eigenvalue 1 at the roots of b² − half·b + rest; rest is negative there.
    """
    kept = 2 * (1 - alpha * alpha)
    half, rest = 2 * alpha * gamma + kept, gamma * (gamma - kept)
    return min(2 * (1 + alpha), (half + math.sqrt(half * half - 4 * rest)) / 2)


def largest_nesterov_beta(alpha: float) -> float:
    """The same for Nesterov's momentum on the mean of all Δ, as in DiLoCo: φ_t+1 = (1 − b) ((1 + α) φ_t − α φ_t−1)."""
    return 2 * (1 + alpha) / (1 + 2 * alpha)


def moment_matrix(alpha: float, gamma: float, b: float = 0.0) -> Matrix:
    """What a round does to (E[φ²], E[φδ], E[δ²]), apart from the noise of Δ. `b`: β κ, 0 in a flat direction."""
    own = (gamma + b) / 2
    others = (gamma - b) ** 2 / 4
    kept = alpha * alpha
    return (
        ((1 - own) ** 2 + others, 2 * (1 - own) * alpha, kept),
        (others - own * (1 - own), alpha * (1 - 2 * own), kept),
        (others + own * own, -2 * own * alpha, kept),
    )


def _stable_alpha(gamma: float) -> str:
    """The other remedy: which α is stable with this γ, to two digits. The stable values form one interval."""
    stable = [alpha / 100 for alpha in range(100) if 0 < gamma < largest_gamma(alpha / 100)]
    return f"an alpha from {stable[0]:g} to {stable[-1]:g} would do" if stable else "no alpha would do"
