"""A volunteer's own files as one token file, made at the first start and kept: text, jsonl, parquet and arrow.

A record of jsonl, parquet or arrow is a document. A text file is cut into documents, after the line that reaches 64
KiB, so that parts of a few large files can be held out. Each document is followed by the tokenizer's end token; one in
16 is held out, by its file's name and its number in it. Files are streamed: none is held in memory as a whole.

A token file alone is used as it is; several, or one among other files, are copied into one. The kept file is found by
the names, sizes and times of its sources. Knows nothing of runs.
"""

import gzip
import hashlib
import itertools
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from noloco_node.base.extras import pip_install
from noloco_node.data import sources, token_cache, token_file
from noloco_node.data.sources import TOKENS, Sources
from noloco_node.data.tokens import Text, Tokenizer, Tokens
from noloco_node.errors import UsageError

log = logging.getLogger(__name__)

TEXT_BYTES = 64 << 10
"""Of a text file in one document, up to the end of a line: 16 or more sequences of a usual length."""
LINE_BYTES = 64 << 20
"""The longest line of jsonl that is read as a record."""
BATCH_DOCUMENTS, BATCH_BYTES = 1024, 4 << 20
"""Tokenized at once, whichever is reached first: enough for the tokenizer's threads, with little memory."""
LOG_S = 10.0

_COMPRESSED_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True)
class FilesProgress:
    share: float
    """Of the files' bytes, 0 to 1."""
    tokens: int
    left_s: float | None
    """None before there is anything to estimate from."""


Report = Callable[[FilesProgress], None]


def load(where: Sources, tokenizer: Tokenizer, field: str) -> tuple[Tokens, Tokens]:
    """The tokens to train on and those held out."""
    paths = sources.find(where.files)
    if len(paths) == 1 and paths[0].name.endswith(TOKENS):
        return token_file.load(paths[0], tokenizer)
    kept = where.cache / f"{_key(paths, tokenizer, field)}{TOKENS}"
    if not kept.exists():
        log.info("tokenizing %d files into %s", len(paths), kept)
        tokenize(paths, kept, tokenizer, field, _logger())
    token_cache.use(kept)
    return token_file.load(kept, tokenizer)


def tokenize(paths: Sequence[Path], out: Path, tokenizer: Tokenizer, field: str, report: Report) -> tuple[int, int]:
    """Make the token file `out`. Returns its numbers of tokens to train on and of held-out ones."""
    began, sizes = time.monotonic(), [path.stat().st_size for path in paths]
    with token_file.Writer(out, tokenizer) as writer:
        for path, size, before in zip(paths, sizes, itertools.accumulate(sizes, initial=0), strict=False):
            for within in _add(path, writer, tokenizer, field):
                share = (before + within * size) / max(1, sum(sizes))
                spent = time.monotonic() - began
                report(
                    FilesProgress(share, writer.train + writer.held_out, spent * (1 - share) / share if share else None)
                )
    return writer.train, writer.held_out


def documents(path: Path, field: str) -> Iterator[tuple[Text, float]]:
    """A file's documents that are not empty, each with the share of the file that has been read. Raises UsageError,
    which names the file and the place in it."""
    name = path.name
    if name.endswith(".parquet"):
        found = _parquet(path, field)
    elif name.endswith(".arrow"):
        found = _arrow(path, field)
    elif name.endswith((".jsonl", ".jsonl.gz")):
        found = _jsonl(path, field)
    else:
        found = _text(path)
    return ((text, share) for text, share in found if text)


def _add(path: Path, writer: token_file.Writer, tokenizer: Tokenizer, field: str) -> Iterator[float]:
    """Write one file's tokens; yields the share of it that is done after each batch."""
    if path.name.endswith(TOKENS):
        for part, held_out in zip(token_file.load(path, tokenizer), (False, True), strict=True):
            for start in range(0, len(part), token_file.PIECE):
                writer.add(part[start : start + token_file.PIECE], held_out)
        yield 1.0
        return
    end = np.array([tokenizer.end], np.uint32)
    numbers = itertools.count()
    for texts, share in _batches(documents(path, field)):
        for tokens in tokenizer.encode(texts):
            held_out = sources.is_held_out(f"{path.name}/{next(numbers)}")
            writer.add(tokens, held_out)
            writer.add(end, held_out)
        yield share


def _batches(found: Iterator[tuple[Text, float]]) -> Iterator[tuple[list[Text], float]]:
    texts: list[Text] = []
    size, share = 0, 0.0
    for text, share in found:
        texts.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(texts) >= BATCH_DOCUMENTS:
            yield texts, share
            texts, size = [], 0
    if texts:
        yield texts, share


# ---- the kinds of file ----
def _text(path: Path) -> Iterator[tuple[Text, float]]:
    with _opened(path) as file:
        size = max(1, os.fstat(file.fileno()).st_size)
        while piece := _read(path, file, lambda: file.read(TEXT_BYTES)):
            yield piece + _read(path, file, lambda: file.readline(TEXT_BYTES)), file.tell() / size


def _jsonl(path: Path, field: str) -> Iterator[tuple[Text, float]]:
    with _opened(path) as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        lines: Any = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
        for number in itertools.count(1):
            line = _read(path, raw, lambda: lines.readline(LINE_BYTES + 1))
            if not line:
                return
            if line.strip():
                yield _record(line, field, f"{path}, line {number}"), raw.tell() / size


def _record(line: bytes, field: str, where: str) -> str:
    if len(line) > LINE_BYTES:
        raise UsageError(f"{where} is longer than {LINE_BYTES >> 20} MiB: is the file really jsonl?")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not valid JSON: fix or remove this line") from None
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UsageError(f"{where} is no record with a text in {field!r}, the field that is read")
    return text.encode(errors="surrogatepass").decode(errors="replace")  # JSON may escape half a character


def _parquet(path: Path, field: str) -> Iterator[tuple[Text, float]]:
    parquet = _library("pyarrow.parquet", "parquet files")
    with _arrow_errors(path):
        file = parquet.ParquetFile(path)
        rows = max(1, file.metadata.num_rows)
        _check_column(path, file.schema_arrow, field)
        done = 0
        for batch in file.iter_batches(BATCH_DOCUMENTS, columns=[field]):
            done += batch.num_rows
            yield from ((text, done / rows) for text in batch.column(0).to_pylist())


def _arrow(path: Path, field: str) -> Iterator[tuple[Text, float]]:
    """As `datasets` saves a set to a folder: a stream of batches."""
    arrow = _library("pyarrow", "arrow files")
    with _arrow_errors(path), arrow.memory_map(str(path)) as file:
        size = max(1, file.size())
        stream = arrow.ipc.open_stream(file)
        _check_column(path, stream.schema, field)
        for batch in stream:
            share = file.tell() / size
            yield from ((text, share) for text in batch.column(field).to_pylist())


def _check_column(path: Path, schema: Any, field: str) -> None:
    if field not in schema.names:
        there = ", ".join(schema.names[:8]) or "none"
        raise UsageError(f"{path} has no column {field!r}, the field that is read; there are: {there}")
    if str(schema.field(field).type) not in ("string", "large_string", "string_view"):
        raise UsageError(f"{path} has no text in its column {field!r}, but {schema.field(field).type}")


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Errors of pyarrow about a file, as one sentence."""
    try:
        yield
    except (OSError, _library("pyarrow", "it").ArrowException) as error:
        raise UsageError(f"cannot read {path}: {str(error).partition(chr(10))[0]}") from None


def _library(name: str, what: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"reading {what} needs an extra package: {pip_install('data')}") from None


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _read(path: Path, file: IO[bytes], some: Callable[[], bytes]) -> bytes:
    try:
        return some()
    except _COMPRESSED_ERRORS as error:
        raise UsageError(f"cannot read {path}, which is damaged after {file.tell()} bytes: {error}") from None


def _key(paths: Sequence[Path], tokenizer: Tokenizer, field: str) -> str:
    """A digest of everything that the token file depends on."""
    digest = hashlib.sha256(f"{token_file.VERSION}\n{field}\n".encode() + tokenizer.digest)
    for path in paths:
        found = path.stat()
        digest.update(f"\n{path}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _logger() -> Report:
    """Logs the progress every LOG_S."""
    logged = time.monotonic()

    def report(progress: FilesProgress) -> None:
        nonlocal logged
        if time.monotonic() - logged >= LOG_S:
            logged = time.monotonic()
            left = "" if progress.left_s is None else f", about {progress.left_s / 60:.0f} min left"
            log.info("tokenizing: %.0f%%, %d tokens%s", 100 * progress.share, progress.tokens, left)

    return report
