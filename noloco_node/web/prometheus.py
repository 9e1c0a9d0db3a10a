"""`/metrics`: a status view in Prometheus' text format; `/readyz`: whether the node is ready.

Each metric family is one entry of the table below. It has at most one label with few possible values: never a peer's id
or name, and never a word that another machine chose, so a swarm of thousands makes no more series than a swarm of two.
A figure that is not known yet is left out, as Prometheus recommends.

Not prometheus-client's, measured: a collector over the same table is as long as the lines that write the text here,
and importing the library takes 40 ms and 84 modules.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from noloco_node.base.states import AT_WORK, NodeState
from noloco_node.core.round import TOO_SLOW
from noloco_node.views.status import StatusView

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
    """Counters, which are named `_total`, begin at 0 when a node starts, as Prometheus expects. Those by reason begin
    with the first of each, as there are many reasons; what an alert asks for alone is there from the start."""

    name: str
    help: str
    read: str | Callable[[StatusView], Value | ByLabel]
    """A field of the view, or of a part of it that may be missing, as `today.sent`."""
    label: str = ""
    """The label's name, if `read` gives a value for each of several."""

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    def found(self, status: StatusView) -> Any:
        if not isinstance(self.read, str):
            return self.read(status)
        value: Any = status
        for field in self.read.split("."):
            value = None if value is None else getattr(value, field)
        return value


def exposition(status: StatusView) -> bytes:
    families = EVERY_NODE if status.run_id is None else EVERY_NODE + WHO_TRAINS
    return "".join(line + "\n" for family in families for line in _lines(family, family.found(status))).encode()


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


def _rate(status: StatusView) -> Value:
    """Which is summed over nodes: of one that lingers after its work, or is paused, it would count for ever."""
    return status.tokens_per_s if status.state in AT_WORK else None


def _solo(status: StatusView) -> ByLabel:
    return {TOO_SLOW: 0, **status.rounds.by_reason}


def _present(value: str | None) -> ByLabel:
    return {value: 1} if value else {}


EVERY_NODE = (
    Family("noloco_build_info", "The node's version.", lambda s: {s.version: 1}, "version"),
    Family("noloco_uptime_seconds", "Since the node's start.", "uptime_s"),
    Family("noloco_state", "1 at the state that the node is in.", lambda s: _one_of(STATES, s.state), "state"),
    Family("noloco_health_findings", "What `noloco-node status` warns of.", _findings, "level"),
    Family(
        "noloco_reachability",
        "1 at the way in which others can reach this node; absent while unknown.",
        lambda s: _one_of(WAYS, s.reachable) if s.reachable else {},
        "state",
    ),
    Family("noloco_clock_skew_seconds", "How far the clock is ahead of the others'.", "skew_s"),
    Family("noloco_p2pd_restarts_total", "How often the network daemon had to be started again.", "network_restarts"),
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
    Family("noloco_parameters", "Parameters of the model.", "parameters"),
    Family("noloco_round", "The node's round in the run.", "round"),
    Family("noloco_target_round", "The round at which the node stops.", "rounds_target"),
    Family("noloco_step", "The replica's step in the run's schedule.", "step"),
    Family("noloco_tokens", "Tokens trained on, over restarts; after a crash fewer.", "tokens"),
    Family("noloco_tokens_per_second", "Of the last inner phase; absent while no steps are made.", _rate),
    Family("noloco_loss", "Mean training loss of the last inner phase.", "loss"),
    Family("noloco_learning_rate", "Of the last inner phase's last step.", "learning_rate"),
    Family("noloco_gradient_norm", "Before clipping: the mean over the last inner phase.", "gradient_norm"),
    Family("noloco_mfu_ratio", "Share of the GPU's dense bf16 arithmetic that the model's products take.", "mfu"),
    Family("noloco_eval_loss", "Loss on held-out data, when last evaluated.", "eval_loss"),
    Family("noloco_training_seconds_total", "Seconds of the training thread, by account.", "time_s", "account"),
    Family(
        "noloco_busy_ratio",
        "Share of the last minute that the device worked at training steps; absent while none are made.",
        "busy_fraction_minute",
    ),
    Family(
        "noloco_stall_seconds",
        "Training time that the last round cost.",
        lambda s: None if s.stall_ms is None else s.stall_ms / 1e3,
    ),
    Family("noloco_device_memory_bytes", "The most of the GPU that training has taken so far.", "memory.device"),
    Family("noloco_device_memory_limit_bytes", "What it may take there.", "memory.device_limit"),
    Family("noloco_device_watts", "Power that the GPU draws, as its driver says.", "gpu.watts"),
    Family(
        "noloco_device_utilization_ratio",
        "Share of the last second in which the GPU did anything, as its driver says.",
        "gpu.utilization",
    ),
    Family("noloco_host_memory_bytes", "What the node's process has in memory.", "memory.host"),
    Family("noloco_rollbacks_total", "How often a broken model was replaced by older weights.", "rolled_back"),
    # ---- exchanges ----
    Family("noloco_rounds_committed_total", "Rounds with a partner.", "rounds.committed"),
    Family("noloco_rounds_solo_total", "Solo rounds, by reason.", _solo, "reason"),
    Family("noloco_calls_total", "Calls made to find partners.", "calls"),
    Family("noloco_exchange_sent_bytes_total", "Bytes sent in swaps.", "bytes.sent"),
    Family("noloco_exchange_received_bytes_total", "Bytes received in swaps.", "bytes.received"),
    Family("noloco_sent_bytes_per_parameter", "Bytes sent per parameter and committed round.", "bytes.per_param_round"),
    Family("noloco_swap_seconds", "How long the last committed round's swap took.", "last_round.seconds"),
    Family("noloco_resent_blocks_ratio", "Share of blocks that were resent in the last swap.", "resent_block_fraction"),
    Family(
        "noloco_relative_error_ratio",
        "Error of the partner's difference in the last swap, as the codec reported it.",
        "relative_error",
    ),
    Family(
        "noloco_one_sided_fragments_total",
        "Fragments that this node applied and its partner perhaps did not.",
        "one_sided_fragments",
    ),
    Family(
        "noloco_taken_back_total",
        "Partners' corrections that were taken back, because they had made the model worse.",
        "taken_back",
    ),
    Family(
        "noloco_quarantined_peers",
        "Peers that this node neither calls nor accepts for now, for what it saw of them.",
        "peers_quarantined",
    ),
    Family("noloco_peer_faults_total", "Protocol errors of peers, by kind.", "faults", "reason"),
    # ---- of a run with stages ----
    Family(
        "noloco_stage_info",
        "The stage that the node holds.",
        lambda s: {str(s.stage.number): 1} if s.stage else None,
        "stage",
    ),
    Family(
        "noloco_stage_nodes",
        "Nodes that work at each stage, as this one sees it.",
        lambda s: {str(stage): nodes for stage, nodes in enumerate(s.stage.nodes if s.stage else (), 1)},
        "stage",
    ),
    Family("noloco_micro_batches_passed_total", "Micro-batches whose gradient went into a step here.", "stage.passed"),
    Family("noloco_micro_batches_lost_total", "Those without an answer.", "stage.lost"),
    Family(
        "noloco_micro_batches_retried_total",
        "Calls that were made again, to another peer of the next stage.",
        "stage.retried",
    ),
    Family("noloco_micro_batches_under_way", "Those at the next stage now.", "stage.under_way"),
    Family("noloco_micro_batches_queued", "Those of the stage before that are here now.", "stage.queued"),
    Family("noloco_stage_sent_bytes_total", "Activations and gradients sent.", "stage.sent"),
    Family("noloco_stage_received_bytes_total", "Activations and gradients received.", "stage.received"),
    # ---- traffic of the day, disk ----
    Family("noloco_today_sent_bytes", "Bytes sent since midnight.", "today.sent"),
    Family("noloco_today_received_bytes", "Bytes received since midnight.", "today.received"),
    Family("noloco_today_sent_limit_bytes", "Daily limit of sent bytes.", "today.sent_limit"),
    Family("noloco_today_received_limit_bytes", "Daily limit of received bytes.", "today.received_limit"),
    Family("noloco_checkpoint_bytes", "Size of a checkpoint.", "checkpoint.bytes"),
    Family(
        "noloco_checkpoint_round", "Round of the newest checkpoint written since the start.", "checkpoint.saved_round"
    ),
    Family("noloco_disk_free_bytes", "Free space of the checkpoints' disk.", "checkpoint.free_bytes"),
)
