"""What `status`, `peers` and the live views show, as frozen dataclasses, with JSON in and out.

This is the schema: a field that is added keeps the number, one that changes its meaning raises it. Reading is lenient
(what is unknown is skipped, what is missing has its default), because the two ends may be of different versions for
as long as an old node runs. Numbers that JSON cannot hold (NaN, infinities) become null.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from noloco_node.errors import Incompatible

SCHEMA = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rounds:
    committed: int = 0
    solo: int = 0
    by_reason: Mapping[str, int] = field(default_factory=dict)
    """Solo rounds by their reason's code."""


@dataclass(frozen=True, slots=True)
class BytesView:
    sent: int = 0
    """Bytes of exchanges, since the node's start."""
    received: int = 0
    per_param_round: float | None = None
    """Bytes sent per parameter and committed round."""


@dataclass(frozen=True, slots=True)
class Today:
    """Bytes of swaps and state transfers since midnight, and what a volunteer allows."""

    sent: int = 0
    received: int = 0
    sent_limit: int | None = None
    received_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What a node keeps of its own state on disk."""

    bytes: int
    """Of one checkpoint."""
    free_bytes: int | None = None
    """What the disk has left."""
    saved_round: int | None = None
    """Of the newest that was written since the start."""
    resumed_round: int | None = None
    """Of the one from which this node went on."""


@dataclass(frozen=True, slots=True)
class LastRound:
    """The last round that was committed."""

    partner: str
    """Peer id."""
    seconds: float
    sent: int
    received: int
    resent_block_fraction: float = 0.0
    relative_error: float = 0.0
    """Of the partner's difference, as the codec told it."""


@dataclass(frozen=True, slots=True)
class Health:
    """Something that wants attention."""

    level: str
    """`warning` or `error`."""
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as somebody sees it who only looks on."""

    run_id: str
    run: str
    """As people call it: name and first digits of its id."""
    author: str
    """Peer id."""
    rounds: int
    """The run's budget."""
    peers: int = 0
    training: int = 0
    round: int = 0
    """Of the one that is furthest."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The inner phase that has begun."""

    part: float
    """Done, 0 to 1."""
    left_s: float | None = None
    """Until its end, as fast as it went so far."""
    loss: float | None = None
    """The mean so far."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    peer_id: str
    name: str
    version: str
    state: str
    """`starting`, `joining`, `training`, `paused`, `leaving`, `finished`; `rendezvous` where nothing is trained."""
    run_id: str | None = None
    run: str | None = None
    """The run as people call it: name and first digits of its id."""
    round: int = 0
    rounds_target: int | None = None
    """The round at which this node stops, if that is known."""
    step: int = 0
    phase: Phase | None = None
    """The one under way; the next figures are of the last one that is over."""
    tokens: int = 0
    tokens_per_s: float | None = None
    loss: float | None = None
    """Mean training loss."""
    loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_first: float | None = None
    device: str | None = None
    parameters: int | None = None
    partner: str | None = None
    """Peer id of the one being swapped with, else of the last one."""
    waiting_for: str | None = None
    """What a node that is not training waits for, in words; one that leaves, what keeps it for longer than 10 s."""
    busy_fraction: float | None = None
    """Share of the time that the accelerator trained, since training began; pauses left out."""
    busy_fraction_minute: float | None = None
    """The same over the last minute; None where that was a pause."""
    time_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since training began, by what they went into: `step`, `data`, `boundary`, `apply`, `evaluate`,
    `checkpoint`, `waiting` (for a partner, with blocking overlap), `paused`, `other`."""
    stall_ms: float | None = None
    """What the last round took from the training: its boundary, and the corrections that were added."""
    rounds: Rounds = Rounds()
    bytes: BytesView = BytesView()
    today: Today | None = None
    resent_block_fraction: float | None = None
    relative_error: float | None = None
    """Of the last round, as is resent_block_fraction."""
    last_round: LastRound | None = None
    checkpoint: Checkpoints | None = None
    partners: Mapping[str, int] = field(default_factory=dict)
    """Rounds committed together, by peer id."""
    calls: int = 0
    """Calls made to find partners."""
    one_sided_fragments: int = 0
    """That this node applied and its partner perhaps did not: at most one a swap."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """How often peers broke the protocol, by the code."""
    rolled_back: int = 0
    """How often the model was broken, and its weights became older ones again."""
    peers_seen: int = 0
    peers_by_state: Mapping[str, int] = field(default_factory=dict)
    """The same, by the state that each says it is in."""
    reachable: str | None = None
    """`directly`, `mapped` (at a port of its router), `relayed` or `outgoing` (not at all: it calls others); None while
    unknown."""
    network_restarts: int = 0
    """How often the network daemon had to be started again."""
    uptime_s: float = 0.0
    addresses: tuple[str, ...] = ()
    join: str | None = None
    """The line by which others join; None while there is nothing to join."""
    web: str | None = None
    """Where this node's page is, if it has one."""
    skew_s: float | None = None
    """How far this machine's clock is ahead of the others', as far as that is beyond doubt."""
    skew_witnesses: int = 0
    """Peers that say so: a single one may be the one whose clock is wrong."""
    runs: tuple[RunView, ...] = ()
    """Those that a rendezvous knows."""
    health: tuple[Health, ...] = ()
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    peer_id: str
    name: str
    state: str
    round: int
    lag: int
    """Rounds that it is behind this node, negative when it is ahead; seen from outside, behind the furthest."""
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
    run: str | None = None
    """Its run's name, where the peers of several may be listed."""


@dataclass(frozen=True, slots=True)
class PeersView:
    peers: tuple[PeerRow, ...] = ()
    runs: tuple[RunView, ...] = ()
    """Seen from outside: those whose peers they are."""


@dataclass(frozen=True, slots=True)
class PingView:
    """One round trip to a peer."""

    peer_id: str
    seconds: float | None = None
    """None where none came back."""
    via: str | None = None
    """`direct` or `relayed`."""
    failure: str | None = None
    """Why none came back: a code."""


@dataclass(frozen=True, slots=True)
class GatheredState:
    """The slow weights of one node, in a file of fp32 numbers."""

    path: str
    peer_id: str
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class GatherView:
    """How far the fetching of several nodes' weights is."""

    run_id: str = ""
    layout: str = ""
    """What the numbers mean: a digest, in hexadecimal."""
    doing: str = ""
    states: tuple[GatheredState, ...] = ()
    """This node's own first."""
    skipped: tuple[str, ...] = ()
    """Who gave none, and why."""
    done: bool = False
    failure: str | None = None
    """A sentence: nothing came."""
    exit_code: int = 1
    """Of the failure."""


@dataclass(frozen=True, slots=True)
class Point:
    """The end of one inner phase of this node."""

    at: float
    """Wall-clock seconds, here and below; for people only."""
    round: int
    step: int
    loss: float | None = None
    eval_loss: float | None = None
    """On held-out data, where this round was evaluated."""
    swarm_loss: float | None = None
    """Mean over the peers that were seen training then, this node included."""
    swarm_eval_loss: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the timeline."""

    kind: str
    """`phase`, `swap` (committed) or `solo` (a round that ended without a whole swap)."""
    round: int
    began: float
    ended: float
    partner: str | None = None
    """Peer id."""
    reason: str | None = None
    """Why a solo is one."""
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """What went over the network in the second before."""

    at: float
    sent_per_s: float
    received_per_s: float


@dataclass(frozen=True, slots=True)
class MeetingView:
    """Rounds committed by two peers, as far as this node has seen or been told."""

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
    """What happened lately; each tuple in the order of time, none longer than a few hundred."""

    points: tuple[Point, ...] = ()
    """Of the whole run as far as this node took part; thinned out when there are many."""
    pieces: tuple[Piece, ...] = ()
    rates: tuple[Rate, ...] = ()
    meetings: tuple[MeetingView, ...] = ()
    said: tuple[Said, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """Of every peer id above."""


View = StatusView | PeersView | HistoryView | PingView | GatherView


def document(view: View) -> dict[str, Any]:
    """The view as a JSON-ready document."""
    return {"schema": SCHEMA, **plain(view)}


def to_json(view: View) -> str:
    return json.dumps(document(view), allow_nan=False)


def status_from_json(text: str) -> StatusView:
    return _read(StatusView, text)


def peers_from_json(text: str) -> PeersView:
    return _read(PeersView, text)


def ping_from_json(text: str) -> PingView:
    return _read(PingView, text)


def gather_from_json(text: str) -> GatherView:
    return _read(GatherView, text)


def history_from_json(text: str) -> HistoryView:
    return _read(HistoryView, text)


def _read(kind: type[T], text: str) -> T:
    try:
        written = json.loads(text)
        if written["schema"] != SCHEMA:
            raise Incompatible(f"the running node speaks schema {written['schema']}, this command {SCHEMA}: restart it")
        return _build(kind, written)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Incompatible("the running node's answer makes no sense to this version: restart the node") from error


def _build(kind: type[T], written: Mapping[str, Any]) -> T:
    known = ((name, of, written[name]) for name, of in _readers(kind) if name in written)  # type: ignore[arg-type]
    return kind(**{name: value if of is None else of(value) for name, of, value in known})


@cache
def _readers(kind: type[Any]) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """How each field is read; None where JSON's own value is the field's: asking types anew takes most of the time."""
    hints = get_type_hints(kind)
    return tuple((f.name, _reader(hints[f.name])) for f in fields(kind))


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    if hint in (str, int, float, float | None, str | None, int | None):
        return None
    return partial(_value, hint)


def _value(hint: Any, value: Any) -> Any:
    """Dataclasses and tuples of them, rebuilt; everything else as JSON left it."""
    if value is None:
        return None
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], item) for item in value)
    inner = next((arg for arg in (hint, *get_args(hint)) if is_dataclass(arg)), None)
    return value if inner is None else _build(inner, value)  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Ready for JSON, in one pass: a history has ten thousand values, and the node that tells it has more to do."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {name: plain(getattr(value, name)) for name in _field_names(type(value))}  # type: ignore[arg-type]


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))
