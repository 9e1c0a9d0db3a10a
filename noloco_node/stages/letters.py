"""What a stage's training thread sends to the next stage, and what comes in: micro-batches of the stage before, and the
next one's answers. It lies in one queue. Whoever asks gets an answer or an exception; for who is asked and does not
answer, `Lost` comes at the deadline."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from noloco_node.errors import NolocoError


@dataclass(frozen=True, slots=True)
class Answer:
    loss: float
    """Sum over the tokens."""
    gradient: Tensor | None
    """At the activations; None of an evaluation."""
    learned: bool = False
    """Whether it is in a step of who computed it."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A micro-batch of the stage before."""

    activations: Tensor
    targets: Tensor
    evaluates: bool
    until: float
    """By time.monotonic; then nobody waits for the answer any more."""
    answer: "Future[Answer]"
    caller: str = ""
    tries: bool = False
    """It evaluates, and its activations come from weights that its caller may not keep."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A micro-batch for the next stage."""

    ticket: int
    activations: Tensor
    targets: Tensor
    evaluates: bool
    until: float
    asked: Asked | None = None
    """Whose it is; None: this stage's own."""
    tries: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    ticket: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Lost:
    """Nobody answers any more."""

    ticket: int


Letter = Asked | Answered | Lost


class Link(Protocol):
    def ready(self) -> bool:
        """Whether a micro-batch may be sent now, and somebody is there who would compute it."""

    def send(self, micro: Sent) -> None:
        """Returns at once. Answered or Lost follows, at `until` at the latest."""


class LostMicroBatch(NolocoError):
    """No gradient for a micro-batch. It is counted, and not tried again here."""
