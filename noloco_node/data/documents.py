"""The documents in a volunteer's file: a text file is one, and so is each record of jsonl, parquet and arrow.

Files are streamed: none is held in memory as a whole. Errors name the file and the place in it. Knows nothing of
tokens, nor of what is held out.
"""

import codecs
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any, TextIO

from noloco_node.base.extras import pip_install
from noloco_node.base.units import size
from noloco_node.data.parts import lines_of
from noloco_node.errors import UsageError

LINE = 64_000_000
"""Characters of the longest line of jsonl that is read as a record."""
RECORDS = 1024
"""Of a parquet file at once."""

_ARROW_FILE = b"ARROW1"
_COMPRESSED_ERRORS = (OSError, EOFError, zlib.error)
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """How a volunteer's files are to be read."""

    field: str = "text"
    """Of a record, that which holds its text."""
    encoding: str = "utf-8"
    """Of text files and jsonl."""


class Documents:
    """Of one file, each in its lines; to be iterated over once, in order."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._field, self._encoding = path, reading.field, reading.encoding
        self._share: Callable[[], float] | None = None

    @property
    def share(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return self._share() if self._share else 1.0

    def __iter__(self) -> Iterator[Iterator[str]]:
        name = self._path.name
        if name.endswith((".jsonl", ".jsonl.gz")):
            records = self._jsonl()
        elif name.endswith(".parquet"):
            records = self._parquet()
        elif name.endswith(".arrow"):
            records = self._arrow()
        else:
            yield self._text()
            return
        yield from (lines_of(StringIO(record, newline="\n")) for record in records)

    # ---- text ----
    def _text(self) -> Iterator[str]:
        with self._opened() as text:
            yield from map(_characters, lines_of(text))

    def _jsonl(self) -> Iterator[str]:
        with self._opened() as lines:
            for number in itertools.count(1):
                line = lines.readline(LINE + 1)
                if not line:
                    return
                if line.strip():
                    yield _record(line, self._field, f"{self._path}, line {number}")

    @contextmanager
    def _opened(self) -> Iterator[TextIO]:
        """The file's text. A mark of the byte order at its beginning is no part of it."""
        try:
            raw = self._path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read {self._path}: {error.strerror}") from error
        with raw:
            whole = max(1, os.fstat(raw.fileno()).st_size)
            self._share = lambda: raw.tell() / whole
            try:
                with TextIOWrapper(self._unpacked(raw), self._codec, newline="\n") as text:
                    yield text
                    self._share = None
            except UnicodeError:
                raise UsageError(self._other_encoding()) from None
            except _COMPRESSED_ERRORS as error:
                where = "" if raw.closed else f" after {raw.tell()} bytes"
                raise UsageError(f"cannot read {self._path}, which is damaged{where}: {error}") from None

    def _unpacked(self, raw: IO[bytes]) -> Any:
        return gzip.GzipFile(fileobj=raw) if self._path.name.endswith(".gz") else raw

    @property
    def _codec(self) -> str:
        return "utf-8-sig" if codecs.lookup(self._encoding).name == "utf-8" else self._encoding

    def _other_encoding(self) -> str:
        """Where the file stops being in its encoding."""
        decoder, before = codecs.getincrementaldecoder(self._codec)(), 0
        with self._path.open("rb") as raw:
            file = self._unpacked(raw)
            while True:
                try:
                    block = file.read(_BLOCK)
                except _COMPRESSED_ERRORS as error:
                    return f"cannot read {self._path}, which is damaged: {error}"
                try:
                    decoder.decode(block, final=not block)
                except UnicodeError as error:
                    if not isinstance(error, UnicodeDecodeError) or "BOM" in error.reason:  # Python 3.13, 3.14
                        name = codecs.lookup(self._encoding).name
                        return f"{self._path} is not {name.upper()} text: it has no BOM. Try --encoding {name}-le"
                    at, byte = before + len(block) - len(error.object) + error.start, error.object[error.start]
                    what = f"{self._path} is not {self._encoding.upper()} text: byte {at} is 0x{byte:02x}"
                    return f"{what}. Name its encoding, as in --encoding latin-1, or convert it"
                before += len(block)

    # ---- tables ----
    def _parquet(self) -> Iterator[str]:
        parquet = library("pyarrow.parquet", "parquet files")
        with self._arrow_errors():
            file = parquet.ParquetFile(self._path)
            self._check_column(file.schema_arrow)
            done, rows = 0, max(1, file.metadata.num_rows)
            self._share = lambda: done / rows
            for batch in file.iter_batches(RECORDS, columns=[self._field]):
                done += batch.num_rows
                yield from filter(None, batch.column(0).to_pylist())

    def _arrow(self) -> Iterator[str]:
        """A stream of batches, as `datasets` saves a set to a folder; or a file, as others write it."""
        arrow = library("pyarrow", "arrow files")
        with self._arrow_errors(), arrow.memory_map(str(self._path)) as file:
            whole = max(1, file.size())
            self._share = lambda: file.tell() / whole
            is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
            file.seek(0)
            stream = arrow.ipc.open_file(file) if is_file else arrow.ipc.open_stream(file)
            self._check_column(stream.schema)
            for batch in map(stream.get_batch, range(stream.num_record_batches)) if is_file else stream:
                yield from filter(None, batch.column(self._field).to_pylist())
            self._share = None

    def _check_column(self, schema: Any) -> None:
        if self._field not in schema.names:
            there = ", ".join(schema.names[:8]) or "none"
            raise UsageError(f"{self._path} has no column {self._field!r}, the field that is read; there are: {there}")
        if (found := schema.names.count(self._field)) > 1:
            raise UsageError(f"{self._path} has {found} columns {self._field!r}, and one is read: rename the others")
        if (kind := str(schema.field(self._field).type)) not in ("string", "large_string", "string_view"):
            raise UsageError(f"{self._path} has no text in its column {self._field!r}, but {kind}")

    @contextmanager
    def _arrow_errors(self) -> Iterator[None]:
        """Errors of pyarrow about a file, as one sentence."""
        try:
            yield
        except UnicodeDecodeError:
            raise UsageError(f"{self._path} has a text in {self._field!r} that is not UTF-8: convert it") from None
        except (OSError, library("pyarrow", "it").ArrowException) as error:
            raise UsageError(f"cannot read {self._path}: {str(error).partition(chr(10))[0]}") from None


def _record(line: str, field: str, where: str) -> str:
    if len(line) > LINE:
        raise UsageError(f"{where} is longer than {size(LINE)}: is the file really jsonl?")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not valid JSON: fix or remove this line") from None
    text = record.get(field, 0) if isinstance(record, dict) else 0
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UsageError(
            f"{where} is no record with a text in {field!r}, the field that is read: name another with --field, or as "
            "data.field in run.toml"
        )
    return _characters(text)


def _characters(text: str) -> str:
    """JSON may escape half a character, and UTF-7 may hold one."""
    return text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")


def library(name: str, what: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"reading {what} needs an extra package: {pip_install('data')}") from None
