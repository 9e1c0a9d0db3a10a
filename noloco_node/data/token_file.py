"""A token file: a corpus as numbers, which are read where they are wanted, so that it may be larger than memory.

    64 bytes    "NoLoCoTk", version, bytes a token, vocabulary, tokens to train on, tokens held out, tokenizer's digest
    then        the tokens to train on, and after them the held-out ones; little-endian

It is written under a temporary name, synced and renamed: it is complete or absent. Loading reads all of it once, since
a token beyond the vocabulary would end training with an error that does not name it. Knows nothing of texts.
"""

import os
import shutil
import struct
import tempfile
import weakref
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from noloco_node.base import atomic_files
from noloco_node.base.units import size
from noloco_node.data.parts import HELD_OUT, PART_BYTES
from noloco_node.data.tokens import Tokenizer, Tokens, width
from noloco_node.errors import UsageError

MAGIC, VERSION = b"NoLoCoTk", 2
"""Version 1 had other documents held out."""
PIECE = 1 << 24
"""Tokens checked or copied at once."""

_HEADER = struct.Struct("<8sHHIQQ32s")


class Writer:
    """`with Writer(path, tokenizer) as out: out.add(...)`. An error inside leaves no file."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._type = width(tokenizer.vocabulary)
        self.train = self.held_out = 0
        """Tokens so far."""
        self._part: Path
        self._file: IO[bytes]
        self._rest: IO[bytes]

    def __enter__(self) -> Self:
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._part = atomic_files.part_of(self._path)
            self._file = self._part.open("wb")
            self._rest = tempfile.TemporaryFile(dir=self._path.parent)
            self._file.write(bytes(_HEADER.size))
        return self

    def add(self, tokens: Tokens, held_out: bool) -> None:
        with self._writing():
            (self._rest if held_out else self._file).write(tokens.astype(self._type, copy=False).tobytes())
        if held_out:
            self.held_out += len(tokens)
        else:
            self.train += len(tokens)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with self._writing(), self._rest, self._file:
                if error is None:
                    self._finish()
        finally:
            with suppress(OSError):
                self._part.unlink()

    def _writing(self) -> AbstractContextManager[None]:
        return atomic_files.writing(f"the token file {self._path}", "write it to another disk")

    def _finish(self) -> None:
        if not self.train or not self.held_out:
            raise UsageError(
                f"not enough text to hold some out, which is one part of {size(PART_BYTES)} in {HELD_OUT}, chosen by "
                "its content: add some; 200 kB are nearly always enough"
            )
        self._rest.seek(0)
        shutil.copyfileobj(self._rest, self._file, 1 << 20)
        t = self._tokenizer
        self._file.seek(0)
        self._file.write(
            _HEADER.pack(MAGIC, VERSION, self._type.itemsize, t.vocabulary, self.train, self.held_out, t.digest)
        )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.rename(self._path)
        atomic_files.sync(self._path.parent)


class FileTokens:
    """A part of a token file, read piece by piece. In memory-mapped tokens, a file that another program makes shorter
    ends the process by SIGBUS."""

    def __init__(self, path: Path, descriptor: int, tokenizer: Tokenizer, first: int, length: int) -> None:
        """`descriptor`: of the file, and its own from now on."""
        self._path, self._descriptor, self._vocabulary = path, descriptor, tokenizer.vocabulary
        self._type, self._first, self._length = width(tokenizer.vocabulary), first, length
        weakref.finalize(self, os.close, descriptor)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Tokens:
        """Raises UsageError."""
        begin, size = self._bytes_of(part)
        tokens, came = np.empty(size // self._type.itemsize, self._type), 0
        raw = tokens.view(np.uint8).data
        try:
            while came < size and (more := os.preadv(self._descriptor, [raw[came:]], begin + came)):
                came += more
        except OSError as error:
            raise UsageError(f"cannot read {self._path}: {error.strerror}") from error
        if came < size:
            raise UsageError(f"{self._path} became shorter while it was read: replace a token file by a rename")
        if (largest := int(tokens.max(initial=0))) >= self._vocabulary:
            raise UsageError(
                f"{self._path} is damaged: it holds the token {largest}, and the vocabulary has none. {_AGAIN}"
            )
        return tokens

    def announce(self, part: slice) -> None:
        """It is read soon."""
        with suppress(OSError):  # it is only advice
            os.posix_fadvise(self._descriptor, *self._bytes_of(part), os.POSIX_FADV_WILLNEED)

    def _bytes_of(self, part: slice) -> tuple[int, int]:
        """Where they begin, and how many they are."""
        start, stop, _ = part.indices(self._length)
        each = self._type.itemsize
        return _HEADER.size + each * (self._first + start), each * max(0, stop - start)


def load(path: Path, tokenizer: Tokenizer) -> tuple[FileTokens, FileTokens]:
    """The tokens to train on and those held out, checked. Raises UsageError."""
    try:
        with atomic_files.open_file(path) as file:
            header, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
            train, held_out = _counts(path, header, size, tokenizer)
            parts = [
                FileTokens(path, os.dup(file.fileno()), tokenizer, first, length)
                for first, length in ((0, train), (train, held_out))
            ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    for part in parts:
        for start in range(0, len(part), PIECE):
            part[start : start + PIECE]
    return parts[0], parts[1]


def _counts(path: Path, header: bytes, size: int, tokenizer: Tokenizer) -> tuple[int, int]:
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise UsageError(f"{path} is not a token file: make one with `noloco-node tokenize`")
    _, version, itemsize, vocabulary, train, held_out, digest = _HEADER.unpack(header)
    if version != VERSION:
        raise UsageError(f"{path} has version {version} of the format, and this is version {VERSION}. {_AGAIN}")
    if (digest, vocabulary) != (tokenizer.digest, tokenizer.vocabulary):
        raise UsageError(f"{path} was made with another tokenizer than the run's. {_AGAIN}")
    whole = _HEADER.size + itemsize * (train + held_out)
    if itemsize != width(vocabulary).itemsize or not train or not held_out or size != whole:
        raise UsageError(f"{path} is damaged: it has {size} bytes instead of {whole}. {_AGAIN}")
    return train, held_out


_AGAIN = "Make it again with `noloco-node tokenize`"
