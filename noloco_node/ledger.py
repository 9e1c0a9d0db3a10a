"""What the events of one node came to: the figures behind `status` and `peers`.

Fed with facts (events.py), asked for views; it knows no part of the node, no clock but the one it is handed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    spent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the training thread by what they went into."""

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
        self.committed += event.swap == 1
        together = self.with_peer.setdefault(event.partner, WithPeer())
        together.exchanges += 1
        together.sent += event.sent_bytes
        together.received += event.received_bytes
        self.last_round = LastRound(
            event.partner,
            event.seconds,
            event.sent_bytes,
            event.received_bytes,
            event.resent_blocks,
            event.relative_error,
        )

    def figures(self) -> dict[str, Any]:
        """The fields of a StatusView that events decide."""
        last = self.last_round
        return {
            "round": self.round,
            "step": self.step,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "loss": self.loss,
            "loss_first": self.loss_first,
            "eval_loss": self.eval_loss,
            "eval_loss_first": self.eval_loss_first,
            "partner": last.partner if last else None,
            "last_round": last,
            "resent_block_fraction": last.resent_block_fraction if last else None,
            "relative_error": last.relative_error if last else None,
            "rounds": Rounds(self.committed, self.solo.total(), dict(self.solo)),
            "partners": {peer: together.exchanges for peer, together in self.with_peer.items()},
            "busy_fraction": self.busy_fraction(),
        }

    def together(self, peer: str) -> dict[str, Any]:
        """The fields of a PeerRow that events decide."""
        return asdict(self.with_peer.get(peer, WithPeer()))

    def busy_fraction(self) -> float | None:
        """The inner steps' share of the time since training began, up to the last boundary."""
        total = sum(self.spent_s.values())
        return self.spent_s.get("step", 0.0) / total if total else None

    def per_param_round(self, parameters: int | None) -> float | None:
        """Bytes sent per parameter and committed round."""
        if not parameters or not self.committed:
            return None
        return sum(together.sent for together in self.with_peer.values()) / parameters / self.committed
