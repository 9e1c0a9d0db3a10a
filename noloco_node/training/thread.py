"""The training thread, which owns every tensor of the model and of both optimizers.

Commands come in through its mailbox, messages go out through `post` (training/mailbox.py); no lock. At a boundary it
snapshots u, takes the local step and posts the offer (training/offer.py). With eager overlap the next phase begins at
once, and the partner's corrections are added between two steps of AdamW, also while a GPU works at the next gradient;
with blocking overlap the thread only reads its mailbox until the round is over. A phase that ends with NaN or Inf is
thrown away. When step after step fails, the weights become those of the last checkpoint and earlier offers are void;
when that does not help, the training ends. While it waits for data, or for memory of the GPU that another program has,
it reads the mailbox too. Whatever ends the thread is posted, and every question gets an answer.

Knows nothing of partners, sockets or the event loop.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from noloco_node.base.events import Evaluated, PhaseDone, RolledBack, Sampled, rate
from noloco_node.base.units import span
from noloco_node.core import gpu
from noloco_node.core.codecs.codec import Codec
from noloco_node.core.fragments import Cut
from noloco_node.core.round_events import SWAPPING
from noloco_node.core.state import State
from noloco_node.core.verdict import PART, SOMEBODY, Course, Trial
from noloco_node.errors import Diverged, NolocoError, NonFinite, OutOfMemory
from noloco_node.host import memory
from noloco_node.training import mailbox, memory_budget
from noloco_node.training.inner.gradients import NotMeasured, ShortOfMemory
from noloco_node.training.mailbox import Done, Failed, Finished, Judged, Mailbox, Message, PhaseEnded, Progress, Ready
from noloco_node.training.offer import CodecThread, Offer
from noloco_node.training.replica import Replica
from noloco_node.training.time_accounts import Spent, TimeAccounts

FRAGMENT_ELEMENTS = 1 << 20
"""At least (core/fragments.py): 4 MiB in fp32, half a MiB at 4 bits. Larger ones would hold up a small model's step."""
JOIN_S = 10.0
"""How long the thread may take to end its inner step when it must stop."""
LOOK_S = 0.1
"""How often the mailbox is read while data is waited for."""
MEMORY_S = 5.0
"""How often a step is tried again for which the GPU had no memory: a try takes less time than a step."""
SHORTAGE_S = 86_400.0
"""How long there may be none. A game lasts an evening and somebody else's training a night; of a node that has not
trained for a day its owner should hear, by its end."""
LEAST_SHARE = 0.05
"""Of a phase: a resumed one may have little left, whose time says little of a whole one's."""
_BUILDING = threading.Lock()
"""torch has one generator of random numbers: two models that are made at once both get others than the run's first
weights. A node that was given up while its model was made works on beside the one that takes its place."""
_NEVER = 1 << 53
"""No run has so many rounds."""
SAMPLE_S = 5.0
"""The longest that one sample text may take: meanwhile nothing is trained and no mail is read."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Stop(Exception):
    """Ends the thread from any depth of calls."""


@dataclass(slots=True)
class _Phase:
    """The inner phase under way."""

    began: float
    """Moved forward by pauses."""
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def loss(self) -> float | None:
        return fmean(self.losses) if self.losses else None


@dataclass(slots=True)
class Shortage:
    """The GPU has no memory for a step."""

    why: str
    since: float
    again_at: float


@dataclass(slots=True)
class _Swap:
    exchange: bytes
    source: frozenset[str]
    judged: Callable[[bool], None]
    """Tells its offer whether the corrections were taken back."""
    looked_at: int = 0
    """Elements that had landed when it was judged last."""
    harmful: bool = False
    """So judged before its end: what still lands of it is taken back too."""


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
        last_good: Callable[[Replica], State | None] = lambda _: None,
    ) -> None:
        """`last_good` loads the replica's last checkpoint, to replace broken weights. When the thread has ended,
        nothing here holds the replica: somebody whose loop is over may keep its node for long."""
        self._build = build
        self._post = post
        self._budget, self._own_end, self._ended_at = rounds, _NEVER, _NEVER
        self._blocking = blocking
        self._last_good = last_good
        self._mailbox = Mailbox()
        self._codec_thread = CodecThread(codec, self._mailbox.post, fragment_elements)
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="training", daemon=True)
        # from here on, only this thread touches it
        self._begun = False
        self._paused = False
        self._swapping = False
        self._source = SOMEBODY
        """Of the last swap."""
        self._swap: _Swap | None = None
        """The one that the last correction belongs to."""
        self._course = Course()
        self._failed_before = False
        """Whether the weights were rolled back and no loss has been finite since."""
        self._rounds_over = 0
        self._began_at = 0
        """The step with which training began here."""
        self._times = TimeAccounts(time.perf_counter)
        self._phase = _Phase(0.0)
        self._measured_s = 0.0
        """What the evaluation at the last boundary took."""
        self._stalled_s = 0.0  # up to the last boundary
        self._clock_read_at = 0.0
        self._shortage: Shortage | None = None
        self._unjudged: _Swap | None = None
        """One that has ended, and that there was no memory to judge; after the next step there may be."""

    # ---- from any thread ----
    def start(self) -> None:
        self._thread.start()

    def begin(self, own_rounds: int | None = None) -> None:
        """Train to the end of the run, or for so many rounds from here."""
        self._mailbox.post(mailbox.Begin(own_rounds))

    def amend(self, rounds: int, *, ended: bool) -> None:
        """The run has so many rounds from now on, or ends with the phase under way."""
        self._mailbox.post(mailbox.Amend(rounds, ended))

    def adopt(self, round: int, state: bytes | memoryview) -> "Future[None]":
        """Take a peer's slow weights and outer momentum: before `begin`, or in a pause, with no offer open and no swap
        under way. A phase that had begun is given up."""
        return self._ask(lambda replica: self._adopt(replica, round, state))

    def try_state(self, state: bytes | memoryview) -> "Future[Trial]":
        """What a peer's state is worth here; when `adopt` may be called, and nothing changes."""
        return self._ask(lambda replica: self._trying(replica, state))

    def sample(self, blocks: Sequence[int]) -> "Future[tuple[int, bytes]]":
        """The round, and some blocks of the slow weights, between two inner steps."""
        return self._ask(lambda replica: (replica.round, replica.sample(blocks)))

    def live_state(self) -> "Future[tuple[int, memoryview]]":
        """The round, and slow weights and outer momentum as they are between two inner steps. Nobody changes the copy.
        Fails where there is no memory for it."""
        return self._ask(lambda replica: self._copying(replica.copy_slow))

    def state(self) -> "Future[State]":
        """Everything that a resumed run needs, as it is between two inner steps: when the future is `running`, that
        moment is over. Training goes on while it is copied."""
        return self._ask(lambda replica: self._copying(replica.copy_state))

    def so_far(self) -> "Future[tuple[Progress, Spent]]":
        """Progress, and where the time went."""
        return self._ask(lambda replica: (self._progress(replica), self._times.so_far()))

    def swapping(self, under_way: bool, source: frozenset[str] = SOMEBODY) -> None:
        """While a swap is under way, a boundary takes no snapshot. Like `round_over`, it is read after the corrections
        of the offers so far. `source`: as core/verdict.py has it."""
        self._codec_thread.post_behind(mailbox.Swapping(under_way, source))

    def round_over(self, round: int) -> None:
        self._codec_thread.post_behind(mailbox.RoundOver(round))

    def pause(self) -> None:
        """Take no further inner step until `resume`; every other command is carried out."""
        self._mailbox.post(mailbox.Signal.PAUSE)

    def resume(self) -> None:
        self._mailbox.post(mailbox.Signal.RESUME)

    @property
    def patience_s(self) -> float:
        """How long an answer to a question asked now may take."""
        return self._mailbox.patience_s

    def stop(self, within_s: float = JOIN_S) -> None:
        """Stop between two inner steps, and wait for that."""
        self._mailbox.post(mailbox.Signal.STOP)
        if self._thread.ident is not None:
            self._thread.join(within_s)
        self._codec_thread.close()

    def _ask(self, find: "Callable[[Replica], T | Future[T]]") -> "Future[T]":
        """`find` is called on the training thread."""
        question = mailbox.Question(find)
        self._mailbox.post(question)
        return question.answer

    @property
    def _rounds(self) -> int:
        """Where this replica stops."""
        return min(self._budget, self._own_end, self._ended_at)

    # ---- on the training thread: its mailbox ----
    def _do(self, command: mailbox.Command, replica: Replica) -> None:
        match command:
            case mailbox.Begin(own_rounds):
                if own_rounds is not None:
                    self._own_end = replica.round + own_rounds
                self._begun = True
            case mailbox.Amend(rounds, ended):
                self._ended_at = min(self._ended_at, replica.round) if ended else _NEVER  # its author may take it back
                self._budget = replica.position.budget = rounds
            case mailbox.Correct():
                self._correct(replica, command)
            case mailbox.Question():
                command.settle(replica)
            case mailbox.Swapping(under_way, source):
                self._swapping = under_way
                self._source = source if under_way else self._source
                if self._unjudged is not None:  # there was no memory: the next partner is not blamed for it
                    replica.slow.let_stay()
                    self._unjudged.judged(False)
                    self._unjudged = None
                swap, self._swap = self._swap, None
                if swap and not under_way:
                    self._judge(replica, swap)
            case mailbox.RoundOver(round_):
                self._rounds_over = max(round_, self._rounds_over)
            case mailbox.Signal.PAUSE:
                self._paused = True
            case mailbox.Signal.RESUME:
                self._paused = False
            case mailbox.Signal.STOP:
                raise _Stop

    def _serve(self, replica: Replica) -> None:
        """Carry out the commands in the mailbox."""
        with self._mailbox.looking():
            for command in self._mailbox.waiting():
                self._do(command, replica)

    def _serve_until(self, replica: Replica, enough: Callable[[], bool]) -> None:
        """Wait for commands in the mailbox, and carry them out."""
        with self._mailbox.looking():
            while not enough():
                self._do(self._mailbox.next(), replica)

    def _pass_on_until(self, replica: Replica, enough: Callable[[], bool]) -> None:
        """As `_serve_until`; a stage serves other nodes meanwhile."""
        while not enough() and replica.pass_on(LOOK_S):
            self._serve(replica)
        self._serve_until(replica, enough)

    def _add_corrections(self, replica: Replica) -> None:
        """In a step, whose gradient stays: a correction that finds no memory waits for the step's end."""
        for command in self._mailbox.corrections():
            try:
                self._apply(replica, command)
            except torch.OutOfMemoryError:
                self._mailbox.put_back(command)
                return
            command.added.set_result(None)

    def _correct(self, replica: Replica, command: mailbox.Correct) -> None:
        lost: OutOfMemory | None = None
        try:
            try:
                self._apply(replica, command)
            except torch.OutOfMemoryError:
                replica.make_room()
                self._apply(replica, command)
        except torch.OutOfMemoryError:
            log.warning("a correction is lost: the GPU has no memory for it")
            lost = OutOfMemory("the GPU has no memory for a correction")
        finally:
            if lost:
                command.added.set_exception(lost)
            else:
                command.added.set_result(None)

    def _apply(self, replica: Replica, command: mailbox.Correct) -> None:
        if self._swap is None or self._swap.exchange != command.exchange:
            self._swap = _Swap(command.exchange, self._source, command.judged)
        with self._times.on("apply"):
            gpu.wait(command.ready, command.correction.device)
            gpu.keep(command.tensors)
            replica.slow.apply(command.start, command.correction, command.offered_round, command.kept)

    def _judge(self, replica: Replica, swap: _Swap, *, over: bool = True) -> None:
        """Take the corrections of a swap back where they did harm (core/verdict.py)."""
        judged: Judged | None = None
        harmful = swap.harmful
        if replica.slow.has_swapped:
            with suppress(Exception):  # the next step finds what is wrong with the data
                if not replica.is_stage and replica.has_data(0.0):
                    replica.fetch()  # what it was not trained on yet tells more: core/verdict.py
            try:
                if not harmful:
                    judged = self._measured(replica, lambda: self._verdict(replica, swap, over))
                    harmful = judged is not None and judged.verdict.harmful
                if harmful:
                    replica.slow.take_back()
            except (OutOfMemory, torch.OutOfMemoryError):  # on a CPU, too: of the copy of the weights
                if over:
                    self._unjudged = swap
                return
        if over:
            replica.slow.let_stay()
            swap.judged(harmful)
        if judged and (over or harmful):
            self._post(judged)
        swap.harmful = harmful

    def _verdict(self, replica: Replica, swap: _Swap, over: bool) -> Judged:
        with replica.trying_others():
            with_it, grows = replica.losses(), replica.slow.swap_grows
            without = replica.losses_without(own=with_it.own_counts)
            partner = lambda: replica.losses_without(partner=1, own=with_it.own_counts)  # noqa: E731
            verdict = self._course.judge(without, with_it, partner, grows, swap.source, over=over)
        return Judged(swap.exchange, verdict, with_it.held_out, without.held_out)

    def _judge_so_far(self, replica: Replica) -> None:
        """Before a boundary, so that nobody gets its harm: a swap that goes on, of which much has landed."""
        swap, landed = self._swap, replica.slow.swapped_elements
        if swap and not swap.harmful and landed - swap.looked_at >= PART * replica.parameters:
            swap.looked_at = landed
            self._judge(replica, swap, over=False)

    def _adopt(self, replica: Replica, round: int, state: bytes | memoryview) -> None:
        ahead = max(0, round - replica.round)
        replica.adopt(round, state)
        self._phase = _Phase(0.0)  # the one under way is given up
        self._own_end += ahead  # the number of its own rounds stays the same
        self._rounds_over = round
        self._failed_before = False
        self._course.restart()
        self._codec_thread.give_up(round)  # and none of a later round, where it had been rolled back in one

    def _trying(self, replica: Replica, state: bytes | memoryview) -> Trial:
        try:
            with self._times.on("evaluate"):
                return replica.try_state(state)
        except torch.OutOfMemoryError:
            raise ShortOfMemory("the GPU has no memory to try a peer's state") from None

    def _copying(self, begin: "Callable[[], Future[T]]") -> "Future[T]":
        with self._times.on("checkpoint"):
            return begin()

    def _progress(self, replica: Replica) -> Progress:
        phase, left_s, tokens_per_s = self._phase, None, None
        if phase.steps and not self._paused:
            step_s = (time.perf_counter() - phase.began) / phase.steps
            left_s = step_s * replica.position.steps_left(step_s)
            tokens_per_s = rate(replica.tokens_per_step, step_s)
        so_far = (phase.loss(), replica.device_bytes, self._shortage.why if self._shortage else None)
        return Progress(replica.steps, replica.position.phase_part, left_s, tokens_per_s, *so_far)

    # ---- on the training thread: the run ----
    def _run(self) -> None:
        # A CPU takes 50 times as long where numbers are subnormal, which a peer may send: its weights are tried here,
        # and a stage works on its activations.
        torch.set_flush_denormal(True)
        try:
            with closing(self._built()) as replica:
                self._train(replica)
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 (it is posted)
            self._post(_failed(error))
        finally:
            self._mailbox.close()

    def _built(self) -> Replica:
        if _BUILDING.locked():
            log.info("waiting until another node of this process has made its model")
        with _BUILDING:
            self.require_wanted()
            return self._build()

    def require_wanted(self) -> None:
        """Between two parts of the building: it ends where the thread is to stop."""
        if self._mailbox.stopped:
            raise _Stop

    def _train(self, replica: Replica) -> None:
        self._mailbox.open()
        replica.copies.waiting = lambda: self._times.on("checkpoint")
        replica.meanwhile = lambda: self._add_corrections(replica)
        replica.while_working(lambda: self._times.on("step"))
        cut = Cut.of(replica.parameters, self._codec_thread.fragment_elements)
        step = replica.steps - replica.position.phase_step
        state = (replica.parameters, replica.layout, cut.count, replica.round, step, replica.device, replica.tokens)
        self._post(Ready(*state, replica.device_limit_bytes, memory.total_bytes(), replica.gpu_uuid))
        self._serve_until(replica, lambda: self._begun)
        self._times.start(replica.theta.device)
        self._rounds_over = max(self._rounds_over, replica.round)  # of those before a restart nothing is open
        self._clock_read_at = time.perf_counter()
        self._began_at = replica.steps
        self._evaluate(replica)
        self._clock_read_at = time.perf_counter()
        while replica.round < self._rounds:
            self._train_phase(replica)
        self._times.stop()
        self._post(Finished())
        self._pass_on_until(replica, lambda: self._rounds_over >= replica.round and not self._swapping)
        self._evaluate(replica)
        self._post(Done())
        self._pass_on_until(replica, lambda: False)

    def _train_phase(self, replica: Replica) -> None:
        phase, at = _Phase(time.perf_counter()), replica.position
        # one without a step before is whole, though the time that the last one was too long counts for it
        self._phase, share = phase, max(LEAST_SHARE, 1 - at.phase_part) if at.phase_step else 1.0
        # a resumed phase has some steps behind it, perhaps all
        while not replica.position.phase_over or (phase.steps and not phase.losses):
            self._serve(replica)
            phase.began += self._wait_while_paused(replica)
            if self._phase is not phase:
                return  # a peer's state was adopted
            if not self._fetch(replica):
                if replica.is_stage and replica.round >= self._rounds:
                    break  # nothing comes any more: the first stages are done
                continue
            if self._awaits_memory(replica):
                continue
            try:
                with self._times.on("step"):
                    self._step(replica, phase)
            except ShortOfMemory as short:
                self._run_short(short)
                continue
            self._shortage_is_over(replica)
            phase.steps += 1
            self._read_clock(replica)
        self._serve(replica)
        if self._phase is not phase:
            return  # a state was adopted during the last step: it is trained on before its first boundary
        self._judge_so_far(replica)
        offer, closed = self._boundary(replica)
        seconds = time.perf_counter() - phase.began
        done = self._done(replica, phase, seconds)
        self._phase = _Phase(0.0)
        told_s = seconds / share + self._measured_s  # of a whole one, from boundary to boundary
        self._post(PhaseEnded(done, offer, closed, told_s, self._times.so_far()))
        if replica.round >= self._rounds:
            return
        if self._blocking:
            with self._times.on("waiting"):
                self._pass_on_until(replica, lambda: self._rounds_over >= replica.round)
            self._clock_read_at = time.perf_counter()  # the next phase begins here
        began = time.perf_counter()
        self._evaluate(replica)
        self._measured_s = time.perf_counter() - began

    def _fetch(self, replica: Replica) -> bool:
        """The next step's batch, if it comes before the mailbox is to be read again."""
        try:
            with self._times.on("data"):
                if replica.has_data(LOOK_S):
                    replica.fetch()
                    return True
        except Exception as error:  # noqa: BLE001 (a task of somebody's own raises everything)
            self._fail(replica, error)
        self._read_clock(replica)
        return False

    def _measured(self, replica: Replica, measure: Callable[[], T]) -> T | None:
        """None where there is nothing to measure with. Raises what a task of somebody's own does, which the weights may
        be to blame for: they are not to become a checkpoint."""
        try:
            with self._times.on("evaluate"):
                return measure()
        except NotMeasured:
            pass
        except OSError as error:
            if replica.steps == self._began_at:  # nothing new, which would push out an older checkpoint at each start
                raise
            self._fail(replica, error)
        return None

    def _fail(self, replica: Replica, error: Exception) -> None:
        """Between two steps: what was trained is not lost. The thread serves until it is stopped."""
        self._post(_failed(error, whole=True))
        self._serve_until(replica, lambda: False)

    # ---- on the training thread: memory of the GPU that another program has ----
    def _run_short(self, short: ShortOfMemory) -> None:
        now = time.perf_counter()
        if self._shortage is None:
            log.warning("waiting for memory of the GPU: %s", short)
            self._shortage = Shortage(str(short), now, now)
        if now - self._shortage.since > SHORTAGE_S:
            raise OutOfMemory(f"{short}, for {span(SHORTAGE_S)} now: end other programs on the GPU, then join again")
        self._shortage.again_at = now + MEMORY_S

    def _shortage_is_over(self, replica: Replica) -> None:
        if self._shortage:
            log.info("the GPU has memory again, after %s", span(time.perf_counter() - self._shortage.since))
            self._shortage = None
        swap, self._unjudged = self._unjudged, None
        if swap:
            self._judge(replica, swap)

    def _awaits_memory(self, replica: Replica) -> bool:
        """Whether it is too early to try again; waits until the mailbox is to be read."""
        if self._shortage is None or (wait_s := self._shortage.again_at - time.perf_counter()) <= 0:
            return False
        with self._times.on("waiting"):
            time.sleep(min(LOOK_S, wait_s))
        self._read_clock(replica)
        return True

    def _with_memory(self, replica: Replica, work: Callable[[], T]) -> T:
        """The work's result, once there is memory for it."""
        while True:
            try:
                result = work()
            except ShortOfMemory as short:
                self._run_short(short)
            else:
                self._shortage_is_over(replica)
                return result
            while self._awaits_memory(replica):
                self._serve(replica)

    def _step(self, replica: Replica, phase: _Phase) -> None:
        try:
            loss = replica.step()
        except NonFinite as error:
            self._roll_back(replica, str(error))
            return
        if math.isfinite(loss):
            self._failed_before = False
            phase.losses.append(loss)
            norm = replica.last_norm
            phase.norms += [norm] if norm is not None and math.isfinite(norm) else []

    def _done(self, replica: Replica, phase: _Phase, seconds: float) -> PhaseDone:
        tokens, mean = phase.steps * replica.tokens_per_step, phase.loss()
        return PhaseDone(
            round=replica.round,
            steps=replica.steps,
            loss=replica.last_loss if mean is None and replica.tokens else mean,
            tokens=tokens,
            seconds=seconds,
            stall_ms=self._stall_ms(),
            tokens_total=replica.tokens,
            learning_rate=replica.last_rate,
            gradient_norm=fmean(phase.norms) if phase.norms else None,
            mfu=replica.mfu(rate(tokens, seconds)),
            device_bytes=replica.device_bytes,
            host_bytes=memory.process_bytes(),
        )

    def _roll_back(self, replica: Replica, reason: str) -> None:
        """Raises Diverged when the last time did not help."""
        if self._failed_before:
            raise Diverged(f"{reason}, with older weights too: the run needs a smaller learning rate, or other data")
        self._failed_before = True
        saved = self._last_good(replica)
        if saved is None:
            replica.restart()
        else:
            replica.restore(saved)
            self._codec_thread.give_up(replica.round)
        self._post(RolledBack(replica.round, saved.round if saved else None, reason))

    def _boundary(self, replica: Replica) -> tuple[Offer | None, str | None]:
        with self._times.on("boundary"):
            try:
                closed = self._why_closed(replica)
                offered = None if closed else self._offered(replica)
                replica.boundary()
            except NonFinite as error:
                log.warning("this phase is thrown away: %s", error)
                if replica.slow.is_broken:  # raises Diverged where no checkpoint helps
                    self._roll_back(replica, str(error))
                    replica.end_without_step()
                else:
                    replica.discard()
                return None, "nonfinite"
        if offered is None:
            return None, closed or "no_memory"
        return Offer(self._codec_thread, replica.round, *offered, replica.theta.device), None

    def _offered(self, replica: Replica) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
        """None where the GPU has no memory for it."""
        for _ in range(2):
            try:
                return replica.snapshot()
            except torch.OutOfMemoryError:
                replica.make_room()
        return None

    def _why_closed(self, replica: Replica) -> str | None:
        """Why the boundary makes no offer."""
        if self._swapping:
            return SWAPPING
        if replica.skips:
            return "nonfinite"
        return "warming_up" if replica.warming_up else None

    def _evaluate(self, replica: Replica) -> None:
        """The sample text comes first: a node that ends waits for the evaluation."""
        self._sample(replica)
        loss = self._with_memory(replica, lambda: self._measured(replica, replica.evaluate))
        if loss is not None:
            self._course.passed(loss, untrained=replica.round == 0 and not replica.tokens)
            self._post(Evaluated(replica.round, loss))

    def _sample(self, replica: Replica) -> None:
        """Where the run asks for a text after this round. Training never ends for what is only looked at: a model that
        cannot write, or not in its present state, goes without."""
        spec, round_ = replica.samples, replica.round
        if spec is None or round_ == 0 or (round_ % spec.every and round_ < self._rounds):
            return
        until = time.perf_counter() + SAMPLE_S
        try:
            with self._times.on("sample"):
                text = replica.sample_text(lambda: time.perf_counter() < until)
        except Exception as error:  # noqa: BLE001 (transformers' models raise everything)
            log.warning("no sample text after round %d: %s: %s", round_, type(error).__name__, error)
        else:
            self._post(Sampled(round_, spec.prompt, text))

    def _stall_ms(self) -> float:
        """The training time that the last round cost."""
        before, self._stalled_s = self._stalled_s, self._times.stall_s()
        return 1000 * (self._stalled_s - before)

    def _wait_while_paused(self, replica: Replica) -> float:
        """Seconds of the pause, which count neither for the phase nor for the schedule."""
        if not self._paused:
            return 0.0
        began = time.perf_counter()
        with self._times.on("paused"):
            self._serve_until(replica, lambda: not self._paused)
        paused_s = time.perf_counter() - began
        self._clock_read_at += paused_s
        return paused_s

    def _read_clock(self, replica: Replica) -> None:
        """A phase's time includes all that this thread does, but no pauses and no waiting for a partner."""
        now = time.perf_counter()
        replica.position.spend(now - self._clock_read_at)
        self._clock_read_at = now


def _failed(error: BaseException, *, whole: bool = False) -> Failed:
    log.debug("training ended", exc_info=error)
    if memory_budget.is_out_of_memory(error):
        error = OutOfMemory("the model does not fit into memory: join another run, or free some")
    elif not isinstance(error, Exception) or isinstance(error, StopIteration):
        # the one would end the event loop too, the other be another error where a coroutine raises it
        said = NolocoError(f"training ended with {type(error).__name__}: {error}".removesuffix(": "))
        error = said.with_traceback(error.__traceback__)
    return Failed(error, whole)
