"""Where the files of a node lie, and how much disk each takes: what `paths` shows."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from noloco_node.host.home import Home
from noloco_node.run import signed_file


@dataclass(frozen=True, slots=True)
class Item:
    what: str
    path: Path
    bytes: int | None
    """Bytes, with all files in a folder, and all rotated files of a log; None where there is nothing yet."""
    run_id: str | None = None


def inventory(home: Home) -> Iterator[Item]:
    root = home.root
    for what, path in (
        ("home", root),
        ("identity", home.identity),
        ("settings", root / "node.toml"),
        ("last settings", home.remembered),
        ("log", home.log),
        ("control socket", home.socket),
        ("web token", home.web_token),
        ("traffic", home.traffic),
        ("known peers", root / "peers.json"),
        ("known authors", root / "authors.json"),
        ("token files", home.data),
        ("fetched states", root / "gathered"),
    ):
        yield Item(what, path, size_of(path))
    for run in runs(home):
        for what in (signed_file.NAME, "checkpoints", "events.jsonl", "metrics.jsonl"):
            yield Item(what, run / what, size_of(run / what), run.name)


def runs(home: Home) -> list[Path]:
    """The folder of each run that this node took part in, the latest first."""
    folder = home.root / "runs"
    try:
        found = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda run: max(_times(run), default=0.0), reverse=True)


def size_of(path: Path) -> int | None:
    if path.is_dir():
        return sum(filter(None, map(_bytes, files_below(path))))
    own = _bytes(path)
    if own is None or path.suffix not in (".log", ".jsonl"):
        return own
    return own + sum(filter(None, map(_bytes, path.parent.glob(f"{path.name}.*"))))


def files_below(folder: Path) -> Iterator[Path]:
    """Also where a node removes folders meanwhile, as old checkpoints: up to Python 3.12 `rglob` raises then."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def _bytes(path: Path) -> int | None:
    try:
        return 0 if path.is_dir() else path.stat().st_size
    except OSError:  # it does not exist, or was just removed
        return None


def _times(folder: Path) -> Iterator[float]:
    """When each file in it was written. The folder's own time would be that of the last new name in it: where a node
    came back to a run, none is new."""
    for path in files_below(folder):
        with suppress(OSError):  # it was just removed
            yield path.stat().st_mtime
