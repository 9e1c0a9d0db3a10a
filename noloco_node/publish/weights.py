"""The weights of a run, from checkpoints or exported folders, as one model: to publish, evaluate or sample.

They are the slow weights φ, which each boundary updates and averaging brings closer. Between two boundaries the fast
weights differ from them more by noise than by progress. Of several replicas the mean is taken: NoLoCo's replicas are
spread around it, and its loss is lower than theirs. Only reads, so a node may run in the same home meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from noloco_node.base.atomic_files import require_known
from noloco_node.checkpoints import checkpoint, kept_runs, listing
from noloco_node.checkpoints.checkpoint import PublishedWeights
from noloco_node.data import tokens
from noloco_node.data.sources import Sources, read_tokenizer
from noloco_node.errors import Incompatible, UsageError
from noloco_node.host.home import Home
from noloco_node.run import signed_file
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.run.signed_file import RunFile
from noloco_node.stages import part
from noloco_node.training import model

CHECKPOINTS = "checkpoints"
_NAME_ONE = "name a home in which a node has trained, a checkpoint or an exported folder"


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a node: the first of these checkpoints that verifies."""

    file: RunFile
    checkpoints: tuple[Path, ...]

    def slow(self, module: nn.Module) -> PublishedWeights:
        return checkpoint.slow_weights(self.checkpoints, self.file.run.run_id, model.layout_digest(module))


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that `export` wrote."""

    file: RunFile
    folder: Path

    def slow(self, module: nn.Module) -> PublishedWeights:
        found = model.pretrained(self.folder, module)
        phi = torch.cat([p.detach().flatten() for _, p in model.parameters(found)])
        return PublishedWeights(self.folder, self._number("round") or 0, self._number("step"), phi)

    def _number(self, key: str) -> int | None:
        """Only shown, so a wrong one does no harm."""
        value = self.file.trained.get(key)
        return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Fetched:
    """The slow weights of a node, fetched by the running node of this machine: a file of fp32 numbers."""

    file: RunFile
    path: Path
    layout: bytes
    peer_id: str
    round: int
    step: int | None

    def slow(self, module: nn.Module) -> PublishedWeights:
        if model.layout_digest(module) != self.layout:
            raise Incompatible("this command builds another model than the running node: restart the node")
        try:
            phi = torch.from_numpy(np.fromfile(self.path, "<f4"))
        except OSError as error:
            raise UsageError(f"what was fetched is gone ({error.strerror}): export one at a time") from error
        return PublishedWeights(self.peer_id, self.round, self.step, phi)


Weights = Kept | Exported | Fetched
"""Where a run's weights are."""


@dataclass(frozen=True, slots=True)
class Trained:
    signed: Signed
    run: Manifest
    module: nn.Module
    """In evaluation mode, on the CPU."""
    tokenizer: tokens.Tokenizer
    states: tuple[PublishedWeights, ...]
    """That it is the mean of, without their numbers."""

    @property
    def round(self) -> int:
        return max(state.round for state in self.states)

    @property
    def step(self) -> int | None:
        """None: not known of any."""
        return max((state.step for state in self.states if state.step is not None), default=None)


# ---- where it lies ---------------------------------------------------------------------------------------------------
def find(
    path: Path, run: str | None = None, step: str | None = None, say: Callable[[str], None] = lambda _: None
) -> Weights:
    """The weights at `path`: a home, a run's folder in it, a checkpoint, or an exported folder. `run`: which of a home
    (kept_runs.named), else the one that was trained last, which `say` is told where there are several; elsewhere the
    one that it must be. `step`: a checkpoint's name. Raises UsageError."""
    path = path.absolute()  # the folders above it say what it is
    try:
        require_known(path / "config.json")
        there, is_export = path.is_dir(), (path / "config.json").exists()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Make it readable for this user") from None
    if not there:
        what = "is no folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}: {_NAME_ONE}")
    found: Weights
    if is_export:
        found = Exported(signed_file.read(path), path)
    elif path.parent.name == CHECKPOINTS:
        found = Kept(signed_file.read(path.parent.parent), (path,))
    else:
        folder = path if (path / CHECKPOINTS).is_dir() else _run_folder(Home(path), run, say)
        file, kept = signed_file.read(folder), listing.kept(folder / CHECKPOINTS)
        if step is not None:
            kept, step = _named(kept, step), None
        if not kept:
            raise UsageError(f"{folder} has no checkpoint yet: a node writes one every few rounds, and when it leaves")
        found = Kept(file, tuple(kept))
    if step is not None:
        raise UsageError(f"{path} is one state of a model: leave --checkpoint out, which chooses one of a home")
    if run is not None and not kept_runs.is_called(run, found.file.run.run_id, found.file.run.label):
        raise UsageError(f"{path} is of {found.file.run.label}, not of {run!r}: name another place")
    return found


def _run_folder(home: Home, wanted: str | None, say: Callable[[str], None]) -> Path:
    there = [run for run in kept_runs.kept(home, held=None) if (home.run(run.run_id) / signed_file.NAME).exists()]
    if not there:
        raise UsageError(f"there is no run in {home.root}: {_NAME_ONE}")
    if wanted is not None:
        return home.run(kept_runs.named(home, there, wanted).run_id)
    last = next((run for run in there if run.round), there[0])
    if len(there) > 1:
        say(f"{last.label}, which was trained last here: another one of {len(there)} runs is named with --run")
    return home.run(last.run_id)


def _named(there: Sequence[Path], step: str) -> list[Path]:
    if found := [path for path in there if path.name == step]:
        return found
    listed = ", ".join(path.name for path in there) or "none"
    raise UsageError(f"there is no checkpoint {step}: there are {listed}")


# ---- the model -------------------------------------------------------------------------------------------------------
def load(places: Sequence[Weights], sources: Sources) -> Trained:
    """The mean of these states of one run as a model."""
    first = places[0].file
    exported = places[0].folder if isinstance(places[0], Exported) else None
    tokenizer = language(first.run, sources, exported)
    if first.run.stages and exported is None:
        module, slow = _from_stages(first.run, tokenizer.vocabulary, places)
    else:
        run = first.run
        narrow = part.untie if run.stages else model.as_it_is
        module = model.build(run.model, tokenizer.vocabulary, run.seed, run.data.sequence_length, narrow)
        slow = _mean_into(module, places)
    return Trained(first.signed, first.run, module.eval(), tokenizer, tuple(slow))


def _mean_into(module: nn.Module, places: Sequence[Weights]) -> list[PublishedWeights]:
    """Raises Incompatible."""
    found = []

    def vectors() -> Iterator[Tensor]:
        for place in places:
            slow = place.slow(module)
            found.append(replace(slow, phi=torch.empty(0)))  # a slice would keep all of it in memory
            yield slow.phi

    mean_into(module, vectors())
    return found


def mean_into(module: nn.Module, vectors: Iterable[Tensor]) -> None:
    """The parameters become the mean of flat vectors that come one after the other: only their sum is in memory.
    Raises Incompatible."""
    parameters = [parameter for _, parameter in model.parameters(module)]
    sizes = [parameter.numel() for parameter in parameters]
    total, count = torch.zeros(sum(sizes)), 0
    for vector in vectors:
        if vector.shape != total.shape:
            raise Incompatible(f"the model has {len(total)} parameters and its weights {len(vector)}")
        total += vector
        count += 1
    for parameter, part_of_it in zip(parameters, torch.split(total.div_(count), sizes), strict=True):
        parameter.data.copy_(part_of_it.view(parameter.shape))


def _from_stages(run: Manifest, vocabulary: int, places: Sequence[Weights]) -> tuple[nn.Module, list[PublishedWeights]]:
    """The whole model, each stage of it the mean of those places that hold it. Raises UsageError where none does."""
    count = run.stages.count if run.stages else 0
    parts = [part.part_model(run, vocabulary, part.Position(stage, count)) for stage in range(count)]
    found: list[PublishedWeights] = []
    left = list(places)
    for stage, module in enumerate(parts, 1):
        here = [place for place in left if not isinstance(place, Exported) and _fits(place, module)]
        if not here:
            raise UsageError(
                f"nothing here holds stage {stage} of {count} of {run.label}: `export` makes the whole model, with "
                "--average and a home of each stage, or a number where a node runs"
            )
        left = [place for place in left if place not in here]
        found += _mean_into(module, here)
    return part.whole_model(run, vocabulary, parts), found


def _fits(place: Weights, module: nn.Module) -> bool:
    try:
        place.slow(module)
    except Incompatible:
        return False
    return True


def language(run: Manifest, sources: Sources, exported: Path | None = None) -> tokens.Tokenizer:
    """The run's tokenizer; an exported folder brings it. Raises UsageError for a run that trains no language model."""
    run.require_language()
    brought = exported / "tokenizer.json" if exported else None
    if brought is None or not brought.exists():
        return tokens.load(run.data.tokenizer, sources.tokenizer)
    if run.data.tokenizer.startswith("hub:"):
        return tokens.FileTokenizer(read_tokenizer(brought))
    return tokens.load(run.data.tokenizer, brought)
