"""What the events of one node came to: the figures behind `status` and `peers`.

Fed with facts (events.py), asked for views; it knows no part of the node, no clock but the one it is handed.
"""

from collections import Counter
from dataclasses import dataclass, field

from noloco_node.control.views import LastRound, Rounds
from noloco_node.events import Evaluated, Event, PeerFaulted, PhaseDone, RoundCommitted, WentSolo


@dataclass(slots=True)
class WithPeer:
    """What we and one peer gave each other in committed rounds."""

    exchanges: int = 0
    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Ledger:
    round: int = 0
    step: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    loss: float | None = None
    loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_first: float | None = None
    committed: int = 0
    solo: Counter[str] = field(default_factory=Counter)
    one_sided: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    with_peer: dict[str, WithPeer] = field(default_factory=dict)
    last_round: LastRound | None = None

    def observe(self, event: Event) -> None:
        match event:
            case PhaseDone():
                self.round, self.step, self.loss = event.round, event.steps, event.loss
                self.loss_first = event.loss if self.loss_first is None else self.loss_first
                self.tokens += event.tokens
                self.tokens_per_s = event.tokens / event.seconds if event.seconds > 0 else None
            case Evaluated(_, eval_loss):
                self.eval_loss = eval_loss
                self.eval_loss_first = eval_loss if self.eval_loss_first is None else self.eval_loss_first
            case RoundCommitted():
                self._commit(event)
            case WentSolo():
                self.solo[event.reason] += 1
                self.one_sided += event.one_sided
            case PeerFaulted(_, reason):
                self.faults[reason] += 1

    def _commit(self, event: RoundCommitted) -> None:
        self.committed += 1
        together = self.with_peer.setdefault(event.partner, WithPeer())
        together.exchanges += 1
        together.sent += event.sent_bytes
        together.received += event.received_bytes
        self.last_round = LastRound(
            event.partner, event.seconds, event.sent_bytes, event.received_bytes, event.resent_blocks
        )

    def rounds(self) -> Rounds:
        return Rounds(self.committed, self.solo.total(), dict(self.solo))

    def partners(self) -> dict[str, int]:
        return {peer: together.exchanges for peer, together in self.with_peer.items()}

    def per_param_round(self, parameters: int | None) -> float | None:
        """Bytes sent per parameter and committed round."""
        if not parameters or not self.committed:
            return None
        return sum(together.sent for together in self.with_peer.values()) / parameters / self.committed
