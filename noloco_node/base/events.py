"""Events for observers: what happened on this node, after it happened.

They feed the status view, the log and `events.jsonl`; no decision depends on them. Each is a frozen dataclass;
`as_json` is its line in `events.jsonl`.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """An inner phase ended and the local outer step was taken."""

    round: int
    steps: int
    """The replica's place in the run's schedule, with the steps of others before it joined. With phases by time: the
    steps that this replica did."""
    loss: float | None
    """Mean training loss over the phase; of one without a step the loss of the last step before, None where there was
    none."""
    tokens: int
    """Tokens trained on in this phase."""
    seconds: float
    stall_ms: float = 0.0
    """How long training waited for its round: the boundary, and corrections added since the last one."""
    tokens_total: int = 0
    """Tokens that this replica has trained on, in earlier processes too."""
    learning_rate: float | None = None
    """Of the phase's last step."""
    gradient_norm: float | None = None
    """Before clipping: the mean over the phase's steps."""
    mfu: float | None = None
    """The share of the device's arithmetic that the model's products took; None where that is not known."""
    device_bytes: int | None = None
    """The most memory of the accelerator that training has taken so far; None on a CPU."""
    host_bytes: int | None = None
    """Memory of this process, when the phase ended."""

    @property
    def tokens_per_s(self) -> float | None:
        return rate(self.tokens, self.seconds)


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """Every fragment of a swap was applied."""

    round: int
    partner: str
    seconds: float
    sent_bytes: int
    received_bytes: int
    resent_blocks: float = 0.0
    """Share of blocks with a wrong checksum, which were sent again (lattice codes)."""
    relative_error: float = 0.0
    """Of u_j − u_i, estimated from the elements that lattice codes send in full."""
    swap: int = 1
    """Number of the swap in its round: above 1 where a run allows several. The round counts once."""
    allowed: float = 1.0
    """What this node's own bounds left of the corrections (core/bounds.py): the mean factor of the fragments."""


@dataclass(frozen=True, slots=True)
class WentSolo:
    """A round ended without a complete swap; fragments applied before that stay applied."""

    round: int
    reason: str
    partner: str | None = None
    applied: int = 0
    """Fragments that were applied before it failed."""
    one_sided: int = 0
    """Fragments that we applied and the partner perhaps did not: at most one."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    round: int
    eval_loss: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The model continued the run's prompt."""

    round: int
    prompt: str
    text: str
    """The continuation, without the prompt."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The model was broken, and its weights were replaced by older ones."""

    round: int
    """Unchanged by the rollback."""
    weights_of: int | None
    """The round of their checkpoint; None: this round's slow weights."""
    reason: str


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A partner's correction made the model clearly worse, and was taken back."""

    round: int
    """In which it had been applied."""
    partner: str
    loss_with: float
    """On held-out data, with the correction and without it."""
    loss_without: float


@dataclass(frozen=True, slots=True)
class PeerFaulted:
    """A peer broke the protocol; `reason` is the code."""

    peer: str
    reason: str


def rate(amount: float, seconds: float) -> float | None:
    """Per second; None where there was nothing, or no time has passed."""
    return amount / seconds if amount and seconds > 0 else None


Event = PhaseDone | RoundCommitted | WentSolo | Evaluated | Sampled | RolledBack | TakenBack | PeerFaulted


def as_json(event: Event, at: float) -> dict[str, Any]:
    """The event as one JSON-ready line; `at` is wall-clock, for people only."""
    return {"at": round(at, 3), "event": type(event).__name__, **asdict(event)}
