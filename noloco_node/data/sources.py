"""The files and the tokenizer that a volunteer names for a run: found and checked, not yet read.

The manifest comes from an unknown author and names no path, so only files that their owner names are trained on. A
folder stands for the data files in it, by their suffixes; a pattern for all that it matches. Imports no torch: a
missing file is named before anything heavy starts.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from noloco_node.base.atomic_files import open_file, require_known
from noloco_node.base.units import size, span
from noloco_node.base.validation import listed, shown
from noloco_node.errors import UsageError
from noloco_node.host.home import whole_path
from noloco_node.run.schema import DataSpec, Manifest
from noloco_node.views.status import Health

TOKENS = ".tokens"
SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet", ".arrow", TOKENS)
"""Files of a folder that are data, if they are not hidden; others are notes about it."""
MAX_FILES = 100_000
AWAITED_S = 300.0
"""From then on `status` says that data is waited for: a network comes back, a token that has expired does not."""
MAX_TOKENIZER_BYTES = 64_000_000
"""Twice the largest vocabularies in use."""


class Awaited:
    """What the reading waits for, and since when: written by the thread that reads, shown in `status`."""

    def __init__(self) -> None:
        self._waits: tuple[float, str] | None = None
        """Replaced as a whole."""

    def waits(self, why: str, now: float) -> None:
        self._waits = (self._waits[0] if self._waits else now), why

    def over(self) -> None:
        self._waits = None

    def health(self, now: float) -> tuple[Health, ...]:
        if (waits := self._waits) is None or now - waits[0] < AWAITED_S:
            return ()
        text = f"data: nothing has come for {span(now - waits[0])}: {waits[1]}"
        remedy = "if this machine is online, log in again with a Hugging Face token that may read it, then join again"
        return (Health("warning", text, remedy),)


@dataclass(frozen=True, slots=True)
class Sources:
    """A run on the standard library needs none of it."""

    files: tuple[str, ...] = ()
    """Files, folders or patterns."""
    tokenizer: Path | None = None
    """A tokenizer.json."""
    cache: Path = Path("tokens")
    """The folder for token files made of `files`; a node's is in its home."""
    encoding: str = "utf-8"
    """Of text files and jsonl."""
    awaited: Awaited = field(default_factory=Awaited, compare=False)


def check(spec: DataSpec, where: Sources) -> None:
    """Raises UsageError, which names all that the run needs and this machine does not have."""
    wanted: list[Callable[[], object]] = [partial(find, where.files)] if spec.source == "files" else []
    wanted.append(partial(tokenizer_bytes, spec.tokenizer, where.tokenizer))
    faults = []
    for look in wanted:
        try:
            look()
        except UsageError as error:
            faults.append(str(error))
    if faults:
        there = f". The run's author says where to get it: {spec.where}" if spec.where else ""
        raise UsageError("; and ".join(faults) + there)


def unused(run: Manifest, where: Sources) -> Iterator[str]:
    """What is said of files that are named for a run that takes none."""
    reads = run.data.dataset or "the sources of Python's standard library"
    if run.model.task:
        reads = f"the data of its task {run.model.task}"
    if where.files and run.data.source != "files":
        yield f"warning: this run reads {reads}: --data is not used"
    if where.tokenizer and not run.data.tokenizer.startswith("sha256:"):
        yield f"warning: this run's tokenizer is {run.data.tokenizer}: --tokenizer is not used"


def find(files: tuple[str, ...]) -> list[Path]:
    """The files that are named, each once, in the order of their names."""
    if not files:
        raise UsageError("the run leaves the data to you: name yours, as in --data 'corpus/*.parquet'")
    found = {path for name in files for path in _matching(name)}
    if len(found) > MAX_FILES:
        raise UsageError(f"{len(found)} files are named, and {MAX_FILES} are possible: join them into larger ones")
    paths = sorted(found)
    if not any(path.stat().st_size for path in paths):
        what = f"{paths[0]} is" if len(paths) == 1 else f"all {len(paths)} files are"
        raise UsageError(f"{what} empty: name a file with text")
    return paths


def tokenizer_bytes(name: str, path: Path | None) -> bytes | None:
    """The tokenizer.json that the manifest asks for by digest; None where it asks for none."""
    kind, _, digest = name.partition(":")
    if kind != "sha256":
        return None
    if path is None:
        raise UsageError(
            f"the run has a tokenizer of its own (SHA-256 {digest[:12]}…): give its file with --tokenizer (the run's "
            "author has it)"
        )
    content = read_tokenizer(path)
    if (there := hashlib.sha256(content).hexdigest()) != digest:
        raise UsageError(
            f"{path} is not the run's tokenizer (SHA-256 {there[:12]}… instead of {digest[:12]}…): "
            "ask the run's author for the file"
        )
    return content


def read_tokenizer(path: Path) -> bytes:
    try:
        with open_file(path.expanduser()) as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"cannot read the tokenizer {path}: {getattr(error, 'strerror', error)}") from error
    check_size(len(content), str(path))
    return content


def check_size(tokenizer_bytes: int, what: str) -> None:
    if tokenizer_bytes > MAX_TOKENIZER_BYTES:
        raise UsageError(f"{what} is larger than {size(MAX_TOKENIZER_BYTES)}: that is no tokenizer.json")


def _matching(name: str) -> Iterator[Path]:
    try:
        yield from _found(whole_path(name), name)
    except OSError as error:
        raise UsageError(f"cannot read {shown(name)}: {error.strerror}. Make it readable for this user") from None


def _found(path: Path, name: str) -> Iterator[Path]:
    require_known(path)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and not _hidden(file, path)]
    elif path.exists():
        found = [path]
    else:
        try:
            found = _fitting(path)
        except ValueError as error:
            raise UsageError(f"{shown(name)} is no pattern: {error}") from None
    files = [file for file in found if file.is_file()]
    if not files and path.is_dir():
        raise UsageError(f"no file in the folder {shown(name)} ends in {listed(SUFFIXES)}: name files, or a pattern")
    if not files and path.exists():
        raise UsageError(f"{shown(name)} is a pipe or a device: write what comes from it to a file, and name that")
    if not files:
        raise UsageError(f"there is no file {shown(name)} here: name files, a folder of them, or a pattern")
    yield from files


def _fitting(pattern: Path) -> list[Path]:
    """As a shell has it: nothing hidden, unless the pattern says so. A folder that is there is meant as it is written,
    also `[old] texts`."""
    folder, parts = Path(pattern.anchor), list(pattern.parts[1:])
    while (folder / parts[0]).exists():
        folder /= parts.pop(0)
    says_so = any(part.startswith(".") for part in parts)
    return [file for file in folder.glob("/".join(parts)) if says_so or not _hidden(file, folder)]


def _hidden(file: Path, folder: Path) -> bool:
    """Copies that other programs keep: `.ipynb_checkpoints`, or `._x.txt` of a Mac, which is no text."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
