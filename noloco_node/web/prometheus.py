"""What `/metrics` says: the figures of a status view in Prometheus' text format, and whether a node is ready.

Knows no server and no node. A family is one line of a table below; it has at most one label, whose values are few
whatever happens: never a peer's id or name, and never a word that somebody else chose. So a swarm of thousands costs a
node no more series than one of two. What is not known yet is left out, which is how Prometheus likes it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from noloco_node.base.states import NodeState
from noloco_node.views.status import StatusView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = tuple(state for state in NodeState if state is not NodeState.SOLO)
PEER_STATES = (*(s for s in NodeState if s not in (NodeState.STARTING, NodeState.RENDEZVOUS)), "other")
"""What peers may say of themselves; a word that is not among these counts as `other`."""
WAYS = ("directly", "mapped", "relayed", "outgoing")
LEVELS = ("warning", "error")

GAUGE, COUNTER = "gauge", "counter"

Value = float | None
ByLabel = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Family:
    """Counters begin at nothing when a node starts, as Prometheus expects of them."""

    name: str
    kind: str
    help: str
    read: Callable[[StatusView], Value | ByLabel]
    label: str = ""
    """Where `read` gives a value for each of several: of what."""


def exposition(status: StatusView) -> bytes:
    families = EVERY_NODE if status.run_id is None else EVERY_NODE + WHO_TRAINS
    return "".join(line + "\n" for family in families for line in _lines(family, family.read(status))).encode()


def ready(status: StatusView) -> str | None:
    """Why a node is of no use yet, or any more; None: it is. A pause is its volunteer's wish, and passes."""
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


# ---- what needs more than a field of the view ----
def _one_of(values: Iterable[str], chosen: str) -> ByLabel:
    """As Prometheus shows a state: each that there is, and a 1 at the present one."""
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


EVERY_NODE = (
    Family("noloco_build_info", GAUGE, "The node's version.", lambda s: {s.version: 1}, "version"),
    Family("noloco_uptime_seconds", GAUGE, "Since the node's start.", lambda s: s.uptime_s),
    Family("noloco_state", GAUGE, "1 at the state that the node is in.", lambda s: _one_of(STATES, s.state), "state"),
    Family("noloco_health_findings", GAUGE, "What `noloco-node status` warns of.", _findings, "level"),
    Family(
        "noloco_reachability",
        GAUGE,
        "1 at how others can call this node; absent while unknown.",
        lambda s: _one_of(WAYS, s.reachable) if s.reachable else {},
        "state",
    ),
    Family("noloco_clock_skew_seconds", GAUGE, "How far the clock is ahead of the others'.", lambda s: s.skew_s),
    Family(
        "noloco_p2pd_restarts_total",
        COUNTER,
        "How often the network daemon had to be started again.",
        lambda s: s.network_restarts,
    ),
    Family("noloco_peers", GAUGE, "Other nodes that are seen, by their state.", _peers, "state"),
    Family(
        "noloco_known_runs",
        GAUGE,
        "Runs that a rendezvous knows.",
        lambda s: len(s.runs) if s.state == NodeState.RENDEZVOUS else None,
    ),
)

WHO_TRAINS = (
    Family("noloco_run_info", GAUGE, "The run that the node takes part in.", lambda s: _present(s.run), "run"),
    Family("noloco_device_info", GAUGE, "What it trains on.", lambda s: _present(s.device), "device"),
    # ---- training ----
    Family("noloco_parameters", GAUGE, "Of the model.", lambda s: s.parameters),
    Family("noloco_round", GAUGE, "Where the node stands in the run.", lambda s: s.round),
    Family("noloco_target_round", GAUGE, "The round at which the node stops.", lambda s: s.rounds_target),
    Family("noloco_step", GAUGE, "Where the replica stands in the run's schedule.", lambda s: s.step),
    Family("noloco_tokens_total", COUNTER, "Tokens trained on.", lambda s: s.tokens),
    Family("noloco_tokens_per_second", GAUGE, "Over the last inner phase.", lambda s: s.tokens_per_s),
    Family("noloco_loss", GAUGE, "Mean training loss of the last inner phase.", lambda s: s.loss),
    Family("noloco_eval_loss", GAUGE, "Loss on held-out data, when last evaluated.", lambda s: s.eval_loss),
    Family(
        "noloco_training_seconds_total",
        COUNTER,
        "Seconds of the training thread, by what they went into.",
        lambda s: s.time_s,
        "account",
    ),
    Family(
        "noloco_busy_ratio",
        GAUGE,
        "Share of the last minute that went into training steps; absent in a pause.",
        lambda s: s.busy_fraction_minute,
    ),
    Family(
        "noloco_stall_seconds",
        GAUGE,
        "What the last round took from the training.",
        lambda s: None if s.stall_ms is None else s.stall_ms / 1e3,
    ),
    Family(
        "noloco_rollbacks_total",
        COUNTER,
        "How often the model was broken and its weights became older ones.",
        lambda s: s.rolled_back,
    ),
    # ---- exchanges ----
    Family("noloco_rounds_committed_total", COUNTER, "Rounds with a partner.", lambda s: s.rounds.committed),
    Family("noloco_rounds_solo_total", COUNTER, "Rounds without, by why.", lambda s: s.rounds.by_reason, "reason"),
    Family("noloco_calls_total", COUNTER, "Calls made to find partners.", lambda s: s.calls),
    Family("noloco_exchange_sent_bytes_total", COUNTER, "Bytes of exchanges.", lambda s: s.bytes.sent),
    Family("noloco_exchange_received_bytes_total", COUNTER, "Bytes of exchanges.", lambda s: s.bytes.received),
    Family(
        "noloco_sent_bytes_per_parameter",
        GAUGE,
        "Bytes sent per parameter and committed round.",
        lambda s: s.bytes.per_param_round,
    ),
    Family(
        "noloco_swap_seconds",
        GAUGE,
        "How long the last committed round's swap took.",
        lambda s: s.last_round.seconds if s.last_round else None,
    ),
    Family(
        "noloco_resent_blocks_ratio",
        GAUGE,
        "Share of blocks that were sent again in the last swap.",
        lambda s: s.resent_block_fraction,
    ),
    Family(
        "noloco_relative_error_ratio",
        GAUGE,
        "Error of the partner's difference in the last swap, as the codec told it.",
        lambda s: s.relative_error,
    ),
    Family(
        "noloco_one_sided_fragments_total",
        COUNTER,
        "Fragments that this node applied and its partner perhaps did not.",
        lambda s: s.one_sided_fragments,
    ),
    Family("noloco_peer_faults_total", COUNTER, "How peers broke the protocol.", lambda s: s.faults, "reason"),
    # ---- what the volunteer gives ----
    Family("noloco_today_sent_bytes", GAUGE, "Since midnight.", lambda s: s.today.sent if s.today else None),
    Family("noloco_today_received_bytes", GAUGE, "Since midnight.", lambda s: s.today.received if s.today else None),
    Family("noloco_today_sent_limit_bytes", GAUGE, "Of a day.", lambda s: s.today.sent_limit if s.today else None),
    Family(
        "noloco_today_received_limit_bytes", GAUGE, "Of a day.", lambda s: s.today.received_limit if s.today else None
    ),
    Family("noloco_checkpoint_bytes", GAUGE, "What one takes.", lambda s: s.checkpoint.bytes if s.checkpoint else None),
    Family(
        "noloco_checkpoint_round",
        GAUGE,
        "Of the newest that was written since the start.",
        lambda s: s.checkpoint.saved_round if s.checkpoint else None,
    ),
    Family(
        "noloco_disk_free_bytes",
        GAUGE,
        "What checkpoints' disk has left.",
        lambda s: s.checkpoint.free_bytes if s.checkpoint else None,
    ),
)
