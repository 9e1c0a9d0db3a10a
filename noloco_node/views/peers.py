"""What `peers` and `ping` show of others. README.md beside this file says what each field of a row means."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as seen from outside: by a rendezvous, or by `peers --bootstrap`."""

    run_id: str
    run: str
    """Its label: name and first digits of its id."""
    author: str
    """Peer id."""
    rounds: int
    """The run's budget."""
    peers: int = 0
    training: int = 0
    round: int = 0
    """The middle one of the rounds of those that train; if none does, of all its peers."""


GONE = "gone"
"""The state of a peer without a presence record, which is listed while its quarantine lasts; its round is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    peer_id: str
    name: str
    state: str
    """One of base/states.py, or GONE."""
    round: int
    lag: int
    via: str | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    last_seen_s: float | None = None
    sent: int = 0
    received: int = 0
    exchanges: int = 0
    taken_back: int = 0
    """This and what follows, up to the quarantine, this node has seen itself."""
    refused: int = 0
    failed: int = 0
    quarantined_s: float = 0.0
    quarantined_why: str = ""
    run: str | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class PeersView:
    peers: tuple[PeerRow, ...] = ()
    runs: tuple[RunView, ...] = ()
    """The runs of these peers, where seen from outside."""


@dataclass(frozen=True, slots=True)
class PingView:
    """A round trip to a peer."""

    peer_id: str
    seconds: float | None = None
    """None where no answer came."""
    via: str | None = None
    """`direct` or `relayed`."""
    failure: str | None = None
    """Why no answer came: a code."""
