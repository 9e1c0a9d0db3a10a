"""The events that core/round.py takes, and the actions that it returns, as frozen dataclasses.

rounds/service.py reports the events and does the actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from noloco_node.core.verdict import Verdict

SWAPPING = "swapping"
"""Why a round is solo whose boundary came while a swap was under way."""
LEAVING = "leaving"


# ---- what happens ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Settings:
    """The run's, once it is known; before the first boundary."""

    swaps: int | None = 1
    """How many partners a round may have; None: as many as come while a swap takes little of the phase."""
    blocking: bool = False
    """Whether training waits for the round to be over, so that no boundary comes before."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """An inner phase ended and the local step was taken."""

    round: int
    phase_s: float
    """How long the phase took: the best guess at the next one."""
    closed: str | None = None
    """Why there is no offer with it (a swap under way, a non-finite vector), or None: the offer is open."""
    progress: float | None = None
    """Of the swap under way, 0 to 1; None: none is."""


@dataclass(frozen=True, slots=True)
class Candidates:
    places: Mapping[str, str]
    """Of each candidate, by its peer id, as base/places.py says."""
    own: str = ""
    """This node's place; empty: not known."""


@dataclass(frozen=True, slots=True)
class Called:
    """A compatible offer came in."""

    exchange: bytes
    peer: str
    patience_s: float
    """How long the caller's offer stays open."""
    place: str = ""
    """That it calls from; empty: that of the candidate."""


@dataclass(frozen=True, slots=True)
class CallerGone:
    """A caller hung up before it was answered."""

    exchange: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    exchange: bytes


@dataclass(frozen=True, slots=True)
class Appointed:
    """The peer keeps its next offer for us: wait on the open stream until then."""

    exchange: bytes
    in_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    exchange: bytes
    reason: str
    retry_in_s: float = 0.0
    """When the peer's next offer opens that has no appointment."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Our call failed: no connection, or no answer until its deadline."""

    exchange: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class SwapEnded:
    exchange: bytes
    reason: str | None
    """None: every fragment was applied."""
    applied: int = 0
    one_sided: int = 0
    faulty: bool = False
    """What the partner sent was bad, as this node itself found."""


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """What a peer sent was bad, outside a swap."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What a swap with this peer did to the model (core/verdict.py)."""

    peer: str
    verdict: Verdict
    exchange: bytes
    """It may still be under way."""


@dataclass(frozen=True, slots=True)
class Closing:
    """No more offers, no more calls; a swap under way may end. Rounds end with `reason`. If it is LEAVING, that is for
    good, and callers hear it; else it is until Resuming, and they are refused as `paused`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resuming:
    """The next boundary opens an offer again."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Settings
    | Boundary
    | Candidates
    | Called
    | CallerGone
    | Accepted
    | Appointed
    | Refused
    | Unanswered
    | SwapEnded
    | Misbehaved
    | Judged
    | Closing
    | Resuming
    | Tick
)


# ---- what to do ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Call:
    exchange: bytes
    peer: str
    patience_s: float
    deadline_s: float
    """For the answer. A call goes on over a boundary: the new offer replaces the old one in it."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Go on waiting for the answer to our call, for so long."""

    exchange: bytes
    deadline_s: float


@dataclass(frozen=True, slots=True)
class HangUp:
    exchange: bytes


@dataclass(frozen=True, slots=True)
class Accept:
    """Accept this caller; the swap of the open offer begins."""

    exchange: bytes
    peer: str
    round: int


@dataclass(frozen=True, slots=True)
class Appoint:
    """Tell this caller that the next offer is kept for it; Accept or Refuse follows when that offer opens."""

    exchange: bytes
    in_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    exchange: bytes
    reason: str
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Our call was accepted; the swap of the open offer, which may be a later one by now, begins."""

    exchange: bytes
    peer: str
    round: int


@dataclass(frozen=True, slots=True)
class EndRound:
    """The round is over: `reason` is None when it was committed, else why it went solo."""

    round: int
    reason: str | None
    partner: str | None = None
    applied: int = 0
    one_sided: int = 0
    further: bool = False
    """The offer stays open for a further partner; `CloseOffer` follows."""


@dataclass(frozen=True, slots=True)
class Further:
    """A further swap of a committed round was whole."""

    round: int
    partner: str
    swap: int
    """Which one of the round: 2 or more."""


@dataclass(frozen=True, slots=True)
class CloseOffer:
    """Nobody will swap the vector of this committed round any more."""

    round: int


Action = Call | Stay | HangUp | Accept | Appoint | Refuse | Begin | EndRound | Further | CloseOffer
