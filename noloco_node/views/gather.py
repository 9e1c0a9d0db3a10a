"""What a node shows while it downloads the weights of others (`export --average`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatheredState:
    """The slow weights of one node, in a file of fp32 numbers."""

    path: str
    peer_id: str
    round: int
    step: int | None
    """At the end of that round; None: not known."""
    layout: str = ""
    """Of its numbers, where that is another one than this node's: of another stage."""


@dataclass(frozen=True, slots=True)
class GatherView:
    """How far the fetching of several nodes' weights is."""

    run_id: str = ""
    layout: str = ""
    """The layout's digest, which says what the numbers mean; in hexadecimal."""
    doing: str = ""
    states: tuple[GatheredState, ...] = ()
    """This node's own first."""
    skipped: tuple[str, ...] = ()
    """Nodes that sent none, and why."""
    done: bool = False
    failure: str | None = None
    """Why nothing was fetched, as a sentence."""
    exit_code: int = 1
    """The exit code of the failure."""
