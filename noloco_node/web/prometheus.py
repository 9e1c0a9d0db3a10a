"""`/metrics`: a status view in Prometheus' text format; `/readyz`: whether the node is ready.

Each metric family is one entry of the table below. It has at most one label with few possible values: never a peer's id
or name, and never a word that another machine chose, so a swarm of thousands makes no more series than a swarm of two.
A figure that is not known yet is left out, as Prometheus recommends.

Not prometheus-client's, measured: a collector over the same table is as long as the 35 lines that write the text here,
and importing the library takes 40 ms and 84 modules.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from noloco_node.base.states import NodeState
from noloco_node.views.status import StageView, StatusView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = tuple(state for state in NodeState if state is not NodeState.SOLO)
PEER_STATES = (*(s for s in NodeState if s not in (NodeState.STARTING, NodeState.RENDEZVOUS)), "other")
"""The states that peers report; any other word counts as `other`."""
WAYS = ("directly", "mapped", "relayed", "outgoing")
LEVELS = ("warning", "error")

Value = float | None
ByLabel = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Family:
    """Counters, which are named `_total`, begin at 0 when a node starts, as Prometheus expects."""

    name: str
    help: str
    read: Callable[[StatusView], Value | ByLabel]
    label: str = ""
    """The label's name, if `read` gives a value for each of several."""

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def exposition(status: StatusView) -> bytes:
    families = EVERY_NODE if status.run_id is None else EVERY_NODE + WHO_TRAINS
    return "".join(line + "\n" for family in families for line in _lines(family, family.read(status))).encode()


def ready(status: StatusView) -> str | None:
    """Why a node does not train; None: it is ready. A paused node is ready too: its user wanted the pause."""
    if status.state in (NodeState.STARTING, NodeState.JOINING, NodeState.LEAVING):
        return status.state + (f", waiting for {status.waiting_for}" if status.waiting_for else "")
    return None


def _lines(family: Family, found: Value | ByLabel) -> Iterator[str]:
    if isinstance(found, Mapping):
        samples = [(f'{{{family.label}="{_escaped(value)}"}}', number) for value, number in found.items()]
    else:
        samples = [] if found is None else [("", found)]
    if samples:
        yield f"# HELP {family.name} {family.help}"
        yield f"# TYPE {family.name} {family.kind}"
    for labels, number in samples:
        yield f"{family.name}{labels} {_number(number)}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(number: float) -> str:
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"


# ---- values that are not simply a field of the view ----
def _one_of(values: Iterable[str], chosen: str) -> ByLabel:
    """As Prometheus shows a state: a series for each possible one, and 1 at the present one."""
    return {value: float(value == chosen) for value in values}


def _findings(status: StatusView) -> ByLabel:
    return {level: sum(finding.level == level for finding in status.health) for level in LEVELS}


def _peers(status: StatusView) -> ByLabel:
    counts = dict.fromkeys(PEER_STATES, 0)
    for state, peers in status.peers_by_state.items():
        counts[state if state in counts else "other"] += peers
    return counts


def _present(value: str | None) -> ByLabel:
    return {value: 1} if value else {}


def _of_stage(read: Callable[[StageView], Value | ByLabel]) -> Callable[[StatusView], Value | ByLabel]:
    return lambda status: read(status.stage) if status.stage else None


EVERY_NODE = (
    Family("noloco_build_info", "The node's version.", lambda s: {s.version: 1}, "version"),
    Family("noloco_uptime_seconds", "Since the node's start.", lambda s: s.uptime_s),
    Family("noloco_state", "1 at the state that the node is in.", lambda s: _one_of(STATES, s.state), "state"),
    Family("noloco_health_findings", "What `noloco-node status` warns of.", _findings, "level"),
    Family(
        "noloco_reachability",
        "1 at the way in which others can reach this node; absent while unknown.",
        lambda s: _one_of(WAYS, s.reachable) if s.reachable else {},
        "state",
    ),
    Family("noloco_clock_skew_seconds", "How far the clock is ahead of the others'.", lambda s: s.skew_s),
    Family(
        "noloco_p2pd_restarts_total",
        "How often the network daemon had to be started again.",
        lambda s: s.network_restarts,
    ),
    Family("noloco_peers", "Other nodes, by their state.", _peers, "state"),
    Family(
        "noloco_known_runs",
        "Runs that a rendezvous knows.",
        lambda s: len(s.runs) if s.state == NodeState.RENDEZVOUS else None,
    ),
)

WHO_TRAINS = (
    Family("noloco_run_info", "The run that the node takes part in.", lambda s: _present(s.run), "run"),
    Family("noloco_device_info", "What it trains on.", lambda s: _present(s.device), "device"),
    # ---- training ----
    Family("noloco_parameters", "Parameters of the model.", lambda s: s.parameters),
    Family("noloco_round", "The node's round in the run.", lambda s: s.round),
    Family("noloco_target_round", "The round at which the node stops.", lambda s: s.rounds_target),
    Family("noloco_step", "The replica's step in the run's schedule.", lambda s: s.step),
    Family("noloco_tokens", "Tokens trained on, over restarts; after a crash fewer.", lambda s: s.tokens),
    Family("noloco_tokens_per_second", "Tokens per second of the last inner phase.", lambda s: s.tokens_per_s),
    Family("noloco_loss", "Mean training loss of the last inner phase.", lambda s: s.loss),
    Family("noloco_learning_rate", "Of the last inner phase's last step.", lambda s: s.learning_rate),
    Family("noloco_gradient_norm", "Before clipping: the mean over the last inner phase.", lambda s: s.gradient_norm),
    Family(
        "noloco_mfu_ratio",
        "Share of the GPU's dense bf16 arithmetic that the model's products take.",
        lambda s: s.mfu,
    ),
    Family("noloco_eval_loss", "Loss on held-out data, when last evaluated.", lambda s: s.eval_loss),
    Family(
        "noloco_training_seconds_total", "Seconds of the training thread, by account.", lambda s: s.time_s, "account"
    ),
    Family(
        "noloco_busy_ratio",
        "Share of the last minute that the device worked at training steps; absent in a pause.",
        lambda s: s.busy_fraction_minute,
    ),
    Family(
        "noloco_stall_seconds",
        "Training time that the last round cost.",
        lambda s: None if s.stall_ms is None else s.stall_ms / 1e3,
    ),
    Family(
        "noloco_device_memory_bytes", "The most of the GPU that training has taken so far.", lambda s: s.memory.device
    ),
    Family("noloco_device_memory_limit_bytes", "What it may take there.", lambda s: s.memory.device_limit),
    Family("noloco_device_watts", "Power that the GPU draws, as its driver says.", lambda s: s.gpu.watts),
    Family(
        "noloco_device_utilization_ratio",
        "Share of the last second in which the GPU did anything, as its driver says.",
        lambda s: s.gpu.utilization,
    ),
    Family("noloco_host_memory_bytes", "What the node's process has in memory.", lambda s: s.memory.host),
    Family(
        "noloco_rollbacks_total", "How often a broken model was replaced by older weights.", lambda s: s.rolled_back
    ),
    # ---- exchanges ----
    Family("noloco_rounds_committed_total", "Rounds with a partner.", lambda s: s.rounds.committed),
    Family("noloco_rounds_solo_total", "Solo rounds, by reason.", lambda s: s.rounds.by_reason, "reason"),
    Family("noloco_calls_total", "Calls made to find partners.", lambda s: s.calls),
    Family("noloco_exchange_sent_bytes_total", "Bytes sent in swaps.", lambda s: s.bytes.sent),
    Family("noloco_exchange_received_bytes_total", "Bytes received in swaps.", lambda s: s.bytes.received),
    Family(
        "noloco_sent_bytes_per_parameter",
        "Bytes sent per parameter and committed round.",
        lambda s: s.bytes.per_param_round,
    ),
    Family(
        "noloco_swap_seconds",
        "How long the last committed round's swap took.",
        lambda s: s.last_round.seconds if s.last_round else None,
    ),
    Family(
        "noloco_resent_blocks_ratio",
        "Share of blocks that were resent in the last swap.",
        lambda s: s.resent_block_fraction,
    ),
    Family(
        "noloco_relative_error_ratio",
        "Error of the partner's difference in the last swap, as the codec reported it.",
        lambda s: s.relative_error,
    ),
    Family(
        "noloco_one_sided_fragments_total",
        "Fragments that this node applied and its partner perhaps did not.",
        lambda s: s.one_sided_fragments,
    ),
    Family(
        "noloco_taken_back_total",
        "Partners' corrections that were taken back, because they had made the model worse.",
        lambda s: s.taken_back,
    ),
    Family(
        "noloco_quarantined_peers",
        "Peers that this node neither calls nor accepts for now, for what it saw of them.",
        lambda s: s.peers_quarantined,
    ),
    Family("noloco_peer_faults_total", "Protocol errors of peers, by kind.", lambda s: s.faults, "reason"),
    # ---- of a run with stages ----
    Family("noloco_stage_info", "The stage that the node holds.", _of_stage(lambda s: {str(s.number): 1}), "stage"),
    Family(
        "noloco_stage_nodes",
        "Nodes that work at each stage, as this one sees it.",
        _of_stage(lambda s: {str(stage): nodes for stage, nodes in enumerate(s.nodes, 1)}),
        "stage",
    ),
    Family(
        "noloco_micro_batches_passed_total",
        "Micro-batches whose gradient went into a step here.",
        _of_stage(lambda s: s.passed),
    ),
    Family("noloco_micro_batches_lost_total", "Those without an answer.", _of_stage(lambda s: s.lost)),
    Family(
        "noloco_micro_batches_retried_total",
        "Calls that were made again, to another peer of the next stage.",
        _of_stage(lambda s: s.retried),
    ),
    Family("noloco_micro_batches_under_way", "Those at the next stage now.", _of_stage(lambda s: s.under_way)),
    Family(
        "noloco_micro_batches_queued", "Those of the stage before that are here now.", _of_stage(lambda s: s.queued)
    ),
    Family("noloco_stage_sent_bytes_total", "Activations and gradients sent.", _of_stage(lambda s: s.sent)),
    Family("noloco_stage_received_bytes_total", "Activations and gradients received.", _of_stage(lambda s: s.received)),
    # ---- traffic of the day, disk ----
    Family("noloco_today_sent_bytes", "Bytes sent since midnight.", lambda s: s.today.sent if s.today else None),
    Family(
        "noloco_today_received_bytes", "Bytes received since midnight.", lambda s: s.today.received if s.today else None
    ),
    Family(
        "noloco_today_sent_limit_bytes", "Daily limit of sent bytes.", lambda s: s.today.sent_limit if s.today else None
    ),
    Family(
        "noloco_today_received_limit_bytes",
        "Daily limit of received bytes.",
        lambda s: s.today.received_limit if s.today else None,
    ),
    Family("noloco_checkpoint_bytes", "Size of a checkpoint.", lambda s: s.checkpoint.bytes if s.checkpoint else None),
    Family(
        "noloco_checkpoint_round",
        "Round of the newest checkpoint written since the start.",
        lambda s: s.checkpoint.saved_round if s.checkpoint else None,
    ),
    Family(
        "noloco_disk_free_bytes",
        "Free space of the checkpoints' disk.",
        lambda s: s.checkpoint.free_bytes if s.checkpoint else None,
    ),
)
