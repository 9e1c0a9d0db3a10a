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

Works in place on fp32 or float64 tensors of any shape, piece by piece. Where φ and δ lie in host memory and θ on a GPU,
each piece is brought there, changed and written back. All of it is queued, in order; nothing waits if that memory is
page-locked, and who reads it on the host waits for the device first. Knows nothing of partners, codecs or models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.core import stability

PIECE = 1 << 20
"""Elements worked on at once: the most that is ever copied when θ and φ live on different devices."""
CORE_PIECE = 1 << 16
"""The same on a CPU, of each core: all that is done with a piece finds it in the core's own cache. A boundary with an
offer takes 0.67 of the time that it takes in pieces of PIECE (a Xeon whose cores have 2 MiB of that)."""
GPU_PIECE = 1 << 24
"""The same on a GPU that has all of it. An H200 took 157 ms for a round of 374 M parameters in pieces of PIECE, and had
a kernel to run in 16% of that: it waited for the host to queue the next one."""


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


def snapshot(
    theta: Tensor, phi: Tensor, hyper: OuterSettings, out: Tensor, scale: float = 1.0, *owed: Tensor
) -> list[Tensor]:
    """Writes u = β Δ + γ φ, what a partner needs to know. Taken before the local step, which overwrites Δ. It is made
    on θ's device, wherever φ and `out` are. `owed`: u has s β Δ instead, and this gets β (s - 1) Δ, with s = `scale`
    (core/length_correction.py). Returns ‖Δ‖ of each piece, on θ's device: those of several vectors are read at once."""
    lengths = []
    for t, p, u, *owes in _pieces(theta, phi, out, *owed):
        slow, made = _brought(p, t), _room(u, t)
        lengths.append(torch.linalg.vector_norm(torch.sub(t, slow, out=made)))
        more = [torch.mul(made, hyper.beta * (scale - 1), out=_room(due, t)) for due in owes]
        made.mul_(hyper.beta).add_(slow, alpha=hyper.gamma)
        for due, longer in zip(owes, more, strict=True):
            made.add_(longer)
            _write_back(due, longer)
        _write_back(u, made)
    return lengths


class BlockMovement:
    """max|βΔ| and ‖βΔ‖² of each `block` elements of two vectors in a phase, on θ's device: how far apart replicas may
    be. `local_step` fills it. All its memory is there before that changes anything: a GPU may have none."""

    def __init__(self, theta: Tensor, phi: Tensor, block: int) -> None:
        self._block = block
        blocks = -(-len(theta) // block)
        self.peaks, self.squares = theta.new_empty(blocks), theta.new_empty(blocks)
        # once: new memory for each piece takes a CPU twice the arithmetic
        self._far = theta.new_empty(block * min(blocks, -(-_elements(theta, phi) // block)))

    def add(self, start: int, moved: Tensor, beta: float) -> None:
        """βΔ of the elements from `start` on, the first of a block; `moved`: Δ."""
        first, blocks = start // self._block, -(-len(moved) // self._block)
        far = self._far[: blocks * self._block]
        torch.square(moved, out=far[: len(moved)])
        far[len(moved) :] = 0
        rows, here = far.view(blocks, self._block), slice(first, first + blocks)
        torch.amax(rows, 1, out=self.peaks[here]).sqrt_().mul_(beta)
        torch.sum(rows, 1, out=self.squares[here]).mul_(beta**2)


def local_step(
    theta: Tensor, phi: Tensor, delta: Tensor, hyper: OuterSettings, movement: BlockMovement | None = None
) -> None:
    """The part of the outer step that needs no partner. `movement`: of vectors, to be filled."""
    start = 0
    for t, p, d in _pieces(theta, phi, delta):
        slow, momentum = _brought(p, t), _brought(d, t)
        t.sub_(slow)  # Δ, in the memory of θ, which becomes φ anyway
        if movement:
            movement.add(start, t, hyper.beta)
        momentum.mul_(hyper.alpha).add_(t, alpha=hyper.beta)
        slow.add_(momentum)
        t.copy_(slow)
        _write_back(d, momentum)
        _write_back(p, slow)
        start += len(t)


def correct(  # noqa: PLR0913, PLR0917 - the replica's three tensors stay visible where they are changed
    theta: Tensor, phi: Tensor, delta: Tensor, c: Tensor, hyper: OuterSettings, late: int = 0, *owed: Tensor
) -> None:
    """Adds c and what is `owed` to a replica that took its local step already; `late`: boundaries since that step.

    θ keeps what it learned since. Takes whole vectors or any slices of them that belong together. The outer step is
    linear, so adding -c takes c back, also more boundaries later than it came.
    """
    if late < 0:
        raise ValueError(f"a correction comes 0 or more boundaries late, not {late}")
    kept = hyper.alpha**late
    moved = shift(hyper, late)
    whole = (theta, phi, delta, c, *owed)
    # a GPU may have no memory to bring or add it: all of it is there before θ changes
    for t, p, d, part, *owes in [whole] if theta.is_cuda else _pieces(*whole):
        near, momentum, slow = _brought(part, t), _brought(d, t), _brought(p, t)
        for due in owes:
            near = near + _brought(due, t)
        t.add_(near, alpha=moved)
        _write_back(d, momentum.add_(near, alpha=kept))
        _write_back(p, slow.add_(near, alpha=moved))


def shift(hyper: OuterSettings, late: int) -> float:
    """How often a correction that is `late` is in φ and θ: once, and once more through the momentum of each boundary
    since."""
    return sum(hyper.alpha**k for k in range(late + 1))


def carried_on(hyper: OuterSettings, late: int = 0) -> float:
    """Times a correction that is `late`, as it is in φ and θ now, that momentum makes of it in the end."""
    return 1 / ((1 - hyper.alpha) * shift(hyper, late))


def correction(mine: Tensor, theirs: Tensor) -> Tensor:
    """c = (u_j − u_i)/2. The partner's is its exact opposite: fp subtraction and halving commute with the sign."""
    return torch.sub(theirs, mine).mul_(0.5)


def _brought(part: Tensor, like: Tensor) -> Tensor:
    """The same where the other one is: itself, or a copy."""
    return part.to(like.device, non_blocking=True)


def _room(part: Tensor, like: Tensor) -> Tensor:
    """Where the other one is, for what goes into the first: itself, or new memory."""
    return part if part.device == like.device else torch.empty_like(part, device=like.device)


def _write_back(part: Tensor, changed: Tensor) -> None:
    if changed is not part:
        part.copy_(changed, non_blocking=True)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of each tensor in turn, as views. Rows are the unit, so a piece never copies."""
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise ValueError(f"the vectors differ in shape: {[tuple(tensor.shape) for tensor in tensors]}")
    rows = len(tensors[0])
    size = max(1, _elements(*tensors) * rows // max(1, tensors[0].numel()))
    if rows <= size:  # as a fragment: views of it would cost as much of the host's time as the arithmetic
        return iter((tensors,) if rows else ())
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def _elements(*tensors: Tensor) -> int:
    if any(tensor.is_cuda for tensor in tensors):
        return GPU_PIECE if all(tensor.is_cuda for tensor in tensors) else PIECE
    return CORE_PIECE * torch.get_num_threads()
