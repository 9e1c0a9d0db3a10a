"""A batch through the model, forward and backward: its loss and its gradient, in parts that fit into memory.

Notable choices:
- A batch goes through in micro-batches; loss and norm of the whole come to the CPU once, at its end. Until they are
  wanted, the caller may do something else while a GPU works.
- How many examples fit on a GPU is found by trying before the first step (training/memory_budget.py), with the model as
  it is; only then it is compiled, for that size.
- A CPU's memory is given by the system before it is there, and the process that takes too much is killed. So short
  examples go through first: what they keep for the backward pass says what whole ones will.
- If they do not fit later, because another program takes memory of the GPU, the work begins again: at once, then with
  parts of half the size, which grow back after calm steps. Where not even one example fits, nothing has changed, and
  the caller tries again later.
- Where a run uses bf16, only matrix products are in bf16 (autocast), on a GPU and on a CPU with AMX; parameters and
  gradients are fp32.
- A GPU without bf16 (NVIDIA before Ampere) takes fp16. Small gradients would be 0 there, so the loss is multiplied by a
  scale; where that is too much for fp16, the batch goes through again with half of it.

Loss and evaluation come from a Task. Knows nothing of steps, schedules, rounds or partners.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from noloco_node.base.units import size
from noloco_node.base.validation import in_one_line
from noloco_node.core import gpu
from noloco_node.core.device import multiplies_bf16
from noloco_node.errors import NolocoError, OutOfMemory, UsageError
from noloco_node.host import memory
from noloco_node.run.schema import InnerSpec
from noloco_node.training import memory_budget
from noloco_node.training.inner.optimizer import Optimizer
from noloco_node.training.task import Batch, Sequential, Task, device_batch

if TYPE_CHECKING:
    from noloco_node.training.workers import Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORT = (2, 64)
"""Tokens, and twice and four times as many, from which what a whole example takes is concluded. The first ones are so
short that they do no harm, whatever the model."""
BACKWARD = 1.2
"""What a pass takes, in what it keeps for the backward pass: the least that was measured, of 1.2 to 1.5."""


class ShortOfMemory(OutOfMemory):
    """There is no memory for this now, and there may be later: nothing has changed, and the same can be tried again."""


class NotMeasured(NolocoError):
    """There is nothing to measure a loss with: a stage needs other nodes for that."""


class Gradients:
    """`optimizer` holds the gradients of the last batch, and frees them when memory is needed."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        task: Task,
        module: nn.Module,
        optimizer: Optimizer,
        spec: InnerSpec,
        micro_batch: int | None,
        memory_fraction: float,
        compile: Callable[[], object] | None = None,
        round_bytes: int = 0,
        workers: "Workers | None" = None,
    ) -> None:
        """`micro_batch`: examples at once; None: the task's own number, or as many as fit on a GPU. `compile` is called
        once, before the first step. `round_bytes`: of the GPU, what a round takes beside training. `workers`:
        further processes, each of which does a share of every batch."""
        self._task = task
        self._module = module
        self._optimizer = optimizer
        self._memory_fraction = memory_fraction
        self._device = next(module.parameters()).device
        self._products = products(self._device, spec.precision)
        self._scale = LossScale() if self._products == torch.float16 else None
        self.examples = examples_of(task, spec)
        """Of a step."""
        start = micro_batch if micro_batch or self._device.type == "cuda" else task.micro_examples
        self._workers, shares = workers, workers.shares if workers else 1
        self.share = -(-self.examples // shares)
        """Examples of a step that this process does itself."""
        self._micro = memory_budget.MicroBatch(self.share, start)
        self._batch: Batch = ()
        """Of the step under way, on the device: this process's share."""
        self._theirs: list[Batch] = []
        self._found: gpu.Reading
        self._compile = compile
        self._round_bytes = round_bytes
        self.working: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around work that is done while a batch is waited for."""
        self.activations: int | None = None
        """Bytes that a micro-batch took when it was tried, beside weights and gradient; None: not known."""

    @property
    def micro_batch(self) -> int:
        """Examples that go through the model at once."""
        return self._micro.size

    @property
    def examples_tried(self) -> int:
        """How many `try_out` wants."""
        return self._micro.size if self._micro.settled else self.share

    def begin(self, batch: Batch) -> None:
        """Queue the passes of a step's batch, forward and backward. Raises ShortOfMemory."""
        if self._workers:
            batch, *self._theirs = zip(*(torch.tensor_split(part, self._workers.shares) for part in batch), strict=True)
        self._batch = self._fitting(lambda: device_batch(batch, self._module))
        self._settle(self._batch)
        self._found = self._fitting(self._pass)

    def finish(self) -> tuple[float, float | None]:
        """Loss of that batch and norm of its gradient, before clipping; None: not known. Waits for the device. Raises
        ShortOfMemory."""
        loss, norm = self._read()
        if self._scale is None:
            return loss, norm
        while self._scale.is_too_large(loss, norm):
            self._found = self._fitting(self._pass)
            loss, norm = self._read()
        by = self._scale.value
        self._optimizer.divide(by)
        self._scale.used(norm)
        return loss / by, norm / by

    def _read(self) -> list[float]:
        if self._workers:
            self._workers.until(self._found.is_there)
        return self._found.read()

    def _pass(self) -> gpu.Reading:
        self._optimizer.free_gradients()
        loss = torch.zeros((), device=self._device)
        with self._sharing(loss):
            for micro in split(self._batch, self._micro.size):
                loss += self._backward(micro, len(micro[0]) / self.examples)
        return gpu.Reading(torch.stack([loss, self._optimizer.norm()]))

    @contextmanager
    def _sharing(self, loss: Tensor) -> Iterator[None]:
        """Around this process's share of a batch: the others do theirs, and all is added up."""
        if not self._workers:
            yield
            return
        self._workers.begin(self._theirs, self._micro.size, self.examples, self._scale.value if self._scale else 1.0)
        try:
            yield
        except torch.OutOfMemoryError:
            self._workers.drop()
            raise
        self._workers.add(loss)

    def step(self, rate: float) -> float:
        """AdamW's step with the gradient of the last batch. Returns its learning rate. Raises ShortOfMemory, and then
        the gradient is gone too."""
        try:
            self._optimizer.step(rate)
        except torch.OutOfMemoryError:  # of the first step's moments; no parameter has changed
            raise self._short() from None
        self._micro.stepped(self._whole_fits)
        return rate

    def _whole_fits(self) -> bool:
        """Whether the micro-batch that was found fits again."""
        spare = self.spare_bytes()
        return spare is not None and spare >= 0

    def spare_bytes(self) -> int | None:
        """Of a GPU, between two passes: what neither the next one nor a round needs. None where that is not known."""
        if self.activations is None or self._device.type != "cuda":
            return None
        free = memory_budget.free_bytes(self._device, self._memory_fraction)
        return int(memory_budget.SPARE * free) - self.activations - self._needed_bytes()

    def _needed_bytes(self) -> int:
        """Beside activations and what is there."""
        return self._round_bytes + self._optimizer.missing_bytes()

    def try_out(self, batch: Batch) -> None:
        """Some examples forward and backward, after the search for a micro-batch. Raises UsageError where the model
        cannot be trained on them, OutOfMemory where not even one fits."""
        batch = device_batch(batch, self._module)

        def backward() -> None:
            micro = next(split(batch, self._micro.size))
            self._backward(micro, 1.0)
            self._optimizer.norm()  # sparse gradients have none
            if self._workers:
                self._workers.try_out(micro, self.examples)

        with _task_faults("the run's model cannot be trained on its data"):
            self._foresee(batch)
            self._settle(batch)
            before = memory.forget_peak()
            self._fitting(backward)
            if self.activations is None and before is not None:
                gradient = sum(p.nbytes for p in self._module.parameters())
                self.activations = max(0, (memory.peak_bytes() or before) - before - gradient)
        self._optimizer.free_gradients()

    def try_losses(self, batch: Batch) -> None:
        """What a swap is judged by. Raises UsageError where the task cannot measure it."""
        with _task_faults("the task's loss must also work without gradients (`with torch.enable_grad():` inside it)"):
            self.loss(next(split(batch, self._micro.size)))
        with _task_faults("the task cannot be evaluated"):
            self.evaluate()

    def _foresee(self, batch: Batch) -> None:
        """Raises OutOfMemory where a micro-batch cannot fit on a CPU."""
        free, whole = memory.free_bytes(), self._task.tokens_per_example
        if self._device.type != "cpu" or free is None or not isinstance(self._task, Sequential):
            return
        one = next(split(batch, 1))
        for short in SHORT:
            lengths = [short, 2 * short, 4 * short] if 4 * short < whole else [whole]
            try:
                kept = [self._kept_bytes(self._task.prefix(one, length)) for length in lengths]
            except Exception as error:
                if memory_budget.is_out_of_memory(error):
                    raise
                log.debug("the model takes no short examples", exc_info=error)
                continue
            at_once = self._micro.size * (self._workers.shares if self._workers else 1)
            copies = 2 * sum(p.numel() for p in self._module.parameters()) if self._products else 0
            needed = BACKWARD * at_once * through(lengths, kept, whole) + copies
            if needed > free:
                raise OutOfMemory(
                    f"an example of {whole} tokens, {at_once} at once, needs {size(int(needed))} and "
                    f"{size(free)} are free: join another run, or use a larger machine"
                )
            if lengths == [whole]:
                return

    def _kept_bytes(self, batch: Batch) -> int:
        """Bytes that a forward pass keeps for the backward pass, beside the weights."""
        parameters = list(self._module.parameters())
        weights = {p.untyped_storage().data_ptr() for p in parameters}
        copies = Counter(2 * p.numel() for p in parameters if self._products)  # they do not grow with the examples
        kept: dict[int, torch.UntypedStorage] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
            return tensor.detach()  # what computed it holds it, and would be held by it, for ever

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self._loss(batch)
        sizes = Counter(storage.nbytes() for at, storage in kept.items() if at not in weights)
        return sum((sizes - copies).elements())

    def evaluate(self, tries: bool = False) -> float:
        """Loss on the task's held-out data. `tries`: of weights that may not stay, which other nodes have to know where
        this is one stage (stages/passes.py). Raises ShortOfMemory, NotMeasured."""
        return self._measured(lambda: float(self._task.evaluate(self._module, self._micro.size)))

    def loss(self, batch: Batch) -> float:
        """Of some examples, as `evaluate` does it. Raises ShortOfMemory."""

        def forward() -> float:
            there = device_batch(batch, self._module)
            parts = [self._loss(micro) * (len(micro[0]) / len(batch[0])) for micro in split(there, self._micro.size)]
            return float(torch.stack(parts).sum())

        return self._measured(forward)

    def _measured(self, loss: Callable[[], float]) -> float:
        with self.evaluating():
            return self._fitting(loss)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model without gradients, and without dropout. What is evaluated within one such context shares the
        copies of the weights in bf16."""
        self._optimizer.free_gradients()
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad(), self._precision():
                yield
        finally:
            self._module.train(was_training)

    def _settle(self, batch: Batch) -> None:
        """Before the first step: how many examples go at once, and what they take. Then the model is compiled."""
        if not self._micro.settled or (self.activations is None and self._device.type == "cuda"):
            self._fitting(lambda: self._find_micro_batch(batch))
        compile, self._compile = self._compile, None
        if compile is not None:
            began = time.monotonic()
            compile()
            self._fitting(lambda: self._backward(next(split(batch, self._micro.size)), 1.0))
            log.info("torch compiled the model in %.0f s", time.monotonic() - began)

    def _find_micro_batch(self, batch: Batch) -> None:
        """Tries larger and larger parts of a batch, where that is not settled."""
        device = self._device
        self._backward(next(split(batch, 1)), 1.0)  # all micro-batches of a step but the first find gradients in place
        grows = True
        while grows:
            free, used = memory_budget.free_bytes(device, self._memory_fraction), torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._backward(next(split(batch, self._micro.size)), 1.0)
            self.activations = torch.cuda.max_memory_allocated(device) - used
            grows = self._micro.may_grow(self.activations, free - self._needed_bytes())

    def _backward(self, micro: Batch, share: float) -> Tensor:
        loss = self._loss(micro) * (share * self._scale.value if self._scale else share)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().reshape(())  # one element is as good

    def _loss(self, micro: Batch) -> Tensor:
        with self._precision():
            return self._task.loss(self._module, micro)

    def _precision(self) -> torch.autocast:
        return autocast(self._device, self._products)

    def _fitting(self, work: Callable[[], T]) -> T:
        """Does the work with micro-batches that fit into memory: halves them until they do. Raises ShortOfMemory."""
        again = True
        while True:
            try:
                with _compiler_faults():
                    return work()
            except torch.OutOfMemoryError:
                pass  # its memory is free only after this block
            self._free_cache()
            if not again:
                if not self._micro.halve():
                    raise self._short()
                log.info("the device is short of memory: %d examples at once from now on", self._micro.size)
            again = False

    def make_room(self) -> None:
        """Frees what is made again in the next step."""
        self._optimizer.free_gradients()
        self._free_cache()

    def _short(self) -> OutOfMemory:
        """The gradient's memory stays with torch: a correction that comes meanwhile finds some."""
        self._optimizer.free_gradients()
        return ShortOfMemory(f"not even one example fits beside the model{memory_budget.held_by_others(self._device)}")

    def _free_cache(self) -> None:
        """What torch keeps of freed memory, so that pieces of it become one."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def products(device: torch.device, precision: str) -> torch.dtype | None:
    """The type of matrix products; None: as the weights, fp32."""
    if precision == "fp32" or not multiplies_bf16(device):
        return None
    # torch computes bf16 on an older NVIDIA GPU too, many times slower; an AMD GPU's numbers mean something else
    is_gpu = device.type == "cuda" and torch.version.hip is None
    return torch.float16 if is_gpu and torch.cuda.get_device_capability(device) < (8, 0) else torch.bfloat16


def autocast(device: torch.device, kind: torch.dtype | None) -> torch.autocast:
    """Matrix products as `products` says."""
    return torch.autocast(device.type, kind, enabled=kind is not None)


class LossScale:
    """What a loss is multiplied by for fp16: a power of two, so that dividing the gradient by it is exact. It is not
    kept in a checkpoint: it finds its size within some batches."""

    START = 2.0**16
    LARGEST = 2.0**24
    CALM = 1000
    """Steps in a row after which twice as much is tried."""

    def __init__(self) -> None:
        self.value = self.START
        self._calm = 0

    def is_too_large(self, loss: float, norm: float) -> bool:
        """Whether to do the same batch again, with half of it. A loss that is not finite has another cause, and so has
        a gradient that is not finite without any scale."""
        if math.isfinite(norm) or not math.isfinite(loss):
            return False
        self._calm = 0
        if self.value <= 1:
            return False
        self.value /= 2
        return True

    def used(self, norm: float) -> None:
        """A batch is through."""
        if not math.isfinite(norm):
            self.value = self.START
        self._calm += 1
        if self._calm >= self.CALM:
            self._calm, self.value = 0, min(2 * self.value, self.LARGEST)


def through(at: Sequence[int], values: Sequence[int], there: int) -> float:
    """The value `there` of the polynomial through these points (Lagrange's form), and no less than the last one."""
    terms = (
        value * math.prod((there - other) / (here - other) for other in at if other != here)
        for here, value in zip(at, values, strict=True)
    )
    return max(sum(terms), values[-1])


def examples_of(task: Task, spec: InnerSpec) -> int:
    """Of a step."""
    examples, rest = divmod(spec.batch_tokens, task.tokens_per_example)
    if rest or not examples:
        raise UsageError(
            f"inner.batch_tokens must be a multiple of {task.tokens_per_example}, as one example of this task counts "
            f"so many, not {spec.batch_tokens}"
        )
    return examples


@contextmanager
def _task_faults(what: str) -> Iterator[None]:
    """Turns whatever a library's model, or a volunteer's own task, raises into UsageError or OutOfMemory."""
    try:
        yield
    except (NolocoError, MemoryError):
        raise
    except Exception as error:
        why = in_one_line(error)
        if memory_budget.is_out_of_memory(error):
            raise OutOfMemory(f"one micro-batch does not fit into this machine's memory: {why}") from error
        raise UsageError(f"{what}: {why}") from error


@contextmanager
def _compiler_faults() -> Iterator[None]:
    """Turns what torch.compile raises in the first step, where it lacks something here, into a UsageError."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        why = in_one_line(error)
        raise UsageError(f"torch cannot compile the model here: {why}. Start without --compile") from error


def split(batch: Batch, micro: int) -> Iterator[Batch]:
    return zip(*(torch.split(part, micro) for part in batch), strict=True)
