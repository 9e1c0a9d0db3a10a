"""The runs in a node's home: how far each has come and what it takes on disk; and how they are removed."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from noloco_node.base.atomic_files import writing
from noloco_node.checkpoints import listing
from noloco_node.errors import NodeAlreadyRunning, UsageError
from noloco_node.host import paths
from noloco_node.host.home import Home
from noloco_node.run import signed_file


@dataclass(frozen=True, slots=True)
class KeptRun:
    run_id: str
    label: str
    """Its id only where its manifest cannot be read."""
    round: int
    """Of the newest checkpoint."""
    rounds: int | None
    """Of the run; where it is over, as many as this home has."""
    finished: bool
    amended: str | None
    """What its author changed in it later."""
    saved_at: float | None
    """When that checkpoint was written, in seconds since 1970; None where there is none."""
    bytes: int
    running: bool
    """Whether a node trains it here at this moment, or is about to."""


_LEAST_DIGITS = 4
"""Of an id by which a run is named: an empty word names none."""


def kept(home: Home, held: str | None) -> list[KeptRun]:
    """The one that was active last first. `held`: the run that a node here trains; "": one that does not say yet."""
    return [_kept(folder, held) for folder in paths.runs(home)]


def remove(home: Home, there: Sequence[KeptRun], wanted: Sequence[str]) -> list[KeptRun]:
    """`wanted`: of each run what `named` takes. Raises UsageError before any is removed, and
    NodeAlreadyRunning for one that a node here trains."""
    chosen = list(dict.fromkeys(named(home, there, word) for word in wanted))
    for run in chosen:
        if run.running:
            raise NodeAlreadyRunning(
                f"a node trains {run.label} in {home.root}: stop it with `noloco-node leave{home.flag}`, then remove "
                "the run"
            )
    for run in chosen:
        with writing(home.run(run.run_id)):
            shutil.rmtree(home.run(run.run_id))
    return chosen


def _kept(folder: Path, held: str | None) -> KeptRun:
    newest = listing.newest(folder / "checkpoints")
    round, rounds, label, over, amended = newest.round if newest else 0, None, folder.name[:12], False, None
    with suppress(UsageError):
        file = signed_file.read(folder)
        label, over = file.run.label, file.is_over(round)
        rounds = round if over else file.run.rounds
        amended = file.amendment.words() if file.amendment else None
    return KeptRun(
        run_id=folder.name,
        label=label,
        round=round,
        rounds=rounds,
        finished=over,
        amended=amended,
        saved_at=newest.saved_at if newest else None,
        bytes=paths.size_of(folder) or 0,
        running=held in ("", folder.name),
    )


def named(home: Home, there: Sequence[KeptRun], word: str) -> KeptRun:
    """The one that is meant (`is_called`). Raises UsageError."""
    if not there:
        raise UsageError(f"there is no run in {home.root}: name another home with --home")
    found = [run for run in there if is_called(word, run.run_id, run.label)]
    if len(found) == 1:
        return found[0]
    listed, what = ", ".join(run.label for run in found or there), "several runs" if found else "no run"
    if any(run.run_id.startswith(word) for run in there) and len(word) < _LEAST_DIGITS:
        what += f" (of an id {_LEAST_DIGITS} digits are needed)"
    raise UsageError(f"{word!r} names {what} in {home.root}: name one of these: {listed}")


def is_called(word: str, run_id: str, label: str) -> bool:
    """Whether a run is meant, by its id, the first digits of it, its label or its name."""
    of_id = len(word) >= _LEAST_DIGITS and run_id.startswith(word)
    return of_id or word in (label, label.removesuffix(f"-{run_id[:12]}"))
