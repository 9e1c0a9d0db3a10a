"""The states of a node, as used in status, in presence records and by the node itself."""

from enum import StrEnum


class NodeState(StrEnum):
    STARTING = "starting"
    JOINING = "joining"
    """Has a run, and waits for data, for the model, or for a peer's state."""
    TRAINING = "training"
    SOLO = "solo"
    """Trains, but offers no rounds: the day's quota is used up. `peers` shows it, `status` shows `training`. A stage
    does not train without others, nor does it answer them."""
    PAUSED = "paused"
    LEAVING = "leaving"
    FINISHED = "finished"
    RENDEZVOUS = "rendezvous"
    """Trains nothing: others find each other through it."""


ON_THE_WAY = frozenset({NodeState.STARTING, NodeState.JOINING})
"""Those from which a node comes to training, unless something fails."""
AT_WORK = frozenset({NodeState.TRAINING, NodeState.SOLO})
"""The states in which a node makes inner steps."""
AT_REST = frozenset({NodeState.PAUSED, NodeState.FINISHED})
"""Those in which it makes none, but has weights to send."""
SERVES_STAGE = frozenset({NodeState.TRAINING, NodeState.FINISHED})
"""Those in which a node computes its stage for the others."""
HELD_BACK = frozenset({NodeState.SOLO, NodeState.PAUSED})
"""Those to which its volunteer's limits hold a node: it computes no stage then."""
HAS_WEIGHTS = AT_WORK | AT_REST
