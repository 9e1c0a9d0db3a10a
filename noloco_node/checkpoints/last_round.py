"""How far the checkpoints in a folder have come, by their state.json alone: without torch, so at once."""

import json
import re
from pathlib import Path

from noloco_node.base.atomic_files import open_file

NAME = re.compile(r"(\d{1,18})(?:-(\d{1,6}))?")
"""Of a checkpoint's folder, its step; a second one at the same step is called <step>-1."""
_MAX_BYTES = 64 << 10


def last_round(directory: Path) -> int:
    """The round of the newest checkpoint with a readable state.json; its other files are not verified. 0: none."""
    found = [(match, path) for path in directory.glob("*") if (match := NAME.fullmatch(path.name))]
    newest_first = sorted(((int(match[1]), int(match[2] or 0), path) for match, path in found), reverse=True)
    return next(filter(None, (_round(path) for _, _, path in newest_first)), 0)


def _round(path: Path) -> int | None:
    try:
        with open_file(path / "state.json") as file:
            round = json.loads(file.read(_MAX_BYTES))["round"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return round if type(round) is int and round > 0 else None
