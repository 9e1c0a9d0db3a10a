"""Micro-batches through one stage, on the training thread: what it computes, and what it adds up for its own step.

A micro-batch is one nested call: a stage computes its activations without a graph, sends them to the next stage, and
gets the gradient at them back; then it computes forward again, with the weights of that moment, and backward. The last
stage computes once. So a stage steps whenever its own tokens are together, while other micro-batches are under way:
no drain, no weights kept, and one input in memory for each micro-batch under way.

- To wait for a step's batch is to work at micro-batches: when the stream is `ready`, the gradient is there.
- A gradient is a sum over tokens, divided by their number before the step. What a token is, each stage counts itself.
- A stage does not know the norm of the whole gradient. It clips its own by the run's bound over the root of the number
  of stages, as if all had the same.
- What is sent to a stage may be larger than what fits here: it goes through in parts, each computed forward once more
  where there is a gradient.
- What comes in lies in one queue of letters (stages/letters.py).
- To evaluate takes the stages before: the first one sends its held-out data along, and every other keeps what came
  last, and measures with that.

Knows nothing of peers: `Link` is handed in.
"""

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from noloco_node.core import gpu
from noloco_node.errors import OutOfMemory, UsageError
from noloco_node.run.schema import InnerSpec, Manifest
from noloco_node.stages.callers import Callers, Turns
from noloco_node.stages.held import Kept
from noloco_node.stages.letters import Answer, Answered, Asked, Letter, Link, Lost, LostMicroBatch, Sent
from noloco_node.stages.part import Part, Position, part_of
from noloco_node.stages.usual_size import UsualSize
from noloco_node.stages.window import Window
from noloco_node.training import memory_budget
from noloco_node.training.inner.gradients import Gradients, NotMeasured, split
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.task import Batch, Closable, Comparable, ExampleStream, Patient, Sized, Task

DEADLINE_S = 20.0
"""For a micro-batch, from its activations to the gradient at them."""
EVALUATION_S = 10.0
"""For all of an evaluation, in which nothing is trained. A swap's verdict takes two or three."""
MEASURED_AT_ONCE = 4
"""Micro-batches of an evaluation under way: without a graph they may be as large as a step."""
WITH_GRADIENT = 3
"""Times the work of a micro-batch that only evaluates."""
PASSED_ON = 0.9
"""Of the time that a stage is given, what it gives the next one."""
MOST_OF_ACTIVATIONS = 100.0
"""Times the usual size: they grow fast in the first steps, and a layer begins with a norm of its own."""
STRANGE = 8
"""Micro-batches in a row without a finite loss: it may be the sender's fault, then it is this stage's own."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Since the start; written on the training thread, read on any."""

    passed: int = 0
    """Micro-batches whose gradient went into a step here."""
    lost: int = 0
    under_way: int = 0
    not_counted: int = 0
    """Answered for the stage before, and not learned from (stages/callers.py)."""
    not_believed: tuple[str, ...] = ()
    """Callers whose micro-batches are much worse than the others'."""
    heard: Mapping[str, float] = field(default_factory=dict)
    """Callers, and when each sent its last micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """A micro-batch that is at the next stage."""

    inputs: Tensor
    targets: Tensor
    asked: Asked | None
    """Who waits for it; None in the first stage."""
    until: float


# ---- what a replica trains -------------------------------------------------------------------------------------------
class StageTask:
    """A part of a task as a task: its passes go through other nodes."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        part: Part,
        whole: Task,
        at: Position,
        link: Link,
        letters: "queue.SimpleQueue[Letter]",
        in_flight: int | None = None,
    ) -> None:
        """`in_flight`: micro-batches under way at once; None: found by trying."""
        self.part, self.at, self.link, self.letters, self._whole = part, at, link, letters, whole
        self.window = Window(in_flight or 2 * at.stages, fixed=in_flight is not None)
        self.counts = Counts()
        self.tokens_per_example = whole.tokens_per_example
        self.micro_examples = whole.micro_examples
        self.reader: ExampleStream | None = None
        """Of the first stage."""
        self._passes: StagePasses | None = None

    @property
    def most_examples(self) -> int | None:
        """Of a micro-batch: a step's, once its size is known."""
        return self._passes.examples if self._passes else None

    def model(self) -> nn.Module:
        return self.part.model()

    def parameters(self) -> int | None:
        return self.part.parameters() if isinstance(self.part, Sized) else None

    def stream(self, peer_id: str) -> ExampleStream:
        if self.at.first:
            self.reader = self.part.stream(peer_id)
        return _StepStream(self)

    def gradients(self, *whole: Any) -> "StagePasses":
        self._passes = StagePasses(self, *whole)
        return self._passes

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError("a stage alone has no loss")

    def evaluate(self, module: nn.Module, examples: int) -> float:
        raise NotImplementedError("a stage alone has no loss")

    def held_out_digest(self) -> str | None:
        """Of the first stage; what a later one measures on comes from its callers."""
        return self._whole.held_out_digest() if self.at.first and isinstance(self._whole, Comparable) else None

    def advance(self, within_s: float) -> bool:
        """Work at micro-batches, for so long at most; whether a step's are through."""
        return self._passes is not None and self._passes.advance(within_s)

    def pass_on(self, within_s: float) -> None:
        if self._passes:
            self._passes.pass_on(within_s)


class _Nobody:
    """The link of a stage that is only tried out."""

    def ready(self) -> bool:
        return False

    def send(self, micro: Sent) -> None:
        raise NotImplementedError("nobody is there")


def alone(run: Manifest, at: Position) -> Callable[[Task], Task]:
    """One stage without the others."""
    return lambda whole: StageTask(part_of(whole, run, at), whole, at, _Nobody(), queue.SimpleQueue())


class _StepStream:
    """A stream whose next batch is ready when its gradient is there; the batch itself is gone by then."""

    def __init__(self, task: StageTask) -> None:
        self._task = task

    @property
    def position(self) -> Any:
        return self._task.reader.position if self._task.reader else None

    def seek(self, position: Any) -> None:
        if self._task.reader:
            self._task.reader.seek(position)

    def next(self, examples: int) -> Batch:
        return ()

    def ready(self, examples: int, within_s: float) -> bool:
        return self._task.advance(within_s)

    def close(self) -> None:
        reader: object = self._task.reader
        if isinstance(reader, Closable):
            reader.close()


class StagePasses(Gradients):
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        stage: StageTask,
        task: Task,
        module: nn.Module,
        optimizer: Optimizer,
        spec: InnerSpec,
        micro_batch: int | None,
        *rest: Any,
    ) -> None:
        examples = spec.batch_tokens // stage.tokens_per_example
        some = max(1, examples // (2 * stage.at.stages))  # else a step would be one micro-batch, and nothing overlap
        super().__init__(task, module, optimizer, spec, micro_batch or min(some, stage.micro_examples), *rest)
        if self._scale is not None:
            raise UsageError("stages: a GPU without bf16 cannot train one yet: use precision fp32, or --device cpu")
        optimizer.clip = spec.clip / math.sqrt(stage.at.stages)
        self._stage, self._part, self._at = stage, stage.part, stage.at
        self._wanted = spec.batch_tokens
        self._loss_sum = 0.0
        """Of the tokens that the optimizer holds the gradient of."""
        self._under_way: dict[int, _UnderWay] = {}
        self._tickets = 0
        self._put_off: deque[Letter] = deque()
        """Answers of the next stage that have come."""
        self._turns = Turns[Asked]()
        self._kept = Kept[tuple[Tensor, Tensor]]()
        """Held-out activations and targets that each caller of the stage before sent last."""
        self._callers = Callers()
        self._usual_gradient, self._usual_activations = UsualSize(), UsualSize(MOST_OF_ACTIVATIONS)
        self._strange = 0
        """Micro-batches in a row without a finite loss."""
        self._training = True

    # ---- for a step ----
    def advance(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while self._optimizer.held < self._wanted:
            if self._may_send():
                with self.working():
                    self._send_examples()
            elif letter := self._next_letter(until - time.monotonic()):
                with self.working():
                    self._open(letter)
            elif time.monotonic() >= until:
                return False
            if time.monotonic() >= until:
                break
        return self._optimizer.held >= self._wanted

    def begin(self, batch: Batch) -> None:
        """Nothing: the passes are over."""

    def finish(self) -> tuple[float, float]:
        tokens, loss = self._optimizer.held, self._loss_sum
        norm = float(self._optimizer.norm()) / tokens
        self._optimizer.divide(tokens)
        self._optimizer.held = 0  # from now on the gradient may be freed
        return loss / tokens, norm

    def pass_on(self, within_s: float) -> None:
        """Answer the stage before, for so long, and take no gradients."""
        until = time.monotonic() + within_s
        self._training = False
        try:
            while (left_s := until - time.monotonic()) > 0:
                if letter := self._next_letter(left_s):
                    self._open(letter)
        finally:
            self._training = True

    def _may_send(self) -> bool:
        reader, waits = self._stage.reader, len(self._under_way) >= self._stage.window.size
        if reader is None or waits or not self._stage.link.ready():
            return False
        return not isinstance(reader, Patient) or reader.ready(self._micro.size, 0)

    def _next_letter(self, within_s: float) -> Letter | None:
        with suppress(queue.Empty):
            while True:
                self._put_away(self._stage.letters.get_nowait())
        if self._put_off:
            return self._put_off.popleft()
        if asked := self._turns.next():
            return asked
        if self._at.first and len(self._under_way) >= self._stage.window.size:
            self._stage.window.waited()
        return self._wait_for_letter(within_s)

    def _put_away(self, letter: Letter) -> None:
        if isinstance(letter, Asked):
            work = 1 if letter.evaluates else WITH_GRADIENT
            self._turns.put(letter.caller, letter, work * len(letter.targets))
        else:
            self._put_off.append(letter)

    def _wait_for_letter(self, within_s: float) -> Letter | None:
        with suppress(queue.Empty):
            return self._stage.letters.get(timeout=max(0.0, within_s))
        return None

    # ---- micro-batches ----
    def _send_examples(self) -> None:
        """The first stage's next ones."""
        assert self._stage.reader is not None
        inputs, targets = self._part.split(self._stage.reader.next(self._micro.size))
        until = time.monotonic() + DEADLINE_S
        self._or_lose(None, lambda: self._forward(self._there(inputs), targets, None, until))

    def _open(self, letter: Letter) -> None:
        match letter:
            case Asked():
                if letter.answer.set_running_or_notify_cancel():
                    self._or_lose(letter, partial(self._answer, letter))
            case Answered(ticket, answer) if under_way := self._under_way.pop(ticket, None):
                self._or_lose(under_way.asked, partial(self._back, under_way, answer))
            case Lost(ticket) if under_way := self._under_way.pop(ticket, None):
                self._lose(under_way.asked)
            case _:
                pass  # an answer that came too late
        if not self._put_off:  # else an answer that came in time may lie there, after a pause
            self._forget_late()
        self._stage.counts.under_way = len(self._under_way)

    def _or_lose(self, asked: Asked | None, work: Callable[[], None]) -> None:
        """A micro-batch that finds no memory is lost."""
        try:
            work()
            return
        except (RuntimeError, MemoryError) as error:
            if not memory_budget.is_out_of_memory(error):
                raise
        # its memory is free only after that block
        self._lose(asked)
        self.make_room()
        self._micro.halve()

    def _answer(self, asked: Asked) -> None:
        size, now = _size(asked.activations), time.monotonic()
        factor = self._usual_activations.factor(size, now)
        if not asked.evaluates:  # evaluations are not limited, so they move nothing
            self._usual_activations.counts(size, asked.caller, now)
        if factor < 1:
            self._lose(asked)
            return
        if not self._at.last and not self._callers.passes_on(asked.caller, len(asked.targets), asked.evaluates, now):
            self._lose(asked)
            return
        if asked.evaluates and not asked.tries:
            self._keep(asked)
        inputs = self._there(asked.activations)
        if not self._at.last:
            self._forward(inputs, asked.targets, asked, time.monotonic() + PASSED_ON * (asked.until - time.monotonic()))
        elif asked.evaluates:
            asked.answer.set_result(Answer(self._held_out_loss([(inputs, asked.targets)]), None))
        else:
            inputs.requires_grad_()
            loss = self._loss_in_parts(inputs, asked.targets)
            self._finish_backward(loss, None, inputs, asked.targets, float(loss.detach()), asked)

    def _forward(self, inputs: Tensor, targets: Tensor, asked: Asked | None, until: float) -> None:
        """To the next stage."""
        evaluates = asked is not None and asked.evaluates
        with self.evaluating() if evaluates else torch.no_grad():
            activations = self._activations(inputs)
        if self._is_strange(float(activations.sum()), targets):
            self._lose(asked)
            return
        self._tickets += 1
        self._under_way[self._tickets] = _UnderWay(inputs, targets, asked, until)
        tries = asked is not None and asked.tries
        self._stage.link.send(Sent(self._tickets, activations, targets, evaluates, until, asked, tries))

    def _back(self, under_way: _UnderWay, answer: Answer) -> None:
        """The gradient at the activations has come."""
        asked = under_way.asked
        if answer.gradient is None:
            if asked:
                asked.answer.set_result(answer)
            return
        if self._at.first:
            self._stage.window.passed(time.monotonic())
            if not self._training:
                return
        size = _size(answer.gradient)
        factor = self._usual_gradient.factor(size)
        if not factor:
            self._lose(asked)
            return
        self._usual_gradient.counts(size)
        inputs = under_way.inputs
        if not self._at.first:
            inputs = inputs.detach().requires_grad_()
        gradient = self._there(answer.gradient) * factor
        self._finish_backward(self._activations(inputs), gradient, inputs, under_way.targets, answer.loss, asked)

    def _activations(self, inputs: Tensor) -> Tensor:
        return torch.cat(self._in_parts(self._part.forward, inputs)).float()

    def _loss_in_parts(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of the last stage."""
        return torch.stack(self._in_parts(self._part.loss, inputs, self._there(targets))).sum()

    def _in_parts(self, compute: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
        """With what the backward pass needs, of one part at a time where there are several."""
        parts = list(split(given, self._micro.size))
        with self._precision():
            if len(parts) == 1:
                return [compute(self._module, *given)]
            return [checkpoint(compute, self._module, *part, use_reentrant=False) for part in parts]

    def _finish_backward(  # noqa: PLR0913, PLR0917
        self, of: Tensor, gradient: Tensor | None, inputs: Tensor, targets: Tensor, loss: float, asked: Asked | None
    ) -> None:
        """`of`: what the gradient is at, or this stage's loss. It adds up for the step under way."""
        if self._is_strange(loss, targets):
            self._lose(asked)
            return
        learns = self._training and self._counts(asked, loss, targets)
        if learns:
            self._begin_to_hold()
            try:
                of.backward(gradient)  # type: ignore[no-untyped-call]
            except BaseException:
                self._optimizer.held = 0  # a part of this one's gradient is there already: the step begins anew
                raise
            found = inputs.grad
            self._optimizer.held += targets.numel()
            self._loss_sum += loss
            self._stage.counts.passed += 1
        else:
            (found,) = torch.autograd.grad(of, inputs, gradient)
        if asked:
            asked.answer.set_result(Answer(loss, found, learns))

    def _counts(self, asked: Asked | None, loss: float, targets: Tensor) -> bool:
        """Whether to learn from what a caller sent."""
        if asked is None:
            return True
        now, found = time.monotonic(), self._stage.counts
        counts = self._callers.counts(asked.caller, loss / targets.numel(), targets.numel(), now)
        found.not_counted += not counts
        found.not_believed, found.heard = tuple(self._callers.not_believed(now)), self._callers.heard()
        return counts

    def _begin_to_hold(self) -> None:
        if not self._optimizer.held:
            self._optimizer.free_gradients()
            self._loss_sum = 0.0

    def _is_strange(self, value: float, targets: Tensor) -> bool:
        """Whether it is not finite. Where micro-batch after micro-batch is, this stage's weights are broken: the step
        fails then, as a whole model's would."""
        if math.isfinite(value):
            self._strange = 0
            return False
        self._strange += 1
        if self._strange > STRANGE and self._training:
            self._begin_to_hold()
            self._optimizer.held += targets.numel()
            self._loss_sum = math.nan
        return True

    def _lose(self, asked: Asked | None) -> None:
        self._stage.counts.lost += 1
        if asked is None:
            if self._stage.link.ready():  # else it is lost because nobody is there, however few are under way
                self._stage.window.lost()
        elif not asked.answer.done():
            asked.answer.set_exception(LostMicroBatch("no answer of the next stage"))

    def _forget_late(self) -> None:
        """A link that never answers would keep its inputs for ever."""
        now = time.monotonic()
        for ticket in [ticket for ticket, each in self._under_way.items() if each.until + 1 < now]:
            self._lose(self._under_way.pop(ticket).asked)

    def _there(self, tensor: Tensor) -> Tensor:
        return gpu.to_device(tensor, self._device)

    # ---- held-out data ----
    def _keep(self, asked: Asked) -> None:
        most = len(self._part.held_out()[0])
        self._kept.keep(asked.caller, (asked.activations, asked.targets), len(asked.targets), most)

    def evaluate(self, tries: bool = False) -> float:
        """Of what came from the stage before, the middle of what each caller's held-out data say."""
        if not tries:  # at a boundary
            self._kept.next_round()
        try:
            own = split(self._part.held_out(), self.examples)
            each = [[*map(self._part.split, own)]] if self._at.first else self._kept.of_each()
            sums = map(self._held_out_loss, each) if self._at.last else self._measured_elsewhere(each, tries)
            tokens = [sum(targets.numel() for _, targets in measured) for measured in each]
            found = [total / size for total, size in zip(sums, tokens, strict=True)]
        except torch.OutOfMemoryError:
            raise NotMeasured("there is no memory for it now") from None
        if not found:
            raise NotMeasured("no held-out data has come from the stage before")
        return median(found)

    def _held_out_loss(self, measured: Collection[tuple[Tensor, Tensor]]) -> float:
        """Of the last stage: the sum of their losses."""
        with self.evaluating():
            return sum(float(self._loss_in_parts(self._there(inputs), targets)) for inputs, targets in measured)

    def _measured_elsewhere(self, each: Sequence[Collection[tuple[Tensor, Tensor]]], tries: bool) -> list[float]:
        """The sums of their losses, as the next stage finds them. Raises NotMeasured."""
        if not self._stage.link.ready():
            raise NotMeasured("nobody of the next stage can be asked now")
        until, sums = time.monotonic() + EVALUATION_S, [0.0] * len(each)
        left = ((whose, micro) for whose, measured in enumerate(each) for micro in measured)

        def send(some: int) -> dict[int, int]:
            return {self._send_to_measure(*micro, until, tries): whose for whose, micro in islice(left, some)}

        waiting = send(MEASURED_AT_ONCE)
        while waiting:
            match letter := self._wait_for_letter(until - time.monotonic()):
                case Answered(ticket, answer) if ticket in waiting:
                    sums[waiting.pop(ticket)] += answer.loss
                    waiting |= send(1)
                case None:
                    raise NotMeasured("the next stage does not answer in time")
                case Lost(ticket) if ticket in waiting:
                    raise NotMeasured("the next stage does not answer")
                case _:
                    self._put_away(letter)
        return sums

    def _send_to_measure(self, inputs: Tensor, targets: Tensor, until: float, tries: bool) -> int:
        with self.evaluating():
            activations = self._activations(self._there(inputs))
        self._tickets += 1
        self._stage.link.send(Sent(self._tickets, activations, targets, True, until, tries=tries))
        return self._tickets

    # ---- before the first step ----
    def try_out(self, batch: Batch) -> None:
        """One micro-batch through this stage alone: of held-out examples in the first stage, else of zeros."""
        count = self._micro.size
        targets = torch.zeros(count, *self._part.targets, dtype=torch.long)
        inputs = torch.zeros(count, *self._part.activations)
        if self._at.first:
            held_out, _ = self._part.split(self._part.held_out())
            inputs = held_out[torch.arange(count) % len(held_out)]
        try:
            inputs = self._there(inputs)
            if not self._at.first:
                inputs.requires_grad_()
            found = self._loss_in_parts(inputs, targets) if self._at.last else self._activations(inputs)
            found.sum().backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise OutOfMemory("one micro-batch does not fit into memory: use a smaller --micro-batch") from None
        self._optimizer.free_gradients()


def _size(values: Tensor) -> float:
    """Root of the mean square: the same for any number of examples. Of what lies on the CPU as it has come: for a GPU's
    answer the thread would have to wait."""
    return float(values.float().square().mean().sqrt())
