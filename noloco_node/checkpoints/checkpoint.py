"""A checkpoint: the whole local state on disk. A kill at any instant costs at most the work since the last one.

    <directory>/<step>/
        model.safetensors   fast weights under the model's own parameter names: other tools read it as it is
        outer.safetensors   slow weights and outer momentum, flat
        inner.pt            optimizer, data position, random state; read with weights_only=True, so it runs no code
        state.json          run, layout, round, step, losses, their data, size and SHA-256 of the three; written last

A checkpoint is written under a temporary name, every file and directory is synced, then it is renamed: it is complete
or absent. The newest one that verifies is loaded, unless its loss is clearly worse than that of another on the same
data. Whether its values are a replica's is for checkpoints/saved_state.py. One process at a time uses a directory, by
the home's lock.
"""

import errno
import hashlib
import json
import math
import os
import pickletools
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from noloco_node.base import atomic_files
from noloco_node.checkpoints import listing
from noloco_node.checkpoints.listing import INNER, MODEL, OUTER, SCHEMA, STATE, About, Damaged
from noloco_node.core.state import STATE_BYTES, State
from noloco_node.errors import Incompatible, UsageError

KEEP = 3
"""The newest are kept: the second one is for a bad disk block in the first, a third costs little."""

T = TypeVar("T")

_TEMPORARY = ".writing-"
_MORE_BYTES = 64 << 20
"""Of a checkpoint, for names, the data position and random state: a model of many parts has some MB of them."""
_WORSE_AT_LEAST = 0.1
"""In nats: a small loss varies by more than its share."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The slow weights alone: what is published."""

    source: Path | str
    """Where they were; of weights that a running node has fetched, the peer id of whose they are."""
    round: int
    step: int | None
    """None: not known."""
    phi: Tensor
    """Flat."""


@dataclass(frozen=True, slots=True)
class Found:
    checkpoint: State | None
    skipped: tuple[str, ...]
    """A sentence for each newer one that does not verify."""


Use = Callable[[State], None]
Measured = tuple[str | None, tuple[float | None, float | None]]
"""Which data it was, and the losses on what of it is held out, and in training, as far as they are known."""


def any_values(_: State) -> None:
    """A Use that refuses none."""


# ---- saving ----------------------------------------------------------------------------------------------------------
def save(directory: Path, state: State, run_id: str, layout: bytes, keep: int = KEEP) -> Path:
    """Write a checkpoint, and remove all but it and the newest before it, `keep` in all. Raises DiskFull or UsageError
    and leaves nothing behind; the older ones are untouched then."""
    with atomic_files.writing(f"a checkpoint into {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(directory)
        _require_room(directory, state)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=directory))
        try:
            _write_all(temporary, state, run_id, layout)
            path = _free_name(directory, state.step)
            temporary.rename(path)
            atomic_files.sync(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # it is gone already where all went well
    _prune(directory, path, keep)
    return path


def remove_unfinished(directory: Path) -> None:
    """What a kill left, while none is being written."""
    for unfinished in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _require_room(directory: Path, state: State) -> None:
    """Leave a disk that is nearly full alone: other programs need it too. Raises OSError."""
    free = atomic_files.free_bytes(directory)
    if free is not None and free < sum(map(_size, (state.weights, state.outer, state.inner))):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _size(value: object) -> int:
    """Bytes of the tensors in it."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return value.nbytes if isinstance(value, Tensor) else 0


def _write_all(into: Path, state: State, run_id: str, layout: bytes) -> None:
    files = {
        MODEL: _write(into / MODEL, lambda file: _write_safetensors(file, state.weights)),
        OUTER: _write(into / OUTER, lambda file: _write_safetensors(file, state.outer)),
        INNER: _write(into / INNER, lambda file: torch.save(state.inner, file)),
    }
    which = {"schema": SCHEMA, "run_id": run_id, "layout": layout.hex()}
    losses = {"eval_loss": state.eval_loss, "loss": state.loss, "measured_on": state.measured_on}
    about = {**which, "round": state.round, "step": state.step, **losses, "files": files}
    _write(into / STATE, lambda file: file.write(json.dumps(about, indent=1).encode()))
    atomic_files.sync(into)


class _Hashing:
    """A file that computes the digest while it is written, so that it is not read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error  # torch.save would turn it into a RuntimeError without its number
            raise
        self._sha256.update(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _write(path: Path, content: Callable[[Any], object]) -> dict[str, Any]:
    """Write and sync one file. Returns what state.json says of it. Raises OSError."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        try:
            content(hashing)
        except RuntimeError as error:
            raise hashing.error or error from None
        file.flush()
        os.fsync(file.fileno())
        return {"sha256": hashing.hexdigest(), "bytes": file.tell()}


def _write_safetensors(file: Any, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format, written piece by piece: the library would first copy everything into one string.
    Format: https://github.com/huggingface/safetensors#format"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _free_name(directory: Path, step: int) -> Path:
    """A name that no older one has: replacing a directory is not atomic."""
    again = [place[1] + 1 for place, _ in listing.places(directory) if place[0] == step]
    return directory / (f"{step}-{max(again)}" if again else str(step))


def _prune(directory: Path, written: Path, keep: int) -> None:
    """Keep this one and the newest before it. Those of later steps go: they do not verify, or training had resumed
    from them."""
    paths = listing.kept(directory)
    at = paths.index(written)
    for path in (*paths[:at], *paths[at + keep :]):
        shutil.rmtree(path, ignore_errors=True)  # tried again next time


# ---- loading ---------------------------------------------------------------------------------------------------------
def newest(  # noqa: PLR0913
    directory: Path,
    run_id: str,
    layout: bytes,
    *,
    use: Use = any_values,
    parameters: int | None = None,
    margin: float = math.inf,
) -> Found:
    """The newest checkpoint that verifies and that `use` takes, unless a loss that it was taken at is worse than the
    best of the others on the same data by more than `margin`, a share. Raises Incompatible where it is of another run
    or layout.

    `use` raises ValueError where the values are no replica's. It may raise Incompatible: that is raised here where no
    older checkpoint can be used either. `parameters`: of the model; files far larger than its own are not read."""
    paths = listing.kept(directory)
    losses = {path: _losses(path) for path in paths}
    files = MODEL, OUTER, INNER

    def load(path: Path) -> State:
        found = _read(path, _verified(path, run_id, layout, files, parameters))
        try:
            use(found)
        except (ValueError, Incompatible) as error:
            raise Damaged(str(error)) from error
        return found

    return Found(*_first_good(paths, load, lambda left: _unharmed(left, losses, margin)))


def slow_weights(paths: Sequence[Path], run_id: str, layout: bytes) -> PublishedWeights:
    """The slow weights of the first of these checkpoints that verifies; no other file of it is read. Raises UsageError
    where none does, Incompatible where it is of another run or layout."""
    slow, skipped = _first_good(paths, lambda path: _load_slow(path, run_id, layout))
    if slow is None:
        raise UsageError(f"there is no checkpoint that can be used: {skipped[0] if skipped else 'none was written'}")
    return slow


def _first_good(
    paths: Sequence[Path], load: Callable[[Path], T], choose: Callable[[Sequence[Path]], Path] = lambda left: left[0]
) -> tuple[T | None, tuple[str, ...]]:
    """The first that loads, and a sentence for each before it."""
    left, faults, loaded = list(paths), dict[Path, Exception](), None
    while left and loaded is None:
        path = choose(left)
        worse = left[: left.index(path)]
        left.remove(path)
        try:
            loaded = load(path)
        except Damaged as error:
            faults[path] = error
        else:
            faults |= dict.fromkeys(worse, Damaged(f"its loss is far above that of checkpoint {path.name}"))
    for fault in faults.values():
        if loaded is None and isinstance(fault.__cause__, Incompatible):
            raise fault.__cause__
    return loaded, tuple(f"checkpoint {path.name} is skipped: {faults[path]}" for path in paths if path in faults)


def _unharmed(paths: Sequence[Path], losses: Mapping[Path, Measured], margin: float) -> Path:
    """The first whose losses are not clearly worse than the best of each kind. One without a loss may be good, and so
    may one whose losses no other's can be compared with, as those from before the volunteer named other data, or from
    a version that did not write which data it was."""

    def harmed(path: Path) -> bool:
        data, own = losses[path]
        alike = zip(*(others for where, others in map(losses.__getitem__, paths) if where == data), strict=True)
        return any(loss is not None and not loss <= most for loss, most in zip(own, map(tolerable, alike), strict=True))

    def tolerable(kind: Sequence[float | None]) -> float:
        good = min((loss for loss in kind if loss is not None and math.isfinite(loss)), default=math.inf)
        return good + margin * abs(good) + _WORSE_AT_LEAST

    return next((path for path in paths if not harmed(path)), paths[0])


def _losses(path: Path) -> Measured:
    try:
        found = listing.about(path)
    except Damaged:
        return None, (None, None)
    return found.measured_on, (found.eval_loss, found.loss)


def _load_slow(path: Path, run_id: str, layout: bytes) -> PublishedWeights:
    from safetensors import SafetensorError, safe_open

    about = _verified(path, run_id, layout, (OUTER,))
    try:
        with safe_open(path / OUTER, "pt") as file:
            phi = file.get_tensor("phi")
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{OUTER} cannot be read ({type(error).__name__})") from error
    if phi.dtype is not torch.float32 or phi.dim() != 1:
        raise Damaged(f"{OUTER} holds no flat vector of fp32 numbers")
    return PublishedWeights(path, about.round, about.step, phi)


def _verified(path: Path, run_id: str, layout: bytes, files: Sequence[str], parameters: int | None = None) -> About:
    """state.json, after it and these files were found to be what was written, and of this run."""
    about = listing.about(path)
    _check_same("run", about.run_id, run_id, path)
    _check_same("layout", about.layout, layout.hex(), path)
    total = sum(size for _, size in about.files.values())
    if parameters is not None and total > 2 * STATE_BYTES * parameters + _MORE_BYTES:
        raise Damaged(f"it has {total} bytes, too many for a model of {parameters} parameters")
    for name in files:
        _verify(path / name, about.files[name])
    return about


def _check_same(what: str, there: str, here: str, path: Path) -> None:
    if there != here:
        raise Incompatible(
            f"{path} is of another {what} ({there[:12]}… instead of {here[:12]}…): "
            "name another directory with --home, or move the checkpoint away"
        )


def _verify(path: Path, wanted: tuple[str, int]) -> None:
    sha256, size = wanted
    try:
        with atomic_files.open_file(path) as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise Damaged(f"{path.name} has {found} bytes instead of {size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise Damaged(f"{path.name} is not what was written")
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None


def _read(path: Path, about: About) -> State:
    from safetensors.torch import load_file

    try:
        weights, outer = load_file(path / MODEL), load_file(path / OUTER)
        _require_stored(path / INNER)
        inner = torch.load(path / INNER, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a crafted file makes the readers raise anything, from IndexError to AssertionError
        raise Damaged(f"it cannot be read ({type(error).__name__})") from error
    losses = about.eval_loss, about.loss, about.measured_on
    return State(about.round, about.step, weights, outer, inner, *losses)


_NAMED = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
"""What the pickle of a state names. torch would also take `bytearray`, which makes gigabytes out of a number."""


def _require_stored(path: Path) -> None:
    """As torch writes it: a zip file whose parts are not compressed and take no more than it has, with a pickle that
    makes tensors only, so that reading it takes no more memory than its size. Raises ValueError, BadZipFile."""
    with zipfile.ZipFile(path) as pack:
        parts = pack.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("its parts are compressed")
        if sum(part.file_size for part in parts) > path.stat().st_size:
            raise ValueError("its parts are larger than the file")
        for part in parts:
            if part.filename.lower().endswith("data.pkl"):  # as torch finds it
                with pack.open(part) as pickled:
                    named = [str(what) for code, what, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]
                if odd := [what for what in named if not _NAMED.fullmatch(what)]:
                    raise ValueError(f"it names {odd[0]!r}")
