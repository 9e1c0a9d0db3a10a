"""The training thread, which owns every tensor of the model and of both optimizers, and the codec thread beside it.

A mailbox in, posted messages out, no lock. At a boundary the training thread snapshots u, takes the local step and
posts the offer. With eager overlap the next phase begins at once and the partner's corrections are added between two of
its steps; with blocking overlap the thread serves nothing but its mailbox until the round is over. The codec thread
owns the snapshots of open offers: only a swap's corrections change them, for the round's next partner. A phase that
ends with NaN or Inf is thrown away; when step after step fails, the weights are those of the last checkpoint again and
what was offered of the others is void, and when that does not help the training ends. Where data is late the mailbox is
served meanwhile. Whatever ends the thread is posted, and who still waits for an answer hears of it.

Knows nothing of partners, sockets or the event loop: it is handed a `post` callable.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from noloco_node.base.events import Evaluated, PhaseDone, RolledBack, rate
from noloco_node.core.codec import BLOCK, Codec, CodecStats, Conversation, Received
from noloco_node.errors import Diverged, NolocoError, NonFinite, OutOfMemory, PeerMisbehaved
from noloco_node.training import memory_budget
from noloco_node.training.mailbox import Correction, Question
from noloco_node.training.replica import Replica, Saved, State
from noloco_node.training.state_snapshot import Copy, Snapshots
from noloco_node.training.time_accounts import TimeAccounts

FRAGMENT_ELEMENTS = 1 << 20
"""4 MiB in fp32, half of gRPC's limit on a message; half a MiB at 4 bits. Larger ones would hold up an inner step."""
JOIN_S = 10.0
"""For the thread to come to the end of an inner step when it is told to stop."""
LOOK_S = 0.1
"""How often the mailbox is looked at while data is waited for."""

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
    """Seconds since training began, by what they went into (training/time_accounts.py)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last phase is over; the thread goes on serving its mailbox. One more evaluation follows when the last round
    is over too, of the weights that the run leaves behind."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the training stands between two inner steps."""

    steps: int
    """Of the run."""
    part: float
    """Of the inner phase, 0 to 1."""
    left_s: float | None
    """Until the phase is over; None before its first step, and in a pause."""
    tokens_per_s: float | None
    loss: float | None
    """The mean of the phase so far."""


Message = Ready | PhaseEnded | Evaluated | RolledBack | Finished | Failed


class _Stop(Exception):
    """Unwinds the thread from wherever it is."""


@dataclass(slots=True)
class _Phase:
    """What an inner phase has come to so far."""

    began: float
    """Moved on by pauses."""
    steps: int = 0
    losses: list[float] = field(default_factory=list)

    def loss(self) -> float | None:
        return fmean(self.losses) if self.losses else None


class Offer:
    """The snapshot of one boundary, as the codec thread keeps it; what `rounds/swap.py` calls Vectors."""

    def __init__(self, thread: "TrainingThread", round: int, u: Tensor, moved: Tensor) -> None:
        self.round = round
        self.fragments = thread.fragments
        self.correction_bytes = 4 * thread.fragment_elements
        self.stats = CodecStats()
        """Of the swaps so far."""
        self._thread = thread
        self._u = u
        self._moved = moved
        self._conversations: dict[int, Conversation] = {}

    def open(self, index: int, exchange_id: bytes) -> "Future[bytes]":
        """This and the next two raise NonFinite once the weights have been given up that it was made of."""
        return self._thread.codec_pool.submit(self._open, index, exchange_id)

    def hear(self, index: int, payload: bytes) -> "Future[Received]":
        return self._thread.codec_pool.submit(self._hear, index, payload)

    def apply(self, index: int, correction: Tensor) -> "Future[None]":
        """Done when the training thread has added it, or never will."""
        self._require_valid()
        self._thread.codec_pool.submit(self._move, index, correction)
        return self._thread.apply(self.round, index * self._thread.fragment_elements, correction)

    def _move(self, index: int, correction: Tensor) -> None:
        """A further partner of the round swaps u + c."""
        elements = self._thread.fragment_elements
        self._u[index * elements : (index + 1) * elements] += correction

    def _require_valid(self) -> None:
        if self.round <= self._thread.given_up:
            raise NonFinite(f"the weights that were offered in round {self.round} have been given up")

    def _open(self, index: int, exchange_id: bytes) -> bytes:
        self._require_valid()
        elements, blocks = self._thread.fragment_elements, self._thread.fragment_elements // BLOCK
        u = self._u[index * elements : (index + 1) * elements]
        moved = self._moved[index * blocks : (index + 1) * blocks]
        self._conversations[index] = self._thread.codec.converse(u, index, exchange_id, moved)
        return self._conversations[index].open()

    def _hear(self, index: int, payload: bytes) -> Received:
        self._require_valid()
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
        build: Callable[[], Replica],
        codec: Codec,
        post: Callable[[Message], None],
        *,
        rounds: int,
        blocking: bool = False,
        fragment_elements: int = FRAGMENT_ELEMENTS,
        last_good: Callable[[], Saved | None] = lambda: None,
    ) -> None:
        """`last_good` gives what was saved last, for weights that are broken."""
        self.codec = codec
        self.codec_pool = ThreadPoolExecutor(1, "codec", torch.set_num_threads, (1,))  # training needs the cores
        self.fragment_elements = fragment_elements
        self.fragments = 0
        self.given_up = -1
        """The round in which the weights last became older ones again: what was offered by then is void."""
        self._build = build
        self._post = post
        self._budget = self._rounds = rounds
        self._blocking = blocking
        self._last_good = last_good
        self._mailbox: queue.SimpleQueue[Callable[[Replica], None]] = queue.SimpleQueue()
        self._over = False
        self._begun = False
        self._paused = False
        self._swapping = False
        self._in_vain = False
        """Whether the weights were rolled back and no loss has been finite since."""
        self._rounds_over = 0
        self._times = TimeAccounts(time.perf_counter)
        self._phase = _Phase(0.0)
        self._stalled_s = 0.0  # up to the last boundary
        self._clock_read_at = 0.0
        self._looked_at = time.perf_counter()
        self._longest_s = 0.0
        """Between two looks into the mailbox, so far."""
        self._portraits = Snapshots()
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    # ---- from any thread ----
    def start(self) -> None:
        self._thread.start()

    def begin(self, own_rounds: int | None = None) -> None:
        """Train to the end of the run, or for so many rounds from here."""

        def begin(inner: Replica) -> None:
            if own_rounds is not None:
                self._rounds = min(self._rounds, inner.round + own_rounds)
            self._begun = True

        self._mailbox.put(begin)

    def adopt(self, round: int, state: bytes | memoryview) -> "Future[None]":
        """Take a peer's slow weights and outer momentum: before `begin`, or in a pause, with no offer open and no swap
        under way. A phase that had begun is given up."""

        def adopt(inner: Replica) -> None:
            ahead = max(0, round - inner.round)
            self._portraits.complete()
            inner.adopt(round, state)
            self._rounds = min(self._budget, self._rounds + ahead)  # how many rounds are its own stays the same
            self._rounds_over = round

        return self._ask(adopt)

    def live_state(self) -> "Future[Copy]":
        """The round, and slow weights and outer momentum as they were at one moment: copied between inner steps, a
        little at a time. Nobody changes the copy. Fails where there is no memory for it."""
        copy: Future[Copy] = Future()

        def want(inner: Replica) -> None:
            if self._portraits.idle:
                memory_budget.check_copy(inner.parameters)
            self._portraits.want(copy)

        asked = self._ask(want)
        asked.add_done_callback(lambda f: copy.set_exception(why) if (why := f.exception()) else None)
        return copy

    def state(self) -> "Future[State]":
        """Everything that a resumed run needs, as it is between two inner steps."""
        return self._ask(lambda inner: self._copying(inner.state))

    def so_far(self) -> "Future[tuple[Progress, Mapping[str, float]]]":
        """And the seconds since training began, by what they went into."""
        return self._ask(lambda inner: (self._underway(inner), self._times.so_far()))

    def apply(self, offered_round: int, start: int, correction: Tensor) -> "Future[None]":
        """Done when it was added, or never will be."""
        letter = Correction(lambda inner: self._apply(inner, offered_round, start, correction))
        self._send(letter)
        return letter.added

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

    @property
    def patience_s(self) -> float:
        """For what is asked now to be answered: twice as long as the thread has ever been away from its mailbox."""
        return 2 * max(self._longest_s, time.perf_counter() - self._looked_at)

    def stop(self, within_s: float = JOIN_S) -> None:
        """Stop between two inner steps, and wait for that."""

        def unwind(_: Replica) -> None:
            raise _Stop

        self._mailbox.put(unwind)
        if self._thread.ident is not None:
            self._thread.join(within_s)
        self.codec_pool.shutdown(wait=True, cancel_futures=True)

    # ---- on the training thread ----
    def _run(self) -> None:
        try:
            with closing(self._build()) as inner:
                self._live(inner)
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
            self._portraits.give_up(NolocoError("the training has ended"))

    def _live(self, inner: Replica) -> None:
        self._looked_at = time.perf_counter()
        self.fragments = max(1, -(-inner.parameters // self.fragment_elements))
        self._post(Ready(inner.parameters, inner.layout, self.fragments, inner.round, inner.device))
        self._serve_until(inner, lambda: self._begun)
        self._times.start()
        self._evaluate(inner)
        self._clock_read_at = time.perf_counter()
        while inner.round < self._rounds:
            self._train_phase(inner)
        self._times.stop()
        self._post(Finished())
        self._serve_until(inner, lambda: self._rounds_over >= inner.round and not self._swapping)
        self._evaluate(inner)
        self._serve_until(inner, lambda: False)

    def _train_phase(self, inner: Replica) -> None:
        phase, round_ = _Phase(time.perf_counter()), inner.round
        self._phase = phase
        step_s = 0.0
        # a resumed phase has some steps behind it, perhaps all
        while not inner.phase_over or (phase.steps and not phase.losses):
            self._serve(inner)
            phase.began += self._wait_while_paused(inner)
            if inner.round != round_:
                return  # a peer's state was adopted
            if not self._fetch(inner):
                continue
            self._copy_a_little(inner, step_s)
            stepped_at = time.perf_counter()
            with self._times.on("step"):
                phase.losses += self._step(inner)
            step_s = time.perf_counter() - stepped_at
            phase.steps += 1
            self._read_clock(inner)
        offer, closed = self._boundary(inner)
        seconds = time.perf_counter() - phase.began
        loss = inner.last_loss if (mean := phase.loss()) is None else mean
        done = PhaseDone(inner.round, inner.steps, loss, phase.steps * inner.tokens_per_step, seconds, self._stall_ms())
        self._phase = _Phase(0.0)
        self._post(PhaseEnded(done, offer, closed, seconds, self._times.so_far()))
        if inner.round >= self._rounds:
            return
        if self._blocking:
            with self._times.on("waiting"):
                self._serve_until(inner, lambda: self._rounds_over >= inner.round)
            self._clock_read_at = time.perf_counter()  # the next phase begins here
        self._evaluate(inner)

    def _underway(self, inner: Replica) -> Progress:
        phase, left_s, tokens_per_s = self._phase, None, None
        if phase.steps and not self._paused:
            step_s = (time.perf_counter() - phase.began) / phase.steps
            left_s = step_s * inner.steps_left(step_s)
            tokens_per_s = rate(inner.tokens_per_step, step_s)
        return Progress(inner.steps, inner.phase_part, left_s, tokens_per_s, phase.loss())

    def _fetch(self, inner: Replica) -> bool:
        """The next step's batch, if it comes before the mailbox is to be looked at again."""
        with self._times.on("data"):
            if inner.has_data(LOOK_S):
                inner.fetch()
                return True
        self._copy(lambda portraits: portraits.at_once(inner))
        self._read_clock(inner)
        return False

    def _step(self, inner: Replica) -> list[float]:
        """Its loss, where it has one."""
        try:
            loss = inner.step()
        except NonFinite as error:
            self._roll_back(inner, str(error))
            return []
        if not math.isfinite(loss):
            return []
        self._in_vain = False
        return [loss]

    def _roll_back(self, inner: Replica, reason: str) -> None:
        """Raises Diverged when the last time did not help."""
        if self._in_vain:
            raise Diverged(f"{reason}, with older weights too: the run needs a smaller learning rate, or other data")
        self._in_vain = True
        self._portraits.complete()
        saved = self._last_good()
        if saved is None:
            inner.restart()
        else:
            inner.restore(saved)
            self.given_up = inner.round
        self._post(RolledBack(inner.round, saved.round if saved else None, reason))

    def _boundary(self, inner: Replica) -> tuple[Offer | None, str | None]:
        self._serve(inner)
        self._copy(Snapshots.complete)
        with self._times.on("boundary"):
            try:
                closed = "swapping" if self._swapping else "warming_up" if inner.warming_up else None
                offered = None if closed else (inner.snapshot(), inner.movement())
                inner.boundary()
            except NonFinite as error:
                log.warning("this phase is thrown away: %s", error)
                inner.discard()
                return None, "nonfinite"
        return (None, closed) if offered is None else (Offer(self, inner.round, *offered), None)

    def _evaluate(self, inner: Replica) -> None:
        with self._times.on("evaluate"):
            self._post(Evaluated(inner.round, inner.evaluate()))

    def _apply(self, inner: Replica, offered_round: int, start: int, correction: Tensor) -> None:
        with self._times.on("apply"):
            self._portraits.secure(start, start + len(correction))
            inner.apply(start, correction, offered_round)

    def _copy(self, work: Callable[[Snapshots], None]) -> None:
        """For a newcomer, if one waits."""
        if not self._portraits.idle:
            with self._times.on("checkpoint"):
                work(self._portraits)

    def _copy_a_little(self, inner: Replica, step_s: float) -> None:
        self._copy(lambda portraits: portraits.in_gap(inner, inner.steps_left(step_s), step_s))

    def _copying(self, copy: Callable[[], T]) -> T:
        with self._times.on("checkpoint"):
            return copy()

    def _stall_ms(self) -> float:
        """What the last round cost the training."""
        before, self._stalled_s = self._stalled_s, self._times.stall_s()
        return 1000 * (self._stalled_s - before)

    def _serve(self, inner: Replica) -> None:
        """Do what lies in the mailbox."""
        with self._looking():
            while not self._mailbox.empty():
                self._mailbox.get()(inner)

    def _serve_until(self, inner: Replica, enough: Callable[[], bool]) -> None:
        """Do what comes into the mailbox, waiting for it."""
        with self._looking():
            while not enough():
                self._mailbox.get()(inner)
                self._copy(lambda portraits: portraits.at_once(inner))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Into the mailbox, after some time away from it."""
        self._longest_s = max(self._longest_s, time.perf_counter() - self._looked_at)
        self._looked_at = math.inf
        yield
        self._looked_at = time.perf_counter()

    def _wait_while_paused(self, inner: Replica) -> float:
        """How long that was: a pause counts as nobody's time."""
        if not self._paused:
            return 0.0
        began = time.perf_counter()
        with self._times.on("paused"):
            self._serve_until(inner, lambda: not self._paused)
        paused_s = time.perf_counter() - began
        self._clock_read_at += paused_s
        return paused_s

    def _read_clock(self, inner: Replica) -> None:
        """All that this thread does is a phase's time; pauses and waiting for a partner are not."""
        now = time.perf_counter()
        inner.spend(now - self._clock_read_at)
        self._clock_read_at = now

    def _ask(self, ask: Callable[[Replica], T]) -> "Future[T]":
        question = Question(ask)
        self._send(question)
        return question.answer

    def _send(self, letter: Callable[[Replica], None]) -> None:
        """A letter whose sender waits for what becomes of it."""
        self._mailbox.put(letter)
        if self._over:  # else whoever ends the thread looks through the mailbox after this
            self._give_up()

    def _give_up(self) -> None:
        """Nobody will read the mailbox any more. From any thread."""
        with suppress(queue.Empty):
            while True:
                letter = self._mailbox.get_nowait()
                if isinstance(letter, Question | Correction):
                    letter.give_up()
