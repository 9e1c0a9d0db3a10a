"""What `peers` and `ping` show of others."""

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
    """The highest round of its peers."""


GONE = "gone"
"""The state of a peer without a presence record, which is listed while its quarantine lasts; its round is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    peer_id: str
    name: str
    state: str
    """One of base/states.py, or GONE."""
    round: int
    """As its presence record says, `last_seen_s` ago."""
    lag: int
    """Rounds behind this node when that was written, negative when it was ahead; seen from outside: behind the peer
    with the highest round."""
    via: str | None = None
    """`direct` or `relayed`: how the last stream with it went; None where there was none."""
    tokens_per_s: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    last_seen_s: float | None = None
    sent: int = 0
    received: int = 0
    exchanges: int = 0
    """Rounds committed together."""
    taken_back: int = 0
    """Its corrections that were taken back. This and what follows this node has seen itself."""
    refused: int = 0
    """Its calls and swaps that were refused for what it sent."""
    failed: int = 0
    """Swaps that broke."""
    quarantined_s: float = 0.0
    """For so long from now it is neither called nor accepted."""
    quarantined_why: str = ""
    """The quarantine's code."""
    run: str | None = None
    """Its run's name, where the peers of several may be listed."""
    stage: int = 0
    """That it holds, from 1; 0: the whole model."""


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
