"""The weights that a run begins with, where its author has some: a folder in Hugging Face's format, known by a digest.

Only who starts the run needs the folder, and who trains it again from its beginning: others get the weights of that
moment from a peer. Of the folder only the safetensors files are read. Imports no torch.
"""

import hashlib
from pathlib import Path

from noloco_node.errors import UsageError

KIND = "sha256:"
_SUFFIX = ".safetensors"


def digest(folder: Path) -> str:
    """As the manifest has it: of the names and contents of the safetensors files. Raises UsageError."""
    try:
        files = sorted(path for path in folder.expanduser().iterdir() if path.name.endswith(_SUFFIX))
        lines = [f"{path.name} {_of_file(path)}\n" for path in files]
    except OSError as error:
        raise UsageError(f"cannot read the weights in {folder}: {error.strerror}") from error
    if not files:
        raise UsageError(
            f"{folder} has no weights: name a folder with model.safetensors, as `save_pretrained` writes it"
        )
    return KIND + hashlib.sha256("".join(lines).encode()).hexdigest()


def check(folder: Path | None, named: str) -> Path:
    """The folder, if it has the weights that the manifest names. Raises UsageError."""
    short = f"SHA-256 {named.removeprefix(KIND)[:12]}…"
    if folder is None:
        raise UsageError(
            f"the run begins with weights that its author has ({short}), and nobody is in it who has later ones: "
            "give their folder with --weights, or join when somebody is there"
        )
    if digest(folder) != named:
        raise UsageError(f"the weights in {folder} are not those that the run begins with ({short}): ask its author")
    return folder


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
