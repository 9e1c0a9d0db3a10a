"""What a node is started for. The command line makes one, node/main.py acts on it."""

from dataclasses import dataclass

from noloco_node.run.manifest import Signed


@dataclass(frozen=True, slots=True)
class Start:
    """The first node of a run: it brings the manifest."""

    signed: Signed


@dataclass(frozen=True, slots=True)
class Join:
    """A volunteer: the manifest comes from the swarm."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """No training: others find each other through this node."""


Mission = Start | Join | Rendezvous
