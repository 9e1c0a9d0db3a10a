"""Which checkpoints a directory has, and what each one's state.json says: read without torch, in milliseconds."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_node.base import atomic_files
from noloco_node.errors import Incompatible, NolocoError, UsageError
from noloco_node.host.home import Home
from noloco_node.views.status import StatusView

SCHEMA = 2
FILES = MODEL, OUTER, INNER = "model.safetensors", "outer.safetensors", "inner.pt"
STATE = "state.json"

_MAX_STATE_BYTES = 64 << 10  # it has half a kilobyte
_NAME = re.compile(r"(\d{1,18})(?:-(\d{1,6}))?")  # a second one at the same step is called <step>-1


class Damaged(Exception):
    """Why a checkpoint does not verify. Its cause is Incompatible where it is no damage."""


@dataclass(frozen=True, slots=True)
class About:
    """Of a checkpoint, as its state.json says; its other files are not verified."""

    run_id: str
    layout: str
    round: int
    step: int
    eval_loss: float | None
    loss: float | None
    measured_on: str | None
    """Of which data the losses are; None: not known."""
    files: Mapping[str, tuple[str, int]]
    """SHA-256 and size of each."""
    saved_at: float
    """When it was written, in seconds since 1970."""


def about(path: Path) -> About:
    """Raises Damaged."""
    try:
        with atomic_files.open_file(path / STATE) as file:
            found, saved_at = json.loads(file.read(_MAX_STATE_BYTES)), os.fstat(file.fileno()).st_mtime
        if type(found["schema"]) is int and found["schema"] > SCHEMA:
            newer = (
                f"{path} was written by a newer version of noloco-node: update this one, or move the checkpoint away"
            )
            raise Damaged("a newer version of noloco-node wrote it") from Incompatible(newer)
        wanted = {"run_id": str, "layout": str, "round": int, "step": int}
        is_right = all(type(found[key]) is kind for key, kind in wanted.items()) and found["schema"] == SCHEMA
        measured_on = found.get("measured_on")
        is_right &= isinstance(measured_on, str | None)
        if is_right and min(found["round"], found["step"]) >= 0:
            files = {name: (str(found["files"][name]["sha256"]), int(found["files"][name]["bytes"])) for name in FILES}
            about = {key: found[key] for key in wanted} | {key: _loss(found, key) for key in ("eval_loss", "loss")}
            return About(**about, measured_on=measured_on, files=files, saved_at=saved_at)
    except FileNotFoundError:
        raise Damaged(f"it has no {STATE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    raise Damaged(f"its {STATE} cannot be read")


def kept(directory: Path) -> list[Path]:
    """The checkpoints, newest first; they may be damaged."""
    return [path for _, path in places(directory)]


def newest(directory: Path) -> About | None:
    """The newest whose state.json can be read."""
    for path in kept(directory):
        try:
            return about(path)
        except Damaged:
            continue
    return None


def last_round(directory: Path) -> int:
    """The round of the newest checkpoint whose state.json can be read. 0: none."""
    found = newest(directory)
    return found.round if found else 0


def after_leaving(view: StatusView, home: Home) -> str:
    """What to say of a node that has left, by its status before. Raises NolocoError where its last checkpoint was not
    written, as on a full disk."""
    if view.run_id is not None and view.checkpoint is not None and view.loss is not None:  # it has trained
        kept = last_round(home.run(view.run_id) / "checkpoints")
        if kept < view.round:
            last = f"the last that is saved is round {kept}" if kept else "and no earlier one is"
            raise NolocoError(f"{view.name} has left, but round {view.round} is not saved, {last}: see {home.log}")
    return f"{view.name} has left; its state is kept in {home.root}"


def places(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """Step and number of each checkpoint, newest first; other files in the directory are ignored."""
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read the checkpoints in {directory}: {error.strerror}") from error
    found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted((((int(match[1]), int(match[2] or 0)), path) for match, path in found), reverse=True)


def _loss(found: Mapping[str, Any], name: str) -> float | None:
    return None if found.get(name) is None else float(found[name])
