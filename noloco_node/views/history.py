"""The latest events, as `top` and the page draw them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Point:
    """The end of one inner phase of this node."""

    at: float
    """Wall-clock seconds, here and below; for people only."""
    round: int
    step: int
    loss: float | None = None
    eval_loss: float | None = None
    """On held-out data, if this round was evaluated."""
    swarm_loss: float | None = None
    """The median of the peers that were seen training then, this node included."""
    swarm_eval_loss: float | None = None
    tokens_per_s: float | None = None
    learning_rate: float | None = None
    """This and what follows is as in StatusView (views/status.py)."""
    gradient_norm: float | None = None
    mfu: float | None = None
    memory: int | None = None
    """Bytes: of the accelerator, or of the node's process where there is none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of the timeline."""

    kind: str
    """`phase`, `swap` (committed), `solo` (a round without a complete swap) or `taken_back` (its correction, now)."""
    round: int
    began: float
    ended: float
    partner: str | None = None
    """Peer id."""
    reason: str | None = None
    """Why the round went solo; `taken_back` where the kind is."""
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """Traffic in the second before, of all that `today` of the status counts. There is none where a day begins."""

    at: float
    sent_per_s: float
    received_per_s: float


@dataclass(frozen=True, slots=True)
class MeetingView:
    """Rounds committed by two peers, as far as this node saw them itself or in presence records."""

    peer: str
    partner: str
    rounds: int


@dataclass(frozen=True, slots=True)
class Said:
    """A line of the log, for people."""

    at: float
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """The latest events; each tuple is in order of time and bounded."""

    points: tuple[Point, ...] = ()
    """Of the whole run, as far as this node took part; with many, every second one is dropped."""
    pieces: tuple[Piece, ...] = ()
    rates: tuple[Rate, ...] = ()
    meetings: tuple[MeetingView, ...] = ()
    said: tuple[Said, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """The name of every peer id above."""
