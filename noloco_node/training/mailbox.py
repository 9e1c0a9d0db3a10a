"""What is sent to the training thread and what it sends: commands, the mailbox that they lie in, and messages.

The mailbox is the one object that this thread and others both touch. A command with an `answer` always gets one, even
when the thread ends before it reads the command.
"""

import math
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from noloco_node.base.events import Evaluated, PhaseDone, RolledBack, Sampled
from noloco_node.core.codecs.codec import Packed
from noloco_node.core.verdict import SOMEBODY, Verdict
from noloco_node.errors import NolocoError
from noloco_node.training.time_accounts import Spent

if TYPE_CHECKING:
    from noloco_node.training.offer import Offer
    from noloco_node.training.replica import Replica

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the training is between two inner steps."""

    steps: int
    """Of the run."""
    part: float
    """Of the inner phase, 0 to 1."""
    left_s: float | None
    """Until the phase is over; None before its first step, and in a pause."""
    tokens_per_s: float | None
    loss: float | None
    """The mean of the phase so far."""
    device_bytes: int | None = None
    """The most that training has taken of the accelerator; None on a CPU."""
    short_of_memory: str | None = None
    """Why the training waits for memory of the accelerator; None: it does not."""


# ---- commands --------------------------------------------------------------------------------------------------------
class Signal(Enum):
    """The commands that say no more than their name."""

    PAUSE = auto()
    RESUME = auto()
    STOP = auto()


@dataclass(frozen=True)
class Question(Generic[T]):
    """What is to be found out, or done, between two inner steps."""

    find: "Callable[[Replica], T | Future[T]]"
    answer: "Future[T]" = field(default_factory=Future)

    def settle(self, replica: "Replica") -> None:
        """Answers with what is found, or raised: that belongs to the sender. Where it is a future, the answer is
        `running` until that one is done."""
        if self.answer.set_running_or_notify_cancel():
            try:
                found = self.find(replica)
            except Exception as error:  # noqa: BLE001
                self.answer.set_exception(error)
                return
            if isinstance(found, Future):
                found.add_done_callback(self._hand_on)
            else:
                self.answer.set_result(found)

    def _hand_on(self, done: "Future[T]") -> None:
        if error := done.exception():
            self.answer.set_exception(error)
        else:
            self.answer.set_result(done.result())

    def abandon(self) -> None:
        """The thread has ended and will not read this."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(NolocoError("the training has ended"))


@dataclass(frozen=True)
class Begin:
    own_rounds: int | None


@dataclass(frozen=True)
class Amend:
    rounds: int
    ended: bool


@dataclass(frozen=True)
class Correct:
    """A partner's correction of the elements from `start` on."""

    offered_round: int
    start: int
    correction: Tensor
    added: "Future[None]"
    """Done when the correction was added, or never will be."""
    kept: Packed | None = None
    """The same, to be kept until it is judged."""
    exchange: bytes = b""
    """The swap that it belongs to."""
    judged: Callable[[bool], None] = lambda taken_back: None
    """To be called once it is known whether the swap's corrections were taken back."""
    ready: "torch.cuda.Event | None" = None
    """Behind what makes these tensors, on a GPU."""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.correction, *(self.kept.tensors if self.kept else ())]

    def abandon(self) -> None:
        self.added.set_result(None)


@dataclass(frozen=True)
class Swapping:
    under_way: bool
    source: frozenset[str] = SOMEBODY


@dataclass(frozen=True)
class RoundOver:
    round: int


Command = Signal | Begin | Amend | Question[Any] | Correct | Swapping | RoundOver


# ---- messages --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built; training waits for `begin`."""

    parameters: int
    layout: bytes
    fragments: int
    round: int
    step: int
    """At the last boundary."""
    device: str
    tokens: int = 0
    """That this replica trained on before, by its checkpoint."""
    device_limit_bytes: int | None = None
    """What training may take of the accelerator."""
    host_limit_bytes: int | None = None
    """What this machine has."""
    gpu_uuid: str | None = None
    """By which its driver knows the GPU."""

    @property
    def resumed(self) -> bool:
        """Whether it has weights of the run: of round 0, or of a peer that it did not train on, too."""
        return self.tokens > 0 or self.round > 0


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    done: PhaseDone
    offer: "Offer | None"
    closed: str | None
    """Why there is no offer."""
    seconds: float
    """Seconds of training, without pauses and waiting: the best estimate of the next phase's length."""
    spent: Spent


@dataclass(frozen=True, slots=True)
class Judged:
    """A swap has ended: whether its corrections stay."""

    exchange: bytes
    verdict: Verdict
    loss_with: float
    loss_without: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last phase is over; the thread goes on reading its mailbox. When the last round is over too, the weights that
    the run leaves behind are evaluated, where they can be, and Done follows."""


@dataclass(frozen=True, slots=True)
class Done:
    """These weights are the last ones."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception
    whole: bool = False
    """What was trained is whole, and can be asked for until the thread is stopped."""


Message = Ready | PhaseEnded | Evaluated | Sampled | RolledBack | Judged | Finished | Done | Failed


# ---- the mailbox -----------------------------------------------------------------------------------------------------
class Mailbox:
    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._next: Command | None = None
        """Taken from the queue, and not read."""
        self._closed = False
        self.stopped = False
        """Whether STOP was posted, though it may not have been read yet."""
        self._away = time.perf_counter(), 0.0
        """Since when the thread has not looked, and the longest that it ever did not; replaced as a whole."""

    # ---- from any thread ----
    def post(self, command: Command) -> None:
        if command is Signal.STOP:
            self.stopped = True
        self._commands.put(command)
        if self._closed:  # else `close` finds it
            self._abandon()

    @property
    def patience_s(self) -> float:
        """For a question asked now to be answered: twice the longest time between two looks at the mailbox."""
        since, longest_s = self._away
        return 2 * max(longest_s, time.perf_counter() - since)

    def _abandon(self) -> None:
        with suppress(queue.Empty):
            while True:
                command = self._take(block=False)
                if isinstance(command, Question | Correct):
                    command.abandon()

    def _take(self, *, block: bool = True) -> Command:
        held, self._next = self._next, None
        return self._commands.get(block) if held is None else held

    # ---- from the thread whose mailbox it is ----
    def open(self) -> None:
        """From now on the time between two looks counts: building the model is over."""
        self._away = time.perf_counter(), 0.0

    def close(self) -> None:
        """Nobody will read it any more."""
        self._closed = True
        self._abandon()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around `waiting` and `next`: time spent here does not count as a gap."""
        since, longest_s = self._away
        longest_s = max(longest_s, time.perf_counter() - since)
        self._away = math.inf, longest_s
        yield
        self._away = time.perf_counter(), longest_s

    def waiting(self) -> Iterator[Command]:
        """All commands that have arrived."""
        while self._next or not self._commands.empty():
            yield self._take()

    def corrections(self) -> Iterator[Correct]:
        """Those that have arrived, up to another command."""
        while self._next or not self._commands.empty():
            command = self._take()
            if not isinstance(command, Correct):
                return self.put_back(command)
            yield command

    def put_back(self, command: Command) -> None:
        """It is the next one again."""
        self._next = command

    def next(self) -> Command:
        """Waits for one."""
        return self._take()
