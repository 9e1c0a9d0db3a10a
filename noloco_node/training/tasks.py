"""Which task a manifest names: language modelling, or one that the volunteer has installed.

An installed task is a package with an entry point in the group `noloco_node.tasks`, which is called as
`make(options, seed)` and gives a Task. A manifest can name it and give it plain options, but never bring it along.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from noloco_node.base.validation import in_one_line
from noloco_node.data.corpus import NOTHING, Readable
from noloco_node.data.corpus import load as load_corpus
from noloco_node.data.sources import Sources
from noloco_node.errors import Incompatible, NolocoError, UsageError
from noloco_node.run.schema import Manifest
from noloco_node.training.language import Language
from noloco_node.training.task import Task

GROUP = "noloco_node.tasks"


def load(manifest: Manifest, sources: Sources = NOTHING, corpus: Readable | None = None) -> Task:
    """The task that a manifest names. Raises Incompatible where it is not installed, UsageError for bad options.
    `corpus`: what a language model reads, instead of the manifest's data and `sources`."""
    if manifest.model.task is None:
        return Language(manifest, corpus or load_corpus(manifest.data, sources))
    return _made(manifest.model.task, manifest.model.options, manifest.seed)


def _made(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """Turns what the volunteer's own code raises about the options into a UsageError."""
    make = _found(name).load
    try:
        task = make()(dict(options), seed)
    except NolocoError:
        raise
    except Exception as error:
        why = in_one_line(error)
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
            "package, or for the script that joins, and look at it before you use it"
        )
    return installed[name]
