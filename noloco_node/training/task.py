"""What a replica trains: a model, its batches, their loss, and what is measured on held-out data.

Language modelling is the built-in task (training/language.py). Any other is the volunteer's own installed code: a
package with an entry point in the group `noloco_node.tasks`, which a manifest can name and give plain options, but
never bring along. The entry point is called as `make(options, seed)` and gives a Task.

The inner loop knows a task by this module only. It moves batches to the device, cuts them into micro-batches, and
decides about precision, gradients and memory; a task knows nothing of these, nor of peers or rounds.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from noloco_node.data.corpus import NOTHING, Readable, Sources
from noloco_node.data.corpus import load as load_corpus
from noloco_node.errors import Incompatible, NolocoError, UsageError
from noloco_node.run.schema import Manifest

GROUP = "noloco_node.tasks"

Batch: TypeAlias = tuple[Tensor, ...]
"""Tensors on the CPU that all have the examples as their first dimension: a micro-batch is the same slice of each."""


class ExampleStream(Protocol):
    """A replica's endless examples, its own by its peer id."""

    @property
    def position(self) -> Any:
        """Where it stands, in plain values (numbers, texts, lists, tuples, tables): a checkpoint keeps it."""

    def seek(self, position: Any) -> None:
        """Go on exactly there. ValueError where that is no position of this stream."""

    def next(self, examples: int) -> Batch: ...


@runtime_checkable
class Closable(Protocol):
    """A stream that holds something: files, threads. Others need no `close`."""

    def close(self) -> None: ...


@runtime_checkable
class Patient(Protocol):
    """A stream whose examples come from far away. Others need no `ready`: they are waited for in `next`."""

    def ready(self, examples: int, within_s: float) -> bool:
        """Whether `next` has so many at hand; waits for them no longer than this."""


@runtime_checkable
class Task(Protocol):
    @property
    def tokens_per_example(self) -> int:
        """What one example counts in the manifest's `inner.batch_tokens`; 1 where examples are not made of tokens."""

    @property
    def micro_examples(self) -> int:
        """As many examples at once as a CPU does well with; on a GPU the loop finds out how many fit."""

    def model(self) -> nn.Module:
        """In fp32 on the CPU. torch's generator is seeded by the run: the same first weights for everyone."""

    def stream(self, peer_id: str) -> ExampleStream: ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean over the batch's examples, which lie on the module's device."""

    def evaluate(self, module: nn.Module, examples: int) -> float:
        """Loss on held-out data, the same for every replica, at most so many examples at once. The module is in
        evaluation mode and torch records no gradients."""


def load(manifest: Manifest, sources: Sources = NOTHING, corpus: Readable | None = None) -> Task:
    """The task that a manifest names. Raises Incompatible where it is not installed, UsageError for bad options.
    `corpus`: what a language model reads, instead of what manifest and `sources` name."""
    if manifest.model.task is None:
        from noloco_node.training.language import Language  # which knows this module

        return Language(manifest, corpus or load_corpus(manifest.data, sources))
    return _made(manifest.model.task, manifest.model.options, manifest.seed)


def device_batch(batch: Batch, module: nn.Module) -> Batch:
    """The same batch where the module is."""
    device = next(module.parameters()).device
    return tuple(part.to(device, non_blocking=True) for part in batch)


def _made(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """The seam to the volunteer's own code: what it raises about the options is a fault of the manifest."""
    make = _found(name).load
    try:
        task = make()(dict(options), seed)
    except NolocoError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"model.options: the task {name} cannot be made from them: {why}") from error
    if not isinstance(task, Task):
        raise Incompatible(f"what is installed here as the task {name} does not fit this noloco-node: update them both")
    return task


def _found(name: str) -> EntryPoint:
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        here = f"installed are: {', '.join(sorted(installed))}" if installed else "no task is installed"
        raise Incompatible(
            f"the run trains the task {name}, which is not installed here ({here}): ask the run's author for its "
            "package, and look at it before you install it"
        )
    return installed[name]
