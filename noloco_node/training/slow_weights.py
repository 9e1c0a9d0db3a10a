"""The outer side of a replica: slow weights φ and their momentum δ beside a θ that somebody trains.

θ changes here only at a boundary and by corrections. What partners brought is kept until `let_stay`, so that it can be
taken back, also boundaries later. φ and δ lie beside θ where they fit, else in host memory. The maths is core/outer.py
(arXiv 2506.10911). Knows no batches, no AdamW and no peers.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.core import gpu, outer
from noloco_node.core.codecs.codec import BLOCK, Packed
from noloco_node.core.fragments import touched
from noloco_node.core.length_correction import OWED, LengthCorrection
from noloco_node.errors import NonFinite
from noloco_node.host import memory
from noloco_node.run.schema import OuterSpec
from noloco_node.training import memory_budget, model
from noloco_node.training.background_copy import Copies
from noloco_node.training.inner.schedule import Position
from noloco_node.training.model import Place


@dataclass(slots=True)
class _Added:
    """A correction of some elements, kept so that it can be taken back."""

    start: int
    correction: Packed
    offered_round: int
    has_length: bool
    """Whether the length owed to it was added too; the first partner of a round brings it."""
    length: Tensor | None = None
    """That, once another offer has taken its place in the length correction."""

    def keep_length(self, lengths: LengthCorrection) -> Tensor:
        """Before the next offer."""
        if self.length is None:
            self.length = lengths.owed(self.start, self.correction.size).clone()
        return self.length


class SlowWeights:
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        theta: Tensor,
        places: Sequence[Place],
        spec: OuterSpec,
        position: Position,
        copies: Copies,
        memory_fraction: float,
        moments: str,
    ) -> None:
        """`position`: in the run, where the rounds are counted. `copies`: those that may be under way of θ, φ and δ."""
        self.theta = theta
        self.phi, self.delta = memory_budget.slow_vectors(theta, memory_fraction, moments)
        self.settings = outer.OuterSettings(spec.alpha, spec.beta, spec.gamma)
        self._places, self._position, self._copies = places, position, copies
        self._lengths = self._length_correction() if spec.keep_norm else None
        apart = self._apart
        self._host_u = gpu.Reused(len(theta), gpu.pinned if apart else _room_for_u, spare=apart)
        self._moved: outer.BlockMovement | None = None
        """Between a snapshot, which finds all of θ finite, and the step."""
        self._owed_for = -1
        """The round of the offer that the length correction is about: a swap of the offer before may still go on."""
        self._replaced_in = -1
        """The round in which the weights became others: offers up to it are of those before."""
        self._thrown_away: list[int] = []
        """Rounds whose phase was thrown away: δ did not change at their boundary."""
        self._added: list[_Added] = []
        """The corrections of the last swap."""

    @property
    def _apart(self) -> bool:
        """Whether φ and δ are in host memory and θ is not."""
        return self.phi.device != self.theta.device

    def _length_correction(self) -> LengthCorrection:
        sizes = [end - start for _, start, end in self._places]
        owed = gpu.pinned(sum(sizes), OWED) if self._apart else torch.empty_like(self.phi, dtype=OWED)
        return LengthCorrection(sizes, owed)

    def arrive(self) -> None:
        """Before φ and δ are read or written on the CPU: what the GPU writes there has been written."""
        if self._apart:
            gpu.reach(gpu.record(self.theta.device))

    # ---- the boundary of a round ----
    def snapshot(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What a partner needs: u = β Δ + γ φ, fp32 where φ is, a new tensor. Δ is made longer by what averaging will
        take from it, where the run does that (core/length_correction.py). And how far apart partners may be: the
        largest |βΔ| and ‖βΔ‖² of each block of 256 elements, on θ's device, which `step` writes there. Right before
        that. Raises NonFinite."""
        self._moved, self._owed_for = None, -1
        moved = outer.BlockMovement(self.theta, self.phi, BLOCK)
        u = torch.empty_like(self.phi) if self.phi.is_cuda else self._host_u.take()
        if self._lengths:
            for added in self._added:
                if added.has_length:
                    added.keep_length(self._lengths)
            lengths = self._lengths.offer(self.theta, self.phi, self.settings, u)
        else:
            lengths = torch.stack(outer.snapshot(self.theta, self.phi, self.settings, u)).tolist()
        if not all(map(math.isfinite, lengths)):  # of θ − φ: so are all of θ and φ
            self._require_finite(self.theta)
            raise NonFinite("the weights moved too far in a phase, or hold NaN or Inf")
        self._moved, self._owed_for = moved, self._position.round + 1
        return u, (moved.peaks, moved.squares)

    def step(self) -> None:
        """The local outer step: afterwards θ = φ. Raises NonFinite, and then nothing has changed."""
        moved, self._moved = self._moved, None
        if moved is None:
            self._require_finite(self.theta)
        self.secure()
        outer.local_step(self.theta, self.phi, self.delta, self.settings, moved)

    def stayed(self) -> None:
        """A round has ended without that step: its phase was thrown away."""
        self._thrown_away.append(self._position.round)

    @property
    def is_broken(self) -> bool:
        """Whether φ itself is not finite."""
        self.arrive()
        return first_nonfinite(self.phi) is not None

    # ---- what partners bring ----
    def apply(self, start: int, c: Tensor, offered_round: int, kept: Packed | None = None) -> None:
        """Add a partner's correction of the elements from `start` on, for the offer made as round `offered_round`
        began, with the length that is owed there. One for weights that were given up since is dropped. `kept`: the
        same, for `take_back`, until `let_stay`."""
        if offered_round <= self._replaced_in:
            return
        owes = self._lengths if offered_round == self._owed_for else None
        with owes.completed(start, c) if owes else nullcontext(()) as owed:
            added = _Added(start, kept or Packed(c), offered_round, bool(owed))
            self._change(added, c, *owed)
        self._added.append(added)

    def let_stay(self) -> None:
        """What was added before."""
        self._added.clear()

    @property
    def has_swapped(self) -> bool:
        """Whether there is something to take back."""
        return bool(self._added)

    @property
    def swapped_elements(self) -> int:
        """That it would change."""
        return sum(added.correction.size for added in self._added)

    def take_back(self) -> None:
        """Undo what was added since `let_stay`, now or boundaries later: θ, φ and δ become what they would be
        without it, had θ learned the same since."""
        while self._added:  # a GPU may have no memory for one of them: those before it have been taken back
            added = self._added[0]
            both = [added.correction.applied(self.theta.device)]
            if self._lengths and added.has_length:
                both.append(added.keep_length(self._lengths).to(self.theta.device))
                self._lengths.take_back(added.start, added.correction.size)
            self._change(added, *(-part for part in both))
            self._added.pop(0)

    @property
    def swap_grows(self) -> float:
        """Times what was added since `let_stay` that it comes to in the end."""
        lates = [self._late(added.offered_round) for added in self._added]
        return outer.carried_on(self.settings, min(lates, default=0))

    def write_without_swap(self, out: Sequence[Tensor], partner: float = 0.0) -> None:
        """θ without what was added since `let_stay`, tensor by tensor; `partner` = 1: what the partner sent, as far as
        that is known."""
        model.fill(out, self.theta)
        places = [(start, end) for _, start, end in self._places]
        apart = 2 * partner / max(self.settings.beta, self.settings.gamma)
        for added in self._added:
            c, first, last = added.correction, added.start, added.start + added.correction.size
            shift = apart - outer.shift(self.settings, self._late(added.offered_round)) * c.scale
            values = c.unscaled(self.theta.device)
            for at in touched(places, first, last):  # a large model has thousands of fragments
                start, end = places[at]
                here, there = max(start, first), min(end, last)
                out[at].view(-1)[here - start : there - start].add_(values[here - first : there - first], alpha=shift)

    def _late(self, offered_round: int) -> int:
        return self._position.round - offered_round - sum(ended > offered_round for ended in self._thrown_away)

    def _change(self, added: _Added, c: Tensor, *owed: Tensor) -> None:
        part = slice(added.start, added.start + len(c))
        late = self._late(added.offered_round)
        self.secure(part.start, part.stop)
        outer.correct(self.theta[part], self.phi[part], self.delta[part], c, self.settings, late, *owed)

    # ---- other weights ----
    def secure(self, start: int = 0, end: int | None = None) -> None:
        """Before θ, φ and δ change there: of copies that are made, copy these first."""
        self._copies.secure("theta", start, end)
        self._copies.secure("slow", start, end)

    def become(self, phi: Tensor, delta: Tensor) -> None:
        """Others, of which no partner has changed anything yet. θ is the caller's to change, next."""
        self._added.clear()
        self.arrive()
        self.secure()
        self.phi.copy_(phi)
        self.delta.copy_(delta)

    def begin_at_phi(self) -> None:
        """θ = φ: what θ learned since is given up."""
        self._added.clear()
        self._copies.secure("theta")
        self.theta.copy_(self.phi)

    def replaced(self) -> None:
        """In this round the weights became others: what partners bring for offers before is dropped."""
        self._replaced_in = self._position.round
        self._thrown_away.clear()
        self._owed_for = -1

    @property
    def scales(self) -> Sequence[float]:
        """Of the length correction, for a checkpoint."""
        return self._lengths.scales if self._lengths else []

    def load_scales(self, scales: Sequence[float]) -> None:
        if self._lengths:
            self._lengths.load(scales)
        self._owed_for = -1

    # ---- parts ----
    def _require_finite(self, vector: Tensor) -> None:
        if (at := first_nonfinite(vector)) is not None:
            name = next(name for name, _, end in self._places if at < end)
            raise NonFinite(f"{name} holds NaN or Inf")


def _room_for_u(elements: int) -> Tensor:
    """On a CPU, beside the last offer, which may be open until the event loop hears of the next one: as much as the
    gradient took, which is freed before a snapshot."""
    memory.give_back()
    return torch.empty(elements)


def first_nonfinite(vector: Tensor) -> int | None:
    """The place of the first element that is NaN or Inf."""
    if math.isfinite(float(vector.sum())):  # NaN and Inf stay in a sum, which takes a thirtieth of the time
        return None
    for start, piece in pieces(vector):
        finite = piece.isfinite()
        if not finite.all():
            return start + int(finite.logical_not().nonzero()[0])
    return None


def pieces(vector: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A long vector is looked at piece by piece: no copy of its length is made."""
    for start in range(0, len(vector), outer.PIECE):
        yield start, vector[start : start + outer.PIECE]
