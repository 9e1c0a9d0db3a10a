"""What `status` shows. README.md beside this file says what each field means; here is what it does not say. Each part
is filled by the module that owns its figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_node.views.peers import RunView


@dataclass(frozen=True, slots=True)
class Rounds:
    committed: int = 0
    solo: int = 0
    by_reason: Mapping[str, int] = field(default_factory=dict)
    """Solo rounds by their reason's code."""


@dataclass(frozen=True, slots=True)
class BytesView:
    sent: int = 0
    received: int = 0
    per_param_round: float | None = None
    """Bytes sent per parameter and committed round."""


@dataclass(frozen=True, slots=True)
class Today:
    """Bytes of swaps, state transfers and answers to look-ups since midnight, and what a volunteer allows."""

    sent: int = 0
    received: int = 0
    sent_limit: int | None = None
    received_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A node's own checkpoints."""

    bytes: int
    free_bytes: int | None = None
    saved_round: int | None = None
    """Round of the newest checkpoint written since the start."""
    resumed_round: int | None = None
    """Round of the checkpoint from which this node resumed."""


@dataclass(frozen=True, slots=True)
class LastRound:
    partner: str
    """Peer id."""
    seconds: float
    sent: int
    received: int
    resent_block_fraction: float = 0.0
    relative_error: float = 0.0
    """Coding error relative to u_j − u_i, as the codec estimates it."""


@dataclass(frozen=True, slots=True)
class LastTakenBack:
    partner: str
    """Peer id."""
    round: int
    """In which it had been applied."""
    loss_with: float | None
    """On held-out data, with the correction and without it; None where it was not finite."""
    loss_without: float | None


@dataclass(frozen=True, slots=True)
class Health:
    level: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Phase:
    part: float
    left_s: float | None = None
    """Seconds until its end, at its rate so far."""
    loss: float | None = None
    """Mean training loss so far."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryView:
    device: int | None = None
    device_limit: int | None = None
    """What it may take there."""
    host: int | None = None
    host_limit: int | None = None
    """What this machine, or this container, has."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """The card as its driver sees it, with what other programs do there; None where it does not say."""

    watts: float | None = None
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class SampleView:
    round: int
    """After which it was made."""
    prompt: str
    text: str
    """The continuation, without the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """Of a run that is cut into stages: the one that this node holds."""

    number: int
    """From 1."""
    stages: int
    nodes: tuple[int, ...] = ()
    """How many nodes work at each stage, this one included."""
    micro_batches_per_s: float | None = None
    """Lately."""
    passed: int = 0
    """Micro-batches whose gradient went into a step here."""
    under_way: int = 0
    """Those at the next stage now."""
    most_under_way: int = 0
    """Of the first stage: how many may be, as it was found by trying."""
    queued: int = 0
    lost: int = 0
    """Without an answer."""
    retried: int = 0
    """Calls that were made again, to another peer."""
    compared: int = 0
    answered: int = 0
    """For the stage before."""
    not_counted: int = 0
    not_believed: tuple[str, ...] = ()
    refused: int = 0
    sent: int = 0
    """Bytes of activations and gradients since the start."""
    received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    peer_id: str
    name: str
    version: str
    state: str
    """One of base/states.py, but SOLO shows as `training`."""
    run_id: str | None = None
    run: str | None = None
    amended: str | None = None
    round: int = 0
    rounds_target: int | None = None
    step: int = 0
    steps_target: int | None = None
    left_s: float | None = None
    phase: Phase | None = None
    """The one under way; the next figures are of the last complete one."""
    tokens: int = 0
    tokens_per_s: float | None = None
    loss: float | None = None
    """Mean training loss."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    mfu: float | None = None
    loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_first: float | None = None
    stage: StageView | None = None
    """None: this node holds the whole model."""
    device: str | None = None
    parameters: int | None = None
    memory: MemoryView = MemoryView()
    gpu: GpuView = GpuView()
    sample: SampleView | None = None
    partner: str | None = None
    waiting_for: str | None = None
    """What a node that is not training waits for, in words; while leaving, why that takes longer than 10 s."""
    busy_fraction: float | None = None
    busy_fraction_minute: float | None = None
    """Over the last minute; None where no steps are made."""
    time_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since training began, by what they went into: `step`, `data`, `boundary`, `apply`, `evaluate`,
    `sample`, `checkpoint`, `waiting` (for a partner, with blocking overlap), `paused`, `other`."""
    stall_ms: float | None = None
    """Training time that the last round cost: its boundary, and adding its corrections."""
    rounds: Rounds = Rounds()
    bytes: BytesView = BytesView()
    today: Today | None = None
    resent_block_fraction: float | None = None
    relative_error: float | None = None
    last_round: LastRound | None = None
    checkpoint: Checkpoints | None = None
    partners: Mapping[str, int] = field(default_factory=dict)
    calls: int = 0
    dht: Mapping[str, int] = field(default_factory=dict)
    one_sided_fragments: int = 0
    """Applied by this node and perhaps not by its partner: at most one a swap."""
    faults: Mapping[str, int] = field(default_factory=dict)
    rolled_back: int = 0
    taken_back: int = 0
    last_taken_back: LastTakenBack | None = None
    peers_quarantined: int = 0
    peers_seen: int = 0
    peers_by_state: Mapping[str, int] = field(default_factory=dict)
    reachable: str | None = None
    """`directly`, `mapped` (at a port of its router), `relayed` or `outgoing` (it calls others only); None while
    unknown."""
    network_restarts: int = 0
    uptime_s: float = 0.0
    addresses: tuple[str, ...] = ()
    join: str | None = None
    """The command by which others join; None while there is nothing to join."""
    web: str | None = None
    skew_s: float | None = None
    skew_witnesses: int = 0
    """Places of peers that agree on it: a single host's own clock may be wrong."""
    runs: tuple[RunView, ...] = ()
    health: tuple[Health, ...] = ()
    last_error: str | None = None
