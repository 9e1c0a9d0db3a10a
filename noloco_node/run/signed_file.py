"""The run's signed manifest as a file, `noloco.json`: beside a node's checkpoints, and in every exported folder.

It says which run the weights beside it are of, with its author's signature; in an export also how far the training had
come. It is passed on with the weights, so it is parsed under limits and its signature is checked.

In a home `ended.json` may lie beside it: a stage of a run may end with fewer rounds than the run has.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_node.base import atomic_files
from noloco_node.errors import Incompatible, NolocoError, UsageError
from noloco_node.run import amendment, manifest
from noloco_node.run.amendment import Amendment
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import MAX_ROUNDS, Manifest

NAME, _ENDED = "noloco.json", "ended.json"
SCHEMA = 1
MAX_BYTES = 4 * manifest.MAX_BYTES
"""The manifest with its quotes escaped, its signature, and what an export says of itself."""
_REMEDY = "restore it from a copy. In a home, a node that joins the run writes a new one; else export the model again"


@dataclass(frozen=True, slots=True)
class RunFile:
    signed: Signed
    run: Manifest
    """As its author amended it, where that is known beside the file and this version can read it."""
    trained: dict[str, Any]
    """What an export says of itself. Not signed: anybody may have written it."""
    amendment: Amendment | None = None
    ended: int = 0
    """The round that this node saw the stages before its own come to the end of."""

    def is_over(self, round: int) -> bool:
        """After this round."""
        return max(round, self.ended) >= self.run.rounds or (self.amendment is not None and self.amendment.ended)


def keep(folder: Path, signed: Signed) -> None:
    """Write it into a run's folder of this node's home, unless it is there. Raises DiskFull, UsageError."""
    with suppress(UsageError):
        if read(folder).signed == signed:
            return
    with atomic_files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    atomic_files.write(folder / NAME, text(signed))


def keep_end(folder: Path, round: int) -> None:
    """Raises DiskFull, UsageError."""
    atomic_files.write(folder / _ENDED, f"{round}\n")


def forget_end(folder: Path) -> None:
    (folder / _ENDED).unlink(missing_ok=True)


def text(signed: Signed, trained: dict[str, Any] | None = None) -> str:
    """The file's content. `trained`: what an export says of itself."""
    document = {
        "schema": SCHEMA,
        "manifest": signed.manifest.decode(),
        "author": signed.author,
        "signature": signed.signature.hex(),
        **({"trained": trained} if trained else {}),
    }
    return json.dumps(document, indent=1) + "\n"


def read(folder: Path) -> RunFile:
    """Raises UsageError where there is none, a damaged one, or one that its author did not sign."""
    path = folder / NAME
    found = atomic_files.read_json(path, _checked, MAX_BYTES, _REMEDY)
    if found is None:
        raise UsageError(f"{folder} has no {NAME}, which says what run its weights are of: name another")
    signed, trained = found
    try:
        run = manifest.verify(signed)
    except NolocoError as error:
        raise UsageError(f"{path} is not valid: {error}") from error
    newest = None
    with suppress(Incompatible):  # a node says so (peers/run_rules.py), and who amends it again hears it
        _, newest = amendment.read(folder, run.run_id, signed.author) or (None, None)
    ended = atomic_files.read_json_or_set_aside(folder / _ENDED, _round, 64, "that this stage had ended is forgotten")
    return RunFile(signed, amendment.apply(run, newest), trained, newest, ended or 0)


def _round(found: object) -> int:
    if type(found) is not int or not 0 < found <= MAX_ROUNDS:
        raise ValueError("it is not a round")
    return found


def _checked(found: object) -> tuple[Signed, dict[str, Any]]:
    match found:
        case {"schema": 1, "manifest": str(canonical), "author": str(author), "signature": str(signature), **more}:
            trained = more.get("trained")
            signed = Signed(canonical.encode(), author, bytes.fromhex(signature))
            return signed, trained if isinstance(trained, dict) else {}
    raise ValueError("it is not what noloco-node writes")
