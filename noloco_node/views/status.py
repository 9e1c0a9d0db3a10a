"""What `status` shows. Each part is filled by the module that owns its figures."""

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
    """Bytes of swaps, since the node's start."""
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
    """Size of one checkpoint."""
    free_bytes: int | None = None
    """Free space on the disk."""
    saved_round: int | None = None
    """Round of the newest checkpoint written since the start."""
    resumed_round: int | None = None
    """Round of the checkpoint from which this node resumed."""


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
    """Coding error relative to u_j − u_i, as the codec estimates it."""


@dataclass(frozen=True, slots=True)
class LastTakenBack:
    """The last correction that was taken back, because it had made the model worse."""

    partner: str
    """Peer id."""
    round: int
    """In which it had been applied."""
    loss_with: float | None
    """On held-out data, with the correction and without it; None where it was not finite."""
    loss_without: float | None


@dataclass(frozen=True, slots=True)
class Health:
    """A warning with its remedy."""

    level: str
    """`warning` or `error`."""
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Phase:
    """The inner phase under way."""

    part: float
    """The share that is done, 0 to 1."""
    left_s: float | None = None
    """Seconds until its end, at its rate so far."""
    loss: float | None = None
    """Mean training loss so far."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Bytes."""

    device: int | None = None
    """The most that training has taken of the accelerator so far; None without one."""
    device_limit: int | None = None
    """What it may take there."""
    host: int | None = None
    """What the node's process takes now."""
    host_limit: int | None = None
    """What this machine, or this container, has."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """The card as its driver sees it, with what other programs do there; None where it does not say."""

    watts: float | None = None
    utilization: float | None = None
    """The share of the last second or less in which it did anything, 0 to 1."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """A text that the model continued."""

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
    """Those of the stage before that are here now."""
    lost: int = 0
    """Without an answer."""
    retried: int = 0
    """Calls that were made again, to another peer."""
    compared: int = 0
    """Calls to a second or third peer for the same micro-batch, to compare what they answer."""
    answered: int = 0
    """For the stage before."""
    not_counted: int = 0
    """Of these, micro-batches that this node did not learn from."""
    not_believed: tuple[str, ...] = ()
    """Peers of the next stage that are not asked any more because they answered otherwise than the others, and peers
    of the stage before whose micro-batches are much worse than the others'."""
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
    """Its label: name and first digits of its id."""
    amended: str | None = None
    """The version of what its author changed in it later, and what that is, in words."""
    round: int = 0
    rounds_target: int | None = None
    """The round at which this node stops, if that is known."""
    step: int = 0
    steps_target: int | None = None
    """The step at which this node stops; None where phases last so many seconds."""
    left_s: float | None = None
    """Seconds until then, at the pace of the last rounds; None in a pause."""
    phase: Phase | None = None
    """The one under way; the next figures are of the last complete one."""
    tokens: int = 0
    """That this node has trained on, over restarts."""
    tokens_per_s: float | None = None
    loss: float | None = None
    """Mean training loss."""
    learning_rate: float | None = None
    """Of the phase's last step."""
    gradient_norm: float | None = None
    """Before clipping: the mean over the phase's steps."""
    mfu: float | None = None
    """The share of the device's arithmetic that the model's products take; None on a CPU and on an unknown card."""
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
    """The latest, where the run asks for samples."""
    partner: str | None = None
    """Peer id of the one being swapped with, else of the last one."""
    waiting_for: str | None = None
    """What a node that is not training waits for, in words; while leaving, why that takes longer than 10 s."""
    busy_fraction: float | None = None
    """Share of the time that the device worked at steps, since training began; pauses left out."""
    busy_fraction_minute: float | None = None
    """The same over the last minute; None where that was a pause."""
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
    """Of the last round, like resent_block_fraction."""
    last_round: LastRound | None = None
    checkpoint: Checkpoints | None = None
    partners: Mapping[str, int] = field(default_factory=dict)
    """Rounds committed together, by peer id."""
    calls: int = 0
    """Calls made to find partners."""
    dht: Mapping[str, int] = field(default_factory=dict)
    """`look_ups` and `stores` in the directory of peers, and `calls` to other nodes for these and for its upkeep."""
    one_sided_fragments: int = 0
    """Applied by this node and perhaps not by its partner: at most one a swap."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """How often peers broke the protocol, by the code."""
    rolled_back: int = 0
    """How often the weights were not finite and were replaced by older ones."""
    taken_back: int = 0
    """Corrections that were taken back."""
    last_taken_back: LastTakenBack | None = None
    peers_quarantined: int = 0
    """Peers that this node neither calls nor accepts for now."""
    peers_seen: int = 0
    peers_by_state: Mapping[str, int] = field(default_factory=dict)
    """Peers seen, by the state in their presence records."""
    reachable: str | None = None
    """`directly`, `mapped` (at a port of its router), `relayed` or `outgoing` (it calls others only); None while
    unknown."""
    network_restarts: int = 0
    """How often the network daemon was restarted."""
    uptime_s: float = 0.0
    addresses: tuple[str, ...] = ()
    join: str | None = None
    """The command by which others join; None while there is nothing to join."""
    web: str | None = None
    """Address of this node's page, if it has one."""
    skew_s: float | None = None
    """How far this machine's clock is ahead of the others', at least."""
    skew_witnesses: int = 0
    """Places of peers that agree on it: a single host's own clock may be wrong."""
    runs: tuple[RunView, ...] = ()
    """The runs that a rendezvous knows."""
    health: tuple[Health, ...] = ()
    last_error: str | None = None
