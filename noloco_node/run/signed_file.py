"""The run's signed manifest as a file, `noloco.json`: beside a node's checkpoints, and in every exported folder.

Whoever finds weights finds next to them what they are of, and that its author signed it. In an export it also tells how
far the training had come. Handed around like the weights, so it is parsed under limits and its signature checked.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_node.base.atomic_files import cannot_write
from noloco_node.errors import NolocoError, UsageError
from noloco_node.run import manifest
from noloco_node.run.manifest import Manifest, Signed

NAME = "noloco.json"
SCHEMA = 1
MAX_BYTES = 4 * manifest.MAX_BYTES
"""The manifest with its quotes escaped, its signature, and what an export says of itself."""


@dataclass(frozen=True, slots=True)
class RunFile:
    signed: Signed
    run: Manifest
    trained: dict[str, Any]
    """What an export says of itself: a stranger's words."""


def keep(folder: Path, signed: Signed) -> None:
    """See that it lies in a run's folder of this node's home. Raises DiskFull, UsageError."""
    with suppress(UsageError):
        if read(folder).signed == signed:
            return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, signed)
    except OSError as error:
        raise cannot_write(folder / NAME, error) from error


def write(folder: Path, signed: Signed, trained: dict[str, Any] | None = None) -> None:
    """Whole or not at all. Raises OSError."""
    document = {
        "schema": SCHEMA,
        "manifest": signed.manifest.decode(),
        "author": signed.author,
        "signature": signed.signature.hex(),
        **({"trained": trained} if trained else {}),
    }
    fresh = folder / f".{NAME}.tmp"
    with fresh.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def read(folder: Path) -> RunFile:
    """Raises UsageError where there is none, or none that can be believed."""
    path = folder / NAME
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {NAME}, which says what run its weights are of: name another") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        signed, trained = _parsed(raw)
        return RunFile(signed, manifest.verify(signed), trained)
    except NolocoError as error:
        raise UsageError(f"{path} cannot be believed: {error}") from None


def _parsed(raw: bytes) -> tuple[Signed, dict[str, Any]]:
    try:
        found: Any = json.loads(raw) if len(raw) <= MAX_BYTES else None
        match found:
            case {"schema": 1, "manifest": str(text), "author": str(author), "signature": str(signature)}:
                trained = found.get("trained", {})
                signed = Signed(text.encode(), author, bytes.fromhex(signature))
                return signed, trained if isinstance(trained, dict) else {}
    except (ValueError, RecursionError):
        pass
    raise UsageError("it is not what noloco-node writes")
