"""The weights that a run begins with, where its author has some: a folder in Hugging Face's format, known by a digest.

Only who starts the run needs the folder, and who trains it again from its beginning: others get the weights of that
moment from a peer. Imports no torch.
"""

import hashlib
import json
from pathlib import Path

from noloco_node.errors import UsageError

KIND = "sha256:"
_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"


def digest(folder: Path) -> str:
    """As the manifest has it: of the names and contents of all files that are loaded. Raises UsageError."""
    try:
        there = sorted(folder.iterdir())
        files = [path for path in there if path.name.endswith((_SUFFIX, _INDEX))]
        for path in files:
            if path.name.endswith(_INDEX):
                _check_index(path, {each.name for each in files})
        lines = [f"{path.name} {_of_file(path)}\n" for path in files]
    except OSError as error:
        raise UsageError(
            f"cannot read the weights in {folder}: {error.strerror}. A run that was begun goes on without them: "
            "`noloco-node join`"
        ) from error
    if not files:
        raise UsageError(
            f"{folder} has no weights: name a folder with model.safetensors, as `save_pretrained` writes it"
        )
    return KIND + hashlib.sha256("".join(lines).encode()).hexdigest()


def check(folder: Path | None, named: str) -> Path:
    """The folder, if it has the weights that the manifest names. Raises UsageError."""
    short = f"SHA-256 {named.removeprefix(KIND)[:12]}…"
    if folder is None:
        raise UsageError(f"the run begins with weights that its author has ({short}): give their folder with --weights")
    folder = folder.expanduser()
    if digest(folder) != named:
        raise UsageError(f"the weights in {folder} are not those that the run begins with ({short}): ask its author")
    return folder


def _check_index(path: Path, names: set[str]) -> None:
    """It says which file a tensor is in, perhaps one outside the folder."""
    try:
        others = set(json.loads(path.read_bytes())["weight_map"].values()) - names
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} is no index of safetensors files, as `save_pretrained` writes it") from None
    if others:
        raise UsageError(f"{path} names a file that is not in its folder: {min(map(str, others))}")


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
