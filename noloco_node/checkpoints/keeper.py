"""A node's own checkpoints: save, resume, and what `status` says of them: rounds, size, free disk space.

checkpoints/schedule.py says when one is written, checkpoints/checkpoint.py how. `view` may be called from any thread.
"""

import logging
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.units import size
from noloco_node.checkpoints import checkpoint, listing
from noloco_node.checkpoints.checkpoint import Use, any_values
from noloco_node.core.state import STATE_BYTES, State
from noloco_node.errors import DiskFull, NolocoError
from noloco_node.views.status import Checkpoints, Health

_REMEDY = "free some, or move NOLOCO_HOME"
_ENOUGH = 2
"""Checkpoints that must fit: one is written beside the older ones before the oldest goes."""
ROLL_BACK_MARGIN, RESUME_MARGIN = 0.25, 0.5
"""A loss that is higher than the best of the kept checkpoints by more than this share shows harm. From checkpoint to
checkpoint an honest run's loss changes by some hundredths of it. A start loses work by going further back, a roll-back
loses nothing but what failed."""

log = logging.getLogger(__name__)


class CheckpointKeeper:
    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id
        self._resumed: int | None = None
        self._saved: int | None = None
        self.none_usable = False
        """Whether there were checkpoints at the start, and all were skipped."""
        self.unsaved: DiskFull | None = None
        self._full = False
        """Why the last try to save wrote none."""

    def folder(self) -> Path:
        """Where they are, made where it was missing. Raises UsageError."""
        with atomic_files.writing(f"a checkpoint into {self._directory}"):
            self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory

    def resume(self, layout: bytes, use: Use = any_values, parameters: int | None = None) -> State | None:
        """The checkpoint that this node resumes from: the newest that `use` takes, unless it is far worse than an older
        one. Raises Incompatible where it is of another run or layout, or of a newer version."""
        checkpoint.remove_unfinished(self._directory)  # so that what is said of the room is right from the start
        found = self._newest(layout, use, parameters, RESUME_MARGIN)
        self.none_usable = found is None and bool(listing.kept(self._directory))
        self._resumed = found.round if found else None
        return found

    def last_good(self, layout: bytes, use: Use = any_values, parameters: int | None = None) -> State | None:
        """The newest that is not clearly worse than another: what broke the weights may have harmed them long before
        it was noticed."""
        return self._newest(layout, use, parameters, ROLL_BACK_MARGIN)

    def _newest(self, layout: bytes, use: Use, parameters: int | None, margin: float) -> State | None:
        found = checkpoint.newest(self._directory, self._run_id, layout, use=use, parameters=parameters, margin=margin)
        for damaged in found.skipped:
            log.warning(damaged)
        return found.checkpoint

    def save(self, state: State, layout: bytes) -> None:
        """Raises DiskFull, UsageError, and leaves the older ones untouched then."""
        checkpoint.save(self._directory, state, self._run_id, layout)
        self._saved, self.unsaved = state.round, None

    def not_saved(self, round: int, why: NolocoError) -> None:
        """No checkpoint was written of this round's state, or it could not even be copied."""
        last = self._resumed if self._saved is None else self._saved
        kept = "and no earlier one is" if last is None else f"the last that is saved is round {last}"
        self.unsaved = DiskFull(f"round {round} is not saved, {kept}: {why}")
        self._full = isinstance(why, DiskFull)

    def say_room(self, parameters: int) -> None:
        """In the log, before training starts."""
        view = self.view(parameters)
        text = f"a checkpoint takes {size(view.bytes)}, the disk has {size(view.free_bytes)} left"
        if view.free_bytes is not None and view.free_bytes < view.bytes:
            log.warning("%s: what is trained cannot be saved. %s", text, f"{_REMEDY[0].upper()}{_REMEDY[1:]}")
        else:
            log.info("%s", text)

    def view(self, parameters: int) -> Checkpoints:
        needed = STATE_BYTES * parameters
        return Checkpoints(needed, atomic_files.free_bytes(self._directory), self._saved, self._resumed)

    def health(self, parameters: int) -> tuple[Health, ...]:
        view = self.view(parameters)
        if self.unsaved is not None and not self._full:  # as on a disk that is read-only after errors
            return (Health("error", f"checkpoint: {self.unsaved}", _REMEDY),)
        full = self.unsaved is not None
        if not full and (view.free_bytes is None or view.free_bytes >= _ENOUGH * view.bytes):
            return ()
        level, lost = ("error", ", and the last one was not written") if full else ("warning", "")
        text = f"disk: {size(view.free_bytes)} left, a checkpoint needs {size(view.bytes)}{lost}"
        return (Health(level, text, _REMEDY),)
