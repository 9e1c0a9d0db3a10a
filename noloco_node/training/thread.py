"""The training thread, which owns every tensor of the model and of both optimizers, and the codec thread beside it.

A mailbox in, posted messages out, no lock. At a boundary the training thread snapshots u, takes the local step and
posts the offer. With eager overlap the next phase begins at once and the partner's corrections are added between two of
its steps; with blocking overlap the thread serves nothing but its mailbox until the round is over. The codec thread
owns the snapshots of open offers: only a swap's corrections change them, for the round's next partner. A phase that
ends with NaN or Inf is thrown away; one without a single finite loss ends the training. Whatever ends it is posted, and
who still waits for an answer hears of it.

Knows nothing of partners, sockets or the event loop: it is handed a `post` callable.
"""

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

import torch
from torch import Tensor

from noloco_node.core.codec import BLOCK, Codec, Conversation, Heard, Stats
from noloco_node.errors import Diverged, NolocoError, NonFinite, OutOfMemory, PeerMisbehaved
from noloco_node.events import Evaluated, PhaseDone
from noloco_node.training.inner import Inner, State

FRAGMENT_ELEMENTS = 1 << 20
"""4 MiB in fp32, half of gRPC's limit on a message; half a MiB at 4 bits. Larger ones would hold up an inner step."""
JOIN_S = 10.0
"""For the thread to come to the end of an inner step when it is told to stop."""

log = logging.getLogger(__name__)

T = TypeVar("T")


# ---- what it posts ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built; training waits for `begin`."""

    parameters: int
    layout: bytes
    fragments: int
    round: int
    """Above 0 after a checkpoint."""
    device: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    done: PhaseDone
    offer: "Offer | None"
    closed: str | None
    """Why there is no offer."""
    seconds: float
    """Of training, pauses and waiting left out: what the next phase will probably take."""
    spent_s: Mapping[str, float]
    """Seconds since training began by what they went into: `step` is what the accelerator is there for."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last phase is over; the thread goes on serving its mailbox. One more evaluation follows when the last round
    is over too, of the weights that the run leaves behind."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


Message = Ready | PhaseEnded | Evaluated | Finished | Failed


class _Stop(Exception):
    """Unwinds the thread from wherever it is."""


class _Question(Generic[T]):
    """A letter to the training thread that wants an answer."""

    def __init__(self, ask: Callable[[Inner], T]) -> None:
        self.answer: Future[T] = Future()
        self._ask = ask

    def __call__(self, inner: Inner) -> None:
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self._ask(inner))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                self.answer.set_exception(error)

    def give_up(self) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(NolocoError("the training has ended"))


class Offer:
    """The snapshot of one boundary, as the codec thread keeps it; what `swap.py` calls Vectors."""

    def __init__(self, thread: "TrainingThread", round: int, u: Tensor, moved: Tensor) -> None:
        self.round = round
        self.fragments = thread.fragments
        self.stats = Stats()
        """Of the swaps so far."""
        self._thread = thread
        self._u = u
        self._moved = moved
        self._conversations: dict[int, Conversation] = {}

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        return self._thread.codec_pool.submit(self._open, index, exchange_id)

    def hear(self, index: int, payload: bytes) -> "Future[Heard]":
        return self._thread.codec_pool.submit(self._hear, index, payload)

    def apply(self, index: int, correction: Tensor) -> None:
        self._thread.apply(self.round, index * self._thread.fragment_elements, correction)
        self._thread.codec_pool.submit(self._move, index, correction)

    def _move(self, index: int, correction: Tensor) -> None:
        """A further partner of the round swaps u + c."""
        elements = self._thread.fragment_elements
        self._u[index * elements : (index + 1) * elements] += correction

    def _open(self, index: int, exchange_id: bytes) -> bytes:
        elements, blocks = self._thread.fragment_elements, self._thread.fragment_elements // BLOCK
        u = self._u[index * elements : (index + 1) * elements]
        moved = self._moved[index * blocks : (index + 1) * blocks]
        self._conversations[index] = self._thread.codec.converse(u, index, exchange_id, moved)
        return self._conversations[index].open()

    def _hear(self, index: int, payload: bytes) -> Heard:
        conversation = self._conversations.get(index)
        if conversation is None:
            raise PeerMisbehaved("out_of_turn", f"fragment {index}")
        heard = conversation.hear(payload)
        if heard.correction is not None:
            self.stats.add(conversation.stats)
            del self._conversations[index]
        return heard


class TrainingThread:
    def __init__(  # noqa: PLR0913
        self,
        build: Callable[[], Inner],
        codec: Codec,
        post: Callable[[Message], None],
        *,
        rounds: int,
        blocking: bool = False,
        fragment_elements: int = FRAGMENT_ELEMENTS,
    ) -> None:
        self.codec = codec
        self.codec_pool = ThreadPoolExecutor(1, "codec", torch.set_num_threads, (1,))  # training needs the cores
        self.fragment_elements = fragment_elements
        self.fragments = 0
        self._build = build
        self._post = post
        self._rounds = rounds
        self._blocking = blocking
        self._mailbox: queue.SimpleQueue[Callable[[Inner], None]] = queue.SimpleQueue()
        self._over = False
        self._begun = False
        self._paused = False
        self._swapping = False
        self._rounds_over = 0
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._clock_read_at = 0.0
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    # ---- from any thread ----
    def start(self) -> None:
        self._thread.start()

    def begin(self, own_rounds: int | None = None) -> None:
        """Train to the end of the run, or for so many rounds from here."""

        def begin(inner: Inner) -> None:
            if own_rounds is not None:
                self._rounds = min(self._rounds, inner.round + own_rounds)
            self._begun = True

        self._mailbox.put(begin)

    def adopt(self, round: int, state: bytes) -> "Future[None]":
        """A newcomer takes a peer's slow weights and outer momentum; before `begin`."""
        return self._ask(lambda inner: inner.adopt(round, state))

    def live_state(self) -> "Future[tuple[int, bytes]]":
        """The round, and slow weights and outer momentum as they are between two inner steps."""
        return self._ask(lambda inner: (inner.round, inner.live_state()))

    def state(self) -> "Future[State]":
        """Everything that a resumed run needs, as it is between two inner steps."""
        return self._ask(lambda inner: inner.state())

    def apply(self, offered_round: int, start: int, correction: Tensor) -> None:
        self._mailbox.put(lambda inner: self._apply(inner, offered_round, start, correction))

    def swapping(self, under_way: bool) -> None:
        """While a swap is under way, a boundary takes no snapshot."""
        self._mailbox.put(lambda _: setattr(self, "_swapping", under_way))

    def round_over(self, round: int) -> None:
        self._mailbox.put(lambda _: setattr(self, "_rounds_over", max(round, self._rounds_over)))

    def pause(self) -> None:
        """Take no further inner step until `resume`; everything else is served."""
        self._mailbox.put(lambda _: setattr(self, "_paused", True))

    def resume(self) -> None:
        self._mailbox.put(lambda _: setattr(self, "_paused", False))

    def stop(self) -> None:
        """Stop between two inner steps, and wait for that."""

        def unwind(_: Inner) -> None:
            raise _Stop

        self._mailbox.put(unwind)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        self.codec_pool.shutdown(wait=True, cancel_futures=True)

    # ---- on the training thread ----
    def _run(self) -> None:
        try:
            self._live(self._build())
        except _Stop:
            pass
        except (MemoryError, torch.OutOfMemoryError) as error:
            log.debug("training ended", exc_info=error)
            self._post(Failed(OutOfMemory("the model does not fit into memory: join another run, or free some")))
        except Exception as error:
            log.debug("training ended", exc_info=error)
            self._post(Failed(error))
        finally:
            self._over = True
            self._give_up()

    def _live(self, inner: Inner) -> None:
        self.fragments = max(1, -(-inner.parameters // self.fragment_elements))
        self._post(Ready(inner.parameters, inner.layout, self.fragments, inner.round, inner.device))
        self._serve_until(inner, lambda: self._begun)
        self._evaluate(inner)
        self._clock_read_at = time.perf_counter()
        while inner.round < self._rounds:
            self._phase(inner)
        self._post(Finished())
        self._serve_until(inner, lambda: self._rounds_over >= inner.round and not self._swapping)
        self._evaluate(inner)
        self._serve_until(inner, lambda: False)

    def _phase(self, inner: Inner) -> None:
        began, losses = time.perf_counter(), []
        while not inner.phase_over:  # a resumed phase has some steps behind it
            self._serve(inner)
            began += self._wait_while_paused(inner)
            with self._spending("step"):
                losses.append(inner.step())
            self._read_clock(inner)
        offer, closed = self._boundary(inner)
        seconds = time.perf_counter() - began
        done = PhaseDone(inner.round, inner.steps, _mean(losses), len(losses) * inner.tokens_per_step, seconds)
        self._post(PhaseEnded(done, offer, closed, seconds, dict(self._spent_s)))
        if inner.round >= self._rounds:
            return
        if self._blocking:
            with self._spending("waiting"):
                self._serve_until(inner, lambda: self._rounds_over >= inner.round)
            self._clock_read_at = time.perf_counter()  # the next phase begins here
        self._evaluate(inner)

    def _boundary(self, inner: Inner) -> tuple[Offer | None, str | None]:
        self._serve(inner)
        with self._spending("boundary"):
            try:
                u = None if self._swapping else inner.snapshot()
                moved = inner.movement()
                inner.boundary()
            except NonFinite as error:
                log.warning("this phase is thrown away: %s", error)
                inner.discard()
                return None, "nonfinite"
        return (None, "swapping") if u is None else (Offer(self, inner.round, u, moved), None)

    def _evaluate(self, inner: Inner) -> None:
        with self._spending("evaluate"):
            self._post(Evaluated(inner.round, inner.evaluate()))

    def _apply(self, inner: Inner, offered_round: int, start: int, correction: Tensor) -> None:
        with self._spending("apply"):
            inner.apply(start, correction, offered_round)

    def _serve(self, inner: Inner) -> None:
        """Do what lies in the mailbox."""
        while not self._mailbox.empty():
            self._mailbox.get()(inner)

    def _serve_until(self, inner: Inner, enough: Callable[[], bool]) -> None:
        """Do what comes into the mailbox, waiting for it."""
        while not enough():
            self._mailbox.get()(inner)

    def _wait_while_paused(self, inner: Inner) -> float:
        """How long that was: a pause counts as nobody's time."""
        began = time.perf_counter()
        self._serve_until(inner, lambda: not self._paused)
        paused_s = time.perf_counter() - began
        self._clock_read_at += paused_s
        return paused_s

    def _read_clock(self, inner: Inner) -> None:
        """All that this thread does is a phase's time; pauses and waiting for a partner are not."""
        now = time.perf_counter()
        inner.spend(now - self._clock_read_at)
        self._clock_read_at = now

    def _ask(self, ask: Callable[[Inner], T]) -> "Future[T]":
        question = _Question(ask)
        self._mailbox.put(question)
        if self._over:  # else whoever ends the thread looks through the mailbox after this
            self._give_up()
        return question.answer

    def _give_up(self) -> None:
        """Nobody will read the mailbox any more. From any thread."""
        with suppress(queue.Empty):
            while True:
                letter = self._mailbox.get_nowait()
                if isinstance(letter, _Question):
                    letter.give_up()

    @contextmanager
    def _spending(self, on: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[on] += time.perf_counter() - began


def _mean(losses: Sequence[float]) -> float:
    """Of the steps that were not skipped. Raises Diverged where every one was."""
    if finite := [loss for loss in losses if math.isfinite(loss)]:
        return fmean(finite)
    raise Diverged(
        "no step of a whole phase had a finite loss: start the node again, it goes on from its last checkpoint; "
        "if that does not help, the run needs a smaller learning rate"
    )
