"""The outer step of NoLoCo (arXiv 2506.10911) as functions on tensors, split so that only one vector crosses the wire.

A replica holds slow weights φ (what its last outer step produced), fast weights θ (being trained) and outer momentum
δ. With Δ = θ − φ after an inner phase, the paper's step for the pair (i, j) is

    δ_i ← α δ_i + β (Δ_i + Δ_j)/2 − γ (φ_i − φ_j)/2          φ_i ← φ_i + δ_i          θ_i ← φ_i

With u = β Δ + γ φ that is exactly a local step that needs no partner, and a correction that needs the partner's u:

    snapshot      u = β Δ + γ φ
    local step    δ ← α δ + β Δ ;  φ ← φ + δ ;  θ ← φ
    correction    c_i = (u_j − u_i)/2 ;  δ_i += c_i ;  φ_i += c_i ;  θ_i += c_i
    m boundaries late      δ_i += α^m c_i ;  φ_i, θ_i += (1 + α + … + α^m) c_i

The paper prints −β; its appendix, code and derivation have +β. A round without a partner is the local step alone.

Works in place on fp32 or float64 tensors of any shape, θ on one device and φ, δ on another if need be, and
goes through them piece by piece: no copy is ever larger than one piece. Knows nothing of partners, codecs or models.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noloco_node.core import stability

PIECE = 1 << 20
"""Elements worked on at once: small enough for a CPU's cache, large enough to keep a GPU busy, and the most that is
ever copied when θ and φ live on different devices."""


@dataclass(frozen=True)
class OuterSettings:
    """The outer step's hyper-parameters; making one checks that the replicas would stay together."""

    alpha: float
    """Momentum."""
    beta: float
    """Outer learning rate."""
    gamma: float
    """How strongly two partners are drawn to their mean."""

    def __post_init__(self) -> None:
        stability.check(self.alpha, self.beta, self.gamma)


def moved(theta: Tensor, phi: Tensor) -> float:
    """‖Δ‖"""
    squares = [torch.dist(t, p.to(t.device)).square() for t, p in _pieces(theta, phi)]
    return math.sqrt(sum(squares, start=torch.zeros((), device=theta.device)))


def snapshot(theta: Tensor, phi: Tensor, hyper: OuterSettings, out: Tensor) -> None:
    """Writes u = β Δ + γ φ, what a partner needs to know. Taken before the local step, which overwrites Δ. It is made
    where φ is: one vector crosses between devices, wherever θ and `out` are."""
    for t, p, u in _pieces(theta, phi, out):
        made = u if u.device == p.device else torch.empty_like(p)
        torch.sub(t.to(p.device), p, out=made).mul_(hyper.beta).add_(p, alpha=hyper.gamma)
        if made is not u:
            u.copy_(made)


def owe(theta: Tensor, phi: Tensor, rate: float, u: Tensor, owed: Tensor) -> None:
    """u += rate · Δ, and the same goes into `owed` (core/length_correction.py), best where φ is. Before
    the local step."""
    for t, p, offered, due in _pieces(theta, phi, u, owed):
        due.copy_((t.to(p.device) - p).mul_(rate))
        offered.add_(due.to(offered.device))


def movement(theta: Tensor, phi: Tensor, hyper: OuterSettings, block: int) -> tuple[Tensor, Tensor]:
    """max|βΔ| and ‖βΔ‖² of each `block` elements, on the CPU: how far apart replicas may be. Before the local step."""
    peaks, squares = [], []
    for fast, slow in zip(torch.split(theta, PIECE), torch.split(phi, PIECE), strict=True):
        far = torch.sub(fast, slow.to(fast.device)).mul_(hyper.beta)
        if rest := len(far) % block:
            far = nn.functional.pad(far, (0, block - rest))
        peaks.append(far.view(-1, block).abs().amax(1))
        squares.append(far.view(-1, block).square_().sum(1))
    return torch.cat(peaks).cpu(), torch.cat(squares).cpu()


def local_step(theta: Tensor, phi: Tensor, delta: Tensor, hyper: OuterSettings) -> None:
    """The part of the outer step that needs no partner."""
    for t, p, d in _pieces(theta, phi, delta):
        t.sub_(p.to(t.device))  # Δ, in the memory of θ, which becomes φ anyway
        d.mul_(hyper.alpha).add_(t.to(d.device), alpha=hyper.beta)
        p.add_(d)
        t.copy_(p)


def correct(  # noqa: PLR0913, PLR0917 - the replica's three tensors stay visible where they are changed
    theta: Tensor, phi: Tensor, delta: Tensor, c: Tensor, hyper: OuterSettings, late: int = 0
) -> None:
    """Adds c to a replica that took its local step already; `late`: boundaries since that step.

    θ keeps what it learned since. Takes whole vectors or any slices of them that belong together. The outer step is
    linear, so adding -c takes c back, also more boundaries later than it came.
    """
    if late < 0:
        raise ValueError(f"a correction comes 0 or more boundaries late, not {late}")
    kept = hyper.alpha**late
    moved = shift(hyper, late)
    for t, p, d, part in _pieces(theta, phi, delta, c):
        near = part.to(t.device)
        t.add_(near, alpha=moved)
        near = near if p.device == t.device else part.to(p.device)
        d.add_(near, alpha=kept)
        p.add_(near, alpha=moved)


def shift(hyper: OuterSettings, late: int) -> float:
    """How often a correction that is `late` is in φ and θ: once, and once more through the momentum of each boundary
    since."""
    return sum(hyper.alpha**k for k in range(late + 1))


def correction(mine: Tensor, theirs: Tensor) -> Tensor:
    """c = (u_j − u_i)/2. The partner's is its exact opposite: fp subtraction and halving commute with the sign."""
    return torch.sub(theirs, mine).mul_(0.5)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of each tensor in turn, as views. Rows are the unit, so a piece never copies."""
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise ValueError(f"the vectors differ in shape: {[tuple(tensor.shape) for tensor in tensors]}")
    row = max(1, tensors[0][0].numel()) if len(tensors[0]) else 1
    return zip(*(torch.split(tensor, max(1, PIECE // row)) for tensor in tensors), strict=True)
