"""One replica: inner steps of AdamW, the boundaries of rounds, evaluations and its whole state. Plain blocking torch.

Notable choices:
- The model's parameters are views of ONE flat fp32 vector θ, so the outer step and a fragment's correction are each a
  few operations on slices. φ and δ are flat too; they and what partners bring are slow_weights.py.
- AdamW (inner/optimizer.py) sees the parameters. inner/gradients.py computes loss and gradient of a batch.
- A step whose loss or gradient is not finite is skipped and counted; the position in data and schedule moves on. After
  MAX_SKIPPED of them in a row the caller must restore weights that were good.
- Where it is in the run, and when a phase ends, is the business of its `position` (inner/schedule.py).

A Task says what is trained (task.py). Knows nothing of peers, threads or files; used by one thread only.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.base.validation import unsaveable
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.core.state import STATE_BYTES, State
from noloco_node.core.verdict import Losses, Trial
from noloco_node.errors import Diverged, NonFinite, PeerMisbehaved, UsageError
from noloco_node.host import gpu_peaks
from noloco_node.host.config import FULL
from noloco_node.run.schema import InnerSpec, Manifest, SampleSpec
from noloco_node.training import memory_budget, model
from noloco_node.training.background_copy import Copies, FileMemory, Pair, host_memory
from noloco_node.training.inner.gradients import Gradients, NotMeasured, ShortOfMemory, products
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.inner.schedule import Position
from noloco_node.training.slow_weights import SlowWeights, first_nonfinite
from noloco_node.training.task import (
    Batch,
    Closable,
    Comparable,
    Counted,
    Driven,
    ExampleStream,
    Passing,
    Patient,
    Task,
    Writing,
    new_model,
)
from noloco_node.training.workers import Workers

log = logging.getLogger(__name__)

MAX_SKIPPED = 10
"""Steps skipped in a row: one may be a bad batch; ten mean bad weights."""
LOSSES = 8
"""Steps whose mean loss goes into a checkpoint: one batch may be easy or hard."""
OWN_SHARE, OWN_TOKENS = 4, 1024
"""A swap is judged by one in so many of a batch's examples too, of at most so many tokens: what it costs is lost for
steps. Of 1024 tokens an honest swap raises that loss by at most 6% (99 of 100; `tiny`, steps of 1024 and 4096 tokens),
of 2048 as well; what may come often follows from other swaps (core/verdict.py)."""
WARM_UP_STEPS = 5
"""Of an AdamW that begins in the middle of a run: its first steps, each as long as the learning rate in every parameter
whatever the gradient, would spoil the weights. Until they are over, nothing is offered."""


class Replica:
    """training/build.py makes the one that a manifest describes."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        task: Task,
        module: nn.Module,
        stream: ExampleStream,
        manifest: Manifest,
        micro_batch: int | None = None,
        memory_fraction: float = 1.0,
        moments: str = FULL,
        compile: Callable[[], object] | None = None,
        make_workers: Callable[[Sequence[nn.Parameter], Tensor], Workers] | None = None,
    ) -> None:
        """`make_workers`: makes the processes that compute shares of the gradients."""
        self._spec = manifest.inner
        self.module = module.train()
        self.stream = stream
        self.layout = model.layout_digest(module)
        self.theta = model.flatten(module)
        self._pointers = model.pointers(module)
        self.position = Position(self._spec, manifest.rounds)
        self.copies = Copies(self.theta.device)
        self._places, self._weights = model.places(named := model.parameters(module)), [p for _, p in named]
        self.slow = SlowWeights(
            self.theta, self._places, manifest.outer, self.position, self.copies, memory_fraction, moments
        )
        self.phi, self.delta = self.slow.phi, self.slow.delta
        self._optimizer = (
            task.optimizer(module, self.theta, self._about_to_step)
            if isinstance(task, Driven)
            else Optimizer(module, self._spec, moments)
        )
        self._task, self._seed, self._memory_fraction = task, manifest.seed, memory_fraction
        self.samples: SampleSpec | None = manifest.sample
        """The text that the model continues every few rounds."""
        self._moments, self.program_bytes = moments, 0
        """What the process has beside the model, before it trains: libraries, mostly."""
        round_bytes = memory_budget.round_bytes(self.parameters, self.phi.is_cuda)
        passes = task.gradients if isinstance(task, (Passing, Driven)) else Gradients
        self._workers = make_workers(list(module.parameters()), self.theta) if make_workers else None
        self._gradients = passes(
            task, module, self._optimizer, self._spec, micro_batch, memory_fraction, compile, round_bytes, self._workers
        )
        self.copies.spare = lambda: self._gradients.spare_bytes() or 0
        peak = _most_tokens_per_s(task, module, self.theta.device, self._spec)
        self._most_tokens_per_s = peak and peak * (self._workers.shares if self._workers else 1)
        self.skipped = self._skipped_in_row = 0
        """Skipped steps, without a finite loss and gradient."""
        self.last_loss = 0.0
        """Of the last step that was not skipped."""
        self.last_norm: float | None = None
        """Of the last step's gradient, before clipping; not finite where the step was skipped; None: not known."""
        self.last_rate: float | None = None
        """The last step's learning rate; None before the first one."""
        self._losses: deque[float] = deque(maxlen=LOSSES)
        """Of the last steps that were not skipped, of these weights."""
        self._eval_loss: float | None = None
        """Of the last evaluation, of these weights."""
        self._measured_on = task.held_out_digest() if isinstance(task, Comparable) else None
        self._warm_up_left = 0
        """Steps of a fresh AdamW that still have a lower learning rate."""
        self._others: list[Tensor] = []  # memory for other weights, while some are tried
        self._own_examples: Batch | None = None
        """Some of the batch that was fetched last."""
        self._batch: Batch | None = None
        """Of the next step, when it has been fetched."""
        self._batch_at: Any = None
        self.spill_folder: Callable[[], Path] | None = None
        """For a copy of the state that memory has no room for."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called in each step, after its gradient was queued: a GPU works at it then. It may add corrections."""

    def begin_with(self, folder: Path) -> None:
        """Before the first step: a folder's weights in place of random ones. Raises UsageError."""
        model.begin_with(self.module, folder)
        self.phi.copy_(self.theta)

    def close(self) -> None:
        """No further step. Waits for the copies under way."""
        if self._workers:
            self._workers.close()
        self.copies.complete()
        if isinstance(self.stream, Closable):
            self.stream.close()
        if self.theta.is_cuda:  # copies may still use the host's memory, which goes with the replica
            torch.cuda.synchronize(self.theta.device)

    def while_working(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """Put `around` around work that is done while a batch is waited for."""
        self._gradients.working = around

    @property
    def is_stage(self) -> bool:
        """Whether it is a part of a model, so that its batches come from other nodes, or depend on them."""
        return isinstance(self._task, Passing)

    def pass_on(self, within_s: float) -> bool:
        """Serve other nodes for so long, without training. False for a whole model, which has nobody to serve."""
        if isinstance(self._task, Passing):
            self._task.pass_on(within_s)
        return self.is_stage

    # ---- sizes and positions ----
    @property
    def parameters(self) -> int:
        return len(self.theta)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the parameters, in the order of the flat vectors."""
        return {name: p.shape for name, p in model.parameters(self.module)}

    @property
    def round(self) -> int:
        return self.position.round

    @property
    def steps(self) -> int:
        return self.position.steps

    @property
    def tokens_per_step(self) -> int:
        return self._spec.batch_tokens

    @property
    def tokens(self) -> int:
        """That this replica has trained on; its checkpoints count them."""
        return self.position.taken * self.tokens_per_step

    def mfu(self, tokens_per_s: float | None) -> float | None:
        """The share of the device's arithmetic that the model's products take at this rate; None where it is not
        known."""
        return tokens_per_s / self._most_tokens_per_s if tokens_per_s and self._most_tokens_per_s else None

    @property
    def micro_batch(self) -> int:
        """Examples that go through the model at once."""
        return self._gradients.micro_batch

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return -(-self._gradients.share // self.micro_batch)

    def memory_plan(self, moments: str | None = None) -> memory_budget.Plan:
        """What training takes at most, with the activations of a micro-batch once one was tried. `moments`: with others
        than its own."""
        return memory_budget.plan(
            self.parameters,
            on_gpu=self.theta.is_cuda,
            slow_on_gpu=self.phi.is_cuda,
            bf16=products(self.theta.device, self._spec.precision) is not None,
            moments=moments or self._moments,
            activations=self._gradients.activations or 0,
            program=self.program_bytes,
        )

    @property
    def device(self) -> str:
        kind = self.theta.device.type
        return f"{self._workers.shares} × {kind}" if self._workers else kind

    @property
    def device_bytes(self) -> int | None:
        """The most memory of the accelerator that torch has taken; None on a CPU."""
        return torch.cuda.max_memory_reserved(self.theta.device) if self.theta.is_cuda else None

    @property
    def device_limit_bytes(self) -> int | None:
        """What torch may take there."""
        if not self.theta.is_cuda:
            return None
        return int(self._memory_fraction * torch.cuda.get_device_properties(self.theta.device).total_memory)

    @property
    def gpu_uuid(self) -> str | None:
        """By which its driver knows the GPU; None where torch does not say."""
        found = torch.cuda.get_device_properties(self.theta.device) if self.theta.is_cuda else None
        return str(uuid) if (uuid := getattr(found, "uuid", None)) else None

    @property
    def warming_up(self) -> bool:
        """Whether AdamW is too fresh for this replica to be offered."""
        return self._warm_up_left > 0

    # ---- inner steps ----
    def try_out(self, *, losses: bool = False) -> None:
        """A micro-batch forward and backward, before the first step and before a state is downloaded: what cannot work
        here fails now, and so does what would need more memory than there is. `losses`: and an evaluation, as that of
        somebody's own task may fail. The stream's position and the random state stay as they are. Raises UsageError,
        OutOfMemory."""
        position = self._in_stream()
        plan = self.memory_plan, self._moments, self.theta.device, self._memory_fraction
        try:
            with torch.random.fork_rng(devices=[self.theta.device] if self.theta.is_cuda else []):
                batch = self._next(self._gradients.examples_tried)
                self._gradients.try_out(batch)
                if losses:
                    self._gradients.try_losses(batch)
        except ShortOfMemory:
            memory_budget.check(*plan)  # the sum of the rest may say it better
            raise
        self.stream.seek(position)
        model.require_in_place(self.module, self._pointers)
        memory_budget.check(*plan)

    def make_room(self) -> None:
        """On a GPU: what the last step left."""
        self._gradients.make_room()

    def has_data(self, within_s: float) -> bool:
        """Whether the next batch is there; waits for a Patient stream no longer than this."""
        return not isinstance(self.stream, Patient) or self.stream.ready(self._gradients.examples, within_s)

    def fetch(self) -> None:
        """Read the next step's batch now, so that reading and training can be timed apart. It stays the next one until
        a step is done with it, and swaps are judged by some of it until the next one is read."""
        if self._batch is None:
            self._batch_at = self._in_stream()
            try:
                self._batch = self._next(self._gradients.examples)
            except Exception:
                with suppress(Exception):  # what was to be read is still the next batch, and a checkpoint says so
                    self.stream.seek(deepcopy(self._batch_at))
                raise
            own = min(self._gradients.examples // OWN_SHARE, OWN_TOKENS // self._task.tokens_per_example)
            self._own_examples = tuple(part[: max(1, own)] for part in self._batch)

    def _next(self, examples: int) -> Batch:
        try:
            return self.stream.next(examples)
        except StopIteration:  # as an iterator over a data set has it at the end of an epoch
            raise UsageError("the task's examples have ended: a stream is endless, so let it begin again") from None

    @property
    def _data_position(self) -> Any:
        """In the stream, of the next step's batch."""
        return self._in_stream() if self._batch is None else self._batch_at

    def _in_stream(self) -> Any:
        """The stream's position, which it may change in place from now on. Raises UsageError where no checkpoint could
        give it back."""
        position = self.stream.position
        if why := unsaveable(position):
            raise UsageError(
                f"the stream's position {why}: it may hold Python's own numbers, strings, lists, tuples and dicts"
            )
        return deepcopy(position)

    def step(self) -> float:
        """One step of AdamW. Returns its loss, which is not finite where the step was skipped. Raises NonFinite after
        MAX_SKIPPED of them in a row; then call `restore` or `restart`. Raises ShortOfMemory, and then it can be done
        again, with the same batch. Raises UsageError where the model's weights are no longer those that the node
        has."""
        self.fetch()
        batch = self._batch or ()
        self._gradients.begin(batch)
        model.require_in_place(self.module, self._pointers)  # takes 0.6 ms of 24 layers, while a GPU works
        self.meanwhile()
        loss, norm = self._gradients.finish()
        self.last_norm = norm
        if math.isfinite(loss) and (norm is None or math.isfinite(norm)):
            self._descend()
            self._skipped_in_row, self.last_loss = 0, loss
            self._losses.append(loss)
        else:
            self.skipped += 1
            self._skipped_in_row += 1
        self._batch = None
        self.position.step()
        if self._skipped_in_row == MAX_SKIPPED:
            self._skipped_in_row = 0
            raise NonFinite(f"{MAX_SKIPPED} steps in a row had no finite loss and gradient")
        return loss

    def _descend(self) -> None:
        rate = self.position.learning_rate * (1 - self._warm_up_left / (WARM_UP_STEPS + 1))
        self._about_to_step()
        self.last_rate = self._gradients.step(rate)
        self._warm_up_left = max(0, self._warm_up_left - 1)

    def _about_to_step(self) -> None:
        """Before AdamW changes what is being copied."""
        self.copies.secure("theta")
        self.copies.secure("moments")

    # ---- the boundary of a round ----
    def snapshot(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What a partner needs, right before `boundary`: SlowWeights.snapshot."""
        self._optimizer.free_gradients()
        return self.slow.snapshot()

    def boundary(self) -> None:
        """The local outer step: afterwards θ = φ, and the next round begins. Raises NonFinite, and then nothing has
        changed: `discard` the phase."""
        self.slow.step()
        self.position.next_round()

    @property
    def skips(self) -> bool:
        """Whether the last step was skipped: the weights may be broken, and are not to be offered."""
        return self._skipped_in_row > 0

    def discard(self) -> None:
        """Throw the phase away, as `restart` does, and end it. Raises Diverged."""
        self.restart()
        self.end_without_step()

    def end_without_step(self) -> None:
        """End the phase; θ, φ and δ stay as they are."""
        self.position.next_round()
        self.slow.stayed()

    def restart(self) -> None:
        """In the middle of a phase: θ becomes φ again, with a fresh AdamW. Raises Diverged if φ is not finite."""
        if self.slow.is_broken:
            raise Diverged("the model holds NaN or Inf: start the node again, it goes on from its last checkpoint")
        self._begin_at_phi()

    def restore(self, saved: State) -> None:
        """In the middle of a phase: weights and optimizers become the saved ones. Round, schedule and data go on from
        here: a run never goes back, and the batches that caused it do not come again."""
        self._take_weights(saved)
        self.slow.replaced()

    def losses(self, *, own: bool = True) -> Losses:
        """At the present θ."""
        if not own or not self._own_examples:  # a loop and a stage show it none
            return Losses(self._gradients.evaluate(tries=True))
        with self._gradients.evaluating():  # to copy the weights to bf16 takes a CPU as long as a short example
            return Losses(self._gradients.evaluate(tries=True), self._gradients.loss(self._own_examples))

    def losses_without(self, partner: float = 0.0, *, own: bool = True) -> Losses:
        """At θ without the last swap, or with `partner` = 1 at what the partner sent (slow_weights.py)."""
        with self._elsewhere() as others:
            self.slow.write_without_swap(others, partner)
            return self.losses(own=own)

    @contextmanager
    def trying_others(self) -> Iterator[None]:
        """Within, memory for other weights is there: what the gradients have in a step, which an evaluation frees."""
        self._others = self._optimizer.room(self._weights)
        try:
            yield
        finally:
            self._others = []

    @contextmanager
    def _elsewhere(self) -> Iterator[list[Tensor]]:
        """Within, the model's weights are these tensors, which are to be filled. θ stays as it is."""
        with nullcontext() if self._others else self.trying_others(), model.elsewhere(self._weights, self._others):
            yield self._others

    # ---- evaluation ----
    def evaluate(self) -> float:
        """Loss of φ, the weights that are published, on held-out data, the same for every replica. Raises
        ShortOfMemory, NotMeasured."""
        if self.position.phase_step == 0:  # θ is φ
            self._eval_loss = self._gradients.evaluate()
            return self._eval_loss
        try:  # where training begins again in the middle of a phase
            with self._elsewhere() as others:
                self.slow.arrive()
                model.fill(others, self.phi)
                self._eval_loss = self._gradients.evaluate()
        except torch.OutOfMemoryError:
            raise ShortOfMemory("the GPU has no memory to evaluate the slow weights") from None
        return self._eval_loss

    def sample_text(self, go_on: Callable[[], bool]) -> str:
        """How the model at the present θ continues the run's prompt; asked before each further token. Like an
        evaluation, it changes nothing that is trained."""
        text = ""
        if isinstance(self._task, Writing):
            with self._gradients.evaluating():
                for piece in self._task.sample(self.module):
                    text += piece
                    if not go_on():
                        break
        return text

    # ---- the whole state ----
    def state(self) -> State:
        return self.copy_state().result()

    def copy_state(self) -> "Future[State]":
        """The state as it is now, when all of it is copied; training may go on meanwhile (background_copy.py). Raises
        OutOfMemory."""
        now = self._optimizer.state()
        file = self._spill([self.theta, self.phi, self.delta, *(v for of_one in now.values() for v in of_one.values())])
        new = file.take if file else host_memory
        theta, phi, delta = (new(vector.shape) for vector in (self.theta, self.phi, self.delta))
        moments = {
            place: {name: new(value.shape, value.dtype) for name, value in of_one.items()}
            for place, of_one in now.items()
        }
        shapes = self.shapes
        state = State(
            self.round,
            self.steps,
            {name: theta[start:end].view(shapes[name]) for name, start, end in self._places},
            {"phi": phi, "delta": delta},
            {
                "optimizer": moments,
                "position": self._data_position,
                "phase_step": self.position.phase_step,
                "phase_s": self.position.phase_s,
                "taken": self.position.taken,
                "skipped": self.skipped,
                "skipped_in_row": self._skipped_in_row,
                "last_loss": self.last_loss,
                "warm_up_left": self._warm_up_left,
                "norms": self.slow.scales,
                "rng": torch.get_rng_state(),
                "device_rng": torch.cuda.get_rng_state(self.theta.device) if self.theta.is_cuda else None,
            },
            self._eval_loss,
            fmean(self._losses) if self._losses else None,
            self._measured_on,
        )
        flat = ((now[place][name], into) for place, of_one in moments.items() for name, into in of_one.items())
        pairs = [Pair(source, into, file) for source, into in flat]
        slow = [Pair(self.phi, phi, file), Pair(self.delta, delta, file)]
        # first what the step under way changes
        return self.copies.begin({"theta": [Pair(self.theta, theta, file)], "moments": pairs, "slow": slow}, state)

    def _spill(self, tensors: Sequence[Tensor]) -> FileMemory | None:
        """A file for copies of these, where memory has no room for them. Raises DiskFull, UsageError."""
        size = FileMemory.size(tensor.nbytes for tensor in tensors)
        if self.spill_folder is None or memory_budget.has_room(size):
            return None
        log.info("memory has no room for a checkpoint: its copy goes to the disk")
        return FileMemory(self.spill_folder(), size)

    def copy_slow(self) -> "Future[tuple[int, memoryview]]":
        """The round, and all of φ, then all of δ, as they are now, for a joining node: fp32, little-endian. Who asks
        while such a copy is made gets the same. Raises OutOfMemory."""
        if found := self.copies.under_way("slow"):
            return found
        needed = self.parameters * (memory_budget.COPY_BYTES + STATE_BYTES)
        memory_budget.check_free(needed, "a copy of the state, beside a checkpoint,")
        both = host_memory((2, self.parameters))
        data: memoryview = both.numpy().data
        slow = [Pair(self.phi, both[0]), Pair(self.delta, both[1])]
        return self.copies.begin({"slow": slow}, (self.round, data.cast("B")))

    def load(self, saved: State) -> None:
        """Go on where `state` was taken, of data that has no such place at its beginning; checkpoints/ checks the
        rest."""
        try:
            self.stream.seek(saved.inner["position"])
        except ValueError:
            log.warning("the data, or Python, has changed since the checkpoint: training goes on at its beginning")
        self._batch = None
        self._take_weights(saved)
        self.position.round, self.position.phase_step = saved.round, saved.inner["phase_step"]
        self.position.phase_s, self.position.taken = saved.inner["phase_s"], saved.inner["taken"]
        self.skipped, self._skipped_in_row = saved.inner["skipped"], saved.inner["skipped_in_row"]
        self.slow.load_scales(saved.inner["norms"])
        self.last_loss = saved.inner["last_loss"]
        torch.set_rng_state(saved.inner["rng"])
        if self.theta.is_cuda and saved.inner["device_rng"] is not None:
            torch.cuda.set_rng_state(saved.inner["device_rng"], self.theta.device)

    def _take_weights(self, saved: State) -> None:
        """Of both optimizers too."""
        self.slow.become(saved.outer["phi"], saved.outer["delta"])
        for name, p in model.parameters(self.module):
            p.data.copy_(saved.weights[name])
        self._warm_up_left = saved.inner["warm_up_left"]
        if self._optimizer.is_kin(saved.inner["optimizer"]):
            self._optimizer.load(saved.inner["optimizer"])
        else:
            log.warning("the checkpoint is of another optimizer, or of other --moments: it begins afresh and warms up")
            self._optimizer.restart()
            self._warm_up_left = WARM_UP_STEPS
        self._forget_losses()

    def sample(self, blocks: Sequence[int]) -> bytes:
        """Some blocks of the slow weights: fp32, little-endian. Raises PeerMisbehaved where there is no such block."""
        if any(block * BLOCK >= self.parameters for block in blocks):
            raise PeerMisbehaved("bad_blocks", "beyond the model")
        self.slow.arrive()
        parts = [self.phi[block * BLOCK : (block + 1) * BLOCK] for block in blocks]
        return torch.cat(parts).cpu().numpy().tobytes()

    def try_state(self, live_state: bytes | memoryview) -> Trial:
        """What a peer's state is worth here; nothing is changed. Its momentum is tried too: slow weights that are good
        could come with one that spoils them at the next boundary. NaN for this node's own: nothing can be measured
        here. Raises PeerMisbehaved, and OutOfMemory where there is no room for other weights and for a new model."""
        phi, delta = self._read(live_state)
        memory_budget.check_free(12 * self.parameters, "trying a peer's state")  # other weights, and a new model's
        added = self.slow.settings.alpha * float(delta.norm()) / max(float(phi.norm()), 1e-30)
        try:
            own = self._gradients.evaluate(tries=True)
            with self._elsewhere() as others:
                model.fill(others, phi)
                theirs = self._gradients.evaluate(tries=True)
                for part, (_, start, end) in zip(others, self._places, strict=True):
                    part.view(-1).add_(delta[start:end].to(part.device), alpha=self.slow.settings.alpha)
                later = self._gradients.evaluate(tries=True)
                new = own
                if (self.round or self.steps) and not isinstance(self._task, Driven):
                    model.fill(others, model.flatten(new_model(self._task, self._seed)))
                    new = self._gradients.evaluate(tries=True)
        except NotMeasured:  # of a stage: those after it may go at any moment
            return Trial(math.nan, 0.0, 0.0, added, math.nan)
        return Trial(own, theirs, later, added, new)

    def adopt(self, round: int, live_state: bytes | memoryview) -> None:
        """Take a peer's state (`copy_slow`): θ = φ, and a fresh AdamW that warms up. Raises PeerMisbehaved, and
        then nothing has changed."""
        phi, delta = self._read(live_state)
        self.slow.become(phi, delta)
        self._begin_at_phi()
        self.position.move_to(round)
        self.slow.replaced()  # also where the round was a later one before: those in between come again

    def _read(self, live_state: bytes | memoryview) -> tuple[Tensor, Tensor]:
        """Its slow weights and outer momentum, on the CPU."""
        if len(live_state) != 8 * self.parameters:
            raise PeerMisbehaved("bad_state", f"{len(live_state)} bytes instead of {8 * self.parameters}")
        numbers = np.frombuffer(live_state, np.float32)
        both = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())
        if first_nonfinite(both) is not None:
            raise PeerMisbehaved("nonfinite", "state")
        return both[: self.parameters], both[self.parameters :]

    def _begin_at_phi(self) -> None:
        """θ = φ, and an AdamW without moments: copies that are made hold the old ones."""
        self.slow.begin_at_phi()
        self._optimizer.restart()
        self._warm_up_left = WARM_UP_STEPS
        self._forget_losses()

    def _forget_losses(self) -> None:
        """They were those of other weights."""
        self._losses.clear()
        self._eval_loss = None


def _most_tokens_per_s(task: Task, module: nn.Module, device: torch.device, spec: InnerSpec) -> float | None:
    """What the device's arithmetic would do; None where its peak or the model's products are not known."""
    if device.type != "cuda" or spec.precision != "bf16" or not isinstance(task, Counted):
        return None
    peak, each = gpu_peaks.bf16_flops(torch.cuda.get_device_name(device)), task.flops_per_token(module)
    return peak / each if peak and each else None
