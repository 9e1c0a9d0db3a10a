"""What `status` and `peers` show, as frozen dataclasses, with JSON in and out.

This is the schema: a field that is added keeps the number, one that changes its meaning raises it. Reading is lenient
(what is unknown is skipped, what is missing has its default), because the two ends may be of different versions for
as long as an old node runs. Numbers that JSON cannot hold (NaN, infinities) become null.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
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
class Traffic:
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
    tokens: int = 0
    tokens_per_s: float | None = None
    loss: float | None = None
    """Mean training loss of the last inner phase."""
    loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_first: float | None = None
    device: str | None = None
    parameters: int | None = None
    partner: str | None = None
    """Peer id of the one being swapped with, else of the last one."""
    waiting_for: str | None = None
    """What a node that is not training waits for, in words."""
    busy_fraction: float | None = None
    """Share of the time that the accelerator trained, since training began; pauses left out."""
    busy_fraction_minute: float | None = None
    """The same over the last minute; None where that was a pause."""
    time_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since training began, by what they went into: `step`, `boundary`, `apply`, `evaluate`, `checkpoint`,
    `waiting` (for a partner, with blocking overlap), `paused`, `other`."""
    stall_ms: float | None = None
    """What the last round took from the training: its boundary, and the corrections that were added."""
    rounds: Rounds = Rounds()
    bytes: Traffic = Traffic()
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
    peers_seen: int = 0
    reachable: str | None = None
    """`directly`, `mapped` (at a port of its router), `relayed` or `outgoing` (not at all: it calls others); None while
    unknown."""
    uptime_s: float = 0.0
    addresses: tuple[str, ...] = ()
    health: tuple[Health, ...] = ()
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    peer_id: str
    name: str
    state: str
    round: int
    lag: int
    """Rounds that it is behind this node; negative when it is ahead."""
    via: str | None = None
    """`direct` or `relayed`: how the last stream with it went; None where there was none."""
    tokens_per_s: float | None = None
    loss: float | None = None
    last_seen_s: float | None = None
    sent: int = 0
    received: int = 0
    exchanges: int = 0
    """Rounds committed together."""


@dataclass(frozen=True, slots=True)
class PeersView:
    peers: tuple[PeerRow, ...] = ()


def document(view: StatusView | PeersView) -> dict[str, Any]:
    """The view as a JSON-ready document."""
    plain = _finite(asdict(view))
    return {"schema": SCHEMA, **plain}


def to_json(view: StatusView | PeersView) -> str:
    return json.dumps(document(view), allow_nan=False)


def status_from_json(text: str) -> StatusView:
    return _read(StatusView, text)


def peers_from_json(text: str) -> PeersView:
    return _read(PeersView, text)


def _read(kind: type[T], text: str) -> T:
    try:
        written = json.loads(text)
        if written["schema"] != SCHEMA:
            raise Incompatible(f"the running node speaks schema {written['schema']}, this command {SCHEMA}: restart it")
        return _build(kind, written)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Incompatible("the running node's answer makes no sense to this version: restart the node") from error


def _build(kind: type[T], written: Mapping[str, Any]) -> T:
    hints = get_type_hints(kind)
    known = {f.name: written[f.name] for f in fields(kind) if f.name in written}  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], value) for name, value in known.items()})


def _value(hint: Any, value: Any) -> Any:
    """Dataclasses and tuples of them, rebuilt; everything else as JSON left it."""
    if value is None:
        return None
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], item) for item in value)
    inner = next((arg for arg in (hint, *get_args(hint)) if is_dataclass(arg)), None)
    return value if inner is None else _build(inner, value)  # type: ignore[arg-type]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
