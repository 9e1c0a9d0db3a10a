"""What a replica trains: a model, its batches, their loss, and what is measured on held-out data.

The inner loop knows a task by this module only. It moves batches to the device, cuts them into micro-batches, and
decides about precision, gradients and memory; a task knows nothing of these, nor of peers or rounds. Which tasks there
are: training/tasks.py.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from noloco_node.core import gpu

if TYPE_CHECKING:
    from noloco_node.training.inner.gradients import Gradients
    from noloco_node.training.inner.optimizer import Optimizer

Batch: TypeAlias = tuple[Tensor, ...]
"""Tensors on the CPU that all have the examples as their first dimension: a micro-batch is the same slice of each."""


class ExampleStream(Protocol):
    """A replica's endless examples: each peer id has its own order."""

    @property
    def position(self) -> Any:
        """The position, in at most 10,000 plain values (Python's own numbers, strings, lists, tuples, dicts): a
        checkpoint keeps it."""

    def seek(self, position: Any) -> None:
        """Go on exactly there. ValueError for what is no position of this stream."""

    def next(self, examples: int) -> Batch: ...


@runtime_checkable
class Closable(Protocol):
    """A stream with files or threads to close. Others need no `close`."""

    def close(self) -> None: ...


@runtime_checkable
class Patient(Protocol):
    """A stream whose examples come over a network. Others need no `ready`: `next` waits for them."""

    def ready(self, examples: int, within_s: float) -> bool:
        """Whether `next` has so many ready; waits for them no longer than this."""


@runtime_checkable
class Writing(Protocol):
    """A task whose model writes text. Others need no `sample`."""

    def sample(self, module: nn.Module) -> Iterator[str]:
        """How the model continues the run's prompt, piece by piece. The module is in evaluation mode."""


@runtime_checkable
class Task(Protocol):
    @property
    def tokens_per_example(self) -> int:
        """How many one example counts in the manifest's `inner.batch_tokens`; 1 where there are no tokens."""

    @property
    def micro_examples(self) -> int:
        """Examples at once on a CPU; on a GPU the inner loop finds out how many fit."""

    def model(self) -> nn.Module:
        """In fp32 on the CPU. torch's generator is seeded by the run: the same first weights for everyone. Its buffers
        are neither saved nor sent, so training must not change them: no running statistics, as a BatchNorm has."""

    def stream(self, peer_id: str) -> ExampleStream: ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean over the batch's examples, which lie on the module's device. What it changes of the weights, it changes
        in place (`p.data.copy_`). Swaps are judged by it, in evaluation mode and without gradients: a loss that takes
        some itself says `with torch.enable_grad()`. They are judged by shares of it: where it could pass zero, as a
        density's, a constant is added, here and in `evaluate`, so that it stays well above. Compute it of
        `logits.float()`: on a CPU with AMX torch leaves a softmax or a mean of what a product gave in bf16."""

    def evaluate(self, module: nn.Module, examples: int) -> float:
        """Loss on held-out data, the same for every replica, at most so many examples at once. The module is in
        evaluation mode and torch records no gradients."""


@runtime_checkable
class Sized(Protocol):
    """A task that knows how large its model is before it is made. Others need no `parameters`: theirs is made first."""

    def parameters(self) -> int | None:
        """None where it is not known."""


@runtime_checkable
class Comparable(Protocol):
    """A task that knows which data a volunteer named: losses on other data are not compared. Others need no digest."""

    def held_out_digest(self) -> str | None:
        """The same for the same held-out data; None where it is not known."""


@runtime_checkable
class Sequential(Protocol):
    """A task whose examples are sequences of tokens. Others need no `prefix`."""

    def prefix(self, batch: Batch, tokens: int) -> Batch:
        """The same examples, each with so many tokens only."""


@runtime_checkable
class Counted(Protocol):
    """A task that knows how much arithmetic it takes. Others need no `flops_per_token`."""

    def flops_per_token(self, module: nn.Module) -> float | None:
        """Operations of the model's products for each token trained on; None where that is not known."""


@runtime_checkable
class Passing(Protocol):
    """A task whose passes go through other nodes too (stages/): it brings them, in place of inner/gradients.py."""

    def gradients(self, *whole: Any) -> "Gradients":
        """Takes what `Gradients` takes."""

    def pass_on(self, within_s: float) -> None:
        """Serve the other nodes for so long, without training."""


@runtime_checkable
class Driven(Protocol):
    """A task whose steps a loop of the volunteer's own makes (loop/): its model and its optimizer are there already."""

    def gradients(self, *whole: Any) -> "Gradients":
        """Takes what `Gradients` takes."""

    def optimizer(self, module: nn.Module, theta: Tensor, before_step: Callable[[], None]) -> "Optimizer":
        """`theta`: the vector that the module's parameters are views of. `before_step` is to be called before a step
        changes anything."""


def device_batch(batch: Batch, module: nn.Module) -> Batch:
    """The same batch where the module is; its copy is queued before the model's work, and waits for none of it."""
    device = next(module.parameters()).device
    return tuple(gpu.to_device(part, device) for part in batch)


def new_model(task: Task, seed: int) -> nn.Module:
    """A task's model, the same for the same seed. The random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()
