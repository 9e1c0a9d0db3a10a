"""How an honest replica of a simulated swarm defends itself: with the classes of a node, and its own losses.

A round is the unit of time. Every replica is a place of its own, so that a share is a share of replicas.
"""

from collections.abc import Callable, Iterable

from torch import Tensor

from noloco_node.core.bounds import CorrectionBounds, Movement
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.core.round import BROKEN_FACTOR, LEASH, SHORT_LEASH
from noloco_node.core.standing import Ledger, Shares
from noloco_node.core.verdict import Course, Losses
from noloco_node.errors import PeerFault, PeerMisbehaved
from noloco_node.simulate.settings import Settings

PHASE_S = 1.0


class Guard:
    """Of one replica. Its whole vector is one fragment."""

    def __init__(self, size: int, others: Iterable[int]) -> None:
        self._bounds = CorrectionBounds([size])
        self._blocks = -(-size // BLOCK)
        self._ledger = Ledger()
        self._shares = Shares()
        self._shares.present({str(row): str(row) for row in others})
        self._now = 0.0
        self.course = Course()

    def boundary(self, peaks: Tensor, squares: Tensor) -> None:
        """A phase has ended, in which the replica moved so much (core/outer.py, BlockMovement)."""
        self._now += PHASE_S
        self._shares.pay_off()
        self._bounds.moved(Movement.of(peaks, squares, self._blocks))

    def allows(self, partner: int) -> bool:
        """Whether it would swap with that replica in this round."""
        peer = str(partner)
        return self._ledger.free_at(peer, alone=False) <= self._now and not self._shares.over_for(peer, peer)

    def scale(self, c: Tensor, u: Tensor) -> float:
        """What a correction may be multiplied by. Raises PeerFault."""
        return self._bounds.scale(0, c, u)

    # ---- what came of a swap ----
    def swapped(self, partner: int) -> None:
        self._ledger.whole(str(partner), self._now)
        self._shares.charge(str(partner), str(partner), 1.0)

    def held(self, partner: int) -> int:
        """The partner makes no progress. For how many rounds the replica waits for it."""
        peer = str(partner)
        rounds = SHORT_LEASH if self._ledger.broke_lately(peer, self._now) else LEASH
        self._ledger.failed(peer, rounds * PHASE_S, self._now + (rounds - 1) * PHASE_S, PHASE_S)
        self._shares.charge(peer, peer, BROKEN_FACTOR * rounds)
        return rounds

    def refused(self, partner: int, fault: PeerFault) -> None:
        """At once: it holds the replica for no time."""
        if isinstance(fault, PeerMisbehaved):
            self._ledger.misbehaved(str(partner), fault.reason, self._now, PHASE_S)
        else:
            self._ledger.failed(str(partner), 0.0, self._now, PHASE_S)

    def judge(self, partner: int, losses: tuple[float, float], theirs: Callable[[], float], grows: float) -> bool:
        """Whether a correction is to be taken back; `losses`: without and with it. Held-out ones alone."""
        without, with_it = (Losses(loss, 0.0) for loss in losses)
        verdict = self.course.judge(without, with_it, lambda: Losses(theirs(), 0.0), grows)
        phases = self._ledger.judged(str(partner), str(partner), verdict, self._now, PHASE_S)
        self._shares.charge(str(partner), str(partner), phases)
        return verdict.harmful


def guards(settings: Settings, size: int) -> dict[int, Guard]:
    """Of the honest replicas, where they defend themselves."""
    if not settings.defences:
        return {}
    rows = range(settings.replicas)
    return {row: Guard(size, set(rows) - {row}) for row in range(settings.honest)}
