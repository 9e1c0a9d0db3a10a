"""A data set of the Hugging Face hub, streamed: nothing is downloaded beforehand, and reading resumes exactly at a
checkpoint's position.

A shard is a file of the set, a piece is a row group of a Parquet file and the whole file of any other format. An epoch
has all shards in a random order, and in each its pieces in a random order, by seed and peer id. It begins at a random
record of the first piece and ends with the records before that one. Records come in blocks, each shuffled in itself,
tokenized and packed: a window may span documents and blocks. A position is the start of the current block, as the
`datasets` library's own state, and the tokens read in it: a resume reads that one block again. (That library's shuffle
buffer would not be the same after a resume.)

So each record is as likely as any other to be read early, and no replica reads one twice in an epoch: the mean of what
several read is that of stream.py, the best there is without knowing of each other. The spread is larger: of 40,000
records eight replicas that read 5,000 each read ± 1,792 distinct ones in pieces of 1,000, ± 3,339 without pieces.

hub_stream.py reads the next blocks in a thread. When the network fails, that waits, logs it, and tries again; what is
damaged is left out. The manifest and what it names come from unknown authors: only formats that hold data are read, and
only files of that data set.
"""

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from gzip import BadGzipFile
from itertools import islice
from typing import Any, TypeAlias

from noloco_node.base.extras import pip_install
from noloco_node.base.validation import in_one_line
from noloco_node.data.hub_stream import Block, HubStream, Mark
from noloco_node.data.parts import HELD_OUT, batches
from noloco_node.data.sources import Awaited
from noloco_node.data.stream import generator
from noloco_node.data.tokens import Tokenizer, Tokens, packed
from noloco_node.errors import NolocoError, UsageError
from noloco_node.run.schema import DataSpec

log = logging.getLogger(__name__)

Records: TypeAlias = Any
"""A datasets.IterableDataset, which has no types."""

BLOCK_RECORDS, BLOCK_TEXT = 1024, 8 << 20
"""Records and characters of a block, whichever is reached first. What a record alone has beyond them is left out."""
BATCH_RECORDS = 64
"""Of a Parquet file in memory at once; else a row group, whose records may all be the same long text."""
HELD_OUT_RECORDS, HELD_OUT_TEXT = 1024, 2 << 20
"""Records and characters held out, whichever is reached first; of a smaller shard one record in 16."""
MAX_SKIP = 100_000
"""An epoch begins within so many records of its first piece, which is streamed up to there; of a set in many pieces
within its share of them, as few replicas begin in the same one."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
DAMAGED_TRIES = 3
"""Of a place whose content cannot be read, in case it was only cut off on its way."""

_FORMATS = ("parquet", "json", "csv", "arrow")
"""Not text: `datasets` makes each line of a file a record of its own, without its end."""
_NETWORK = ("httpx", "httpcore", "aiohttp", "requests", "urllib3", "fsspec", "huggingface_hub")
"""Errors of these libraries count as temporary too, as every OSError does."""

_CHANGED = "%s, or the `datasets` library, has changed since the checkpoint: training goes on at its beginning"


@dataclass(frozen=True)
class HubCorpus:
    name: str
    """For people."""
    records: Records
    held_out: Tokens
    skipped: tuple[int, ...]
    """Records held out at the beginning of each piece of the first shard; none of the pieces after these."""
    field: str
    tokenizer: Tokenizer
    awaited: Awaited = dataclasses.field(default_factory=Awaited, compare=False)

    def stream(self, sequence_length: int, seed: int, peer_id: str) -> HubStream:
        return HubStream(Reader(self, f"{seed}/{peer_id}"), sequence_length)


def load(spec: DataSpec, tokenizer: Tokenizer, waits_s: Sequence[float] = (1.0, 4.0)) -> HubCorpus:
    """Raises UsageError, or NolocoError where the hub cannot be reached, after one more try for each wait."""
    name = str(spec.dataset)
    try:
        return _opened(name, spec, tokenizer)
    except NolocoError:
        raise
    except ImportError:
        raise UsageError(f"reading a data set of the hub needs an extra package: {pip_install('data')}") from None
    except Exception as error:
        # before a ConnectionError the library itself has tried for half a minute
        if not waits_s or isinstance(error, ConnectionError) or not _is_temporary(error):
            raise NolocoError(
                f"cannot open the data set {name}: {in_one_line(error)}. Is this machine online?"
            ) from error
        _log_waiting(name, error, waits_s[0])
    time.sleep(waits_s[0])
    return load(spec, tokenizer, waits_s[1:])


def _opened(name: str, spec: DataSpec, tokenizer: Tokenizer) -> HubCorpus:
    from datasets import load_dataset_builder

    builder = load_dataset_builder(f"hf://datasets/{name}", spec.subset, revision=spec.revision)
    splits = check_files(name, type(builder).__module__, builder.config.data_files)
    read_little_at_once(name, builder.config)
    if spec.split not in splits:
        raise UsageError(f"{name} has no split {spec.split!r}; there are: {', '.join(sorted(splits))}")
    apart = next((other for other in ("validation", "test") if other in splits and other != spec.split), None)
    return corpus(
        name,
        builder.as_streaming_dataset(spec.split),
        builder.as_streaming_dataset(apart) if apart else None,
        tokenizer,
        spec.field,
    )


def corpus(name: str, records: Records, apart: Records | None, tokenizer: Tokenizer, field: str) -> HubCorpus:
    """`apart`: a split to hold out; without one, the first records of the first shard are held out."""
    pieces = pieces_of(shard_of(records, 0)) if apart is None else [apart]
    found: list[tuple[int, str]] = []  # the piece's number, and the text
    size = 0
    for number, record in ((number, record) for number, piece in enumerate(pieces) for record in piece):
        found.append((number, text_of(record, field, name)[:HELD_OUT_TEXT]))
        size += len(found[-1][1])
        if len(found) >= HELD_OUT_RECORDS or size >= HELD_OUT_TEXT:
            break
    else:
        if apart is None:
            found = found[: -(-len(found) // HELD_OUT)]
    texts = [text for _, text in found if text]
    if not texts:
        raise UsageError(f"{name} has no text in {field!r} to hold out: is that the right field?")
    counts = Counter(number for number, _ in found)
    skipped = () if apart is not None else tuple(counts[number] for number in range(max(counts) + 1))
    return HubCorpus(name, records, packed(texts, tokenizer), skipped, field, tokenizer)


def shard_of(records: Records, index: int) -> Records:
    """One file of the set, in pieces: of a Parquet file its description is read over the network."""
    return records.shard(num_shards=records.num_shards, index=index).reshard()


def pieces_of(shard: Records) -> Iterator[Records]:
    return (shard.shard(num_shards=shard.num_shards, index=index) for index in range(shard.num_shards))


def check_files(name: str, module: str, files: Mapping[str, list[str]] | None) -> Mapping[str, list[str]]:
    """The files of each split, if they are safe to read: a data set's description may name a format that holds code, or
    files elsewhere, even on this machine. Raises UsageError."""
    if module.rpartition(".")[2] not in _FORMATS or not files:
        raise UsageError(f"{name} is not a data set of records with text: {', '.join(_FORMATS)} can be read")
    for path in (path for paths in files.values() for path in paths):
        if not path.rpartition("::")[2].startswith(f"hf://datasets/{name}@"):
            raise UsageError(f"{name} names files that are not its own ({path[:80]}): it is not read")
    return files


def read_little_at_once(name: str, config: Any) -> None:
    """Of a format whose reader can be told how many records it gives at once, which does not change their order or a
    position among them. A data set's description may set that too. Raises UsageError."""
    if getattr(config, "field", None) is not None:
        raise UsageError(f"{name} has its records in one field of a JSON file, which can only be read whole")
    if hasattr(config, "batch_size"):
        config.batch_size = BATCH_RECORDS
    if hasattr(config, "chunksize"):
        config.chunksize = type(config).chunksize  # the library's: with fewer it may take columns for another type


def text_of(record: Mapping[str, Any], field: str, name: str) -> str:
    text = record.get(field)
    if text is None and field in record:
        return ""
    if not isinstance(text, str):
        there = ", ".join(list(record)[:8])
        raise UsageError(f"{name} has no text in {field!r}, the field that is read; its records have: {there}")
    return text


# ---- the order of blocks ----
class Reader:
    """The blocks that one replica reads, in order. Belongs to the thread that reads."""

    def __init__(self, of: HubCorpus, name: str) -> None:
        self._of, self._name = of, name
        self._shards = int(of.records.num_shards)
        self._shard: tuple[int, Records] | None = None
        """The one that was read last, by its index: opening it again would take requests."""

    def blocks(self, mark: Mark, stop: threading.Event) -> Iterator[Block]:
        """Blocks from `mark` on, for ever; of data that has no such place, from its beginning. Waits and tries again
        when the network fails. Raises UsageError."""
        wait_s, damaged, found = FIRST_WAIT_S, 0, mark != Mark()
        resumes = found
        while not stop.is_set():
            try:
                records, ahead, offset = self._begun(mark)
                for texts, state in self._groups(records, ahead):
                    resumes = False
                    self._of.awaited.over()
                    if len(tokens := self._encoded(mark, texts)):
                        found = True
                        yield Block(mark, tokens)
                    mark = replace(mark, block=mark.block + 1, state=state, offset=offset)
                    wait_s, damaged = FIRST_WAIT_S, 0
                mark, found = self._after(replace(mark, offset=offset), found)
            except NolocoError:
                raise
            except Exception as error:  # noqa: BLE001 (of `datasets` and what it reads with, no list is complete)
                if resumes and isinstance(error, LookupError | TypeError | AttributeError):
                    log.warning(_CHANGED, self._of.name)
                    mark, found, resumes = Mark(), False, False
                    continue
                damaged += _is_damage(error)
                if damaged > DAMAGED_TRIES or not _is_temporary(error):  # every node would come to it, again and again
                    wait_s, damaged = FIRST_WAIT_S, 0
                    log.warning("a part of %s cannot be read and is left out: %s", self._of.name, in_one_line(error))
                    mark, found = self._after_what_fails(replace(mark, state=None, offset=mark.offset or 0), found)
                    continue
                _log_waiting(self._of.name, error, wait_s)
                self._of.awaited.waits(in_one_line(error), time.monotonic())
                stop.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def check(self, mark: Mark) -> None:
        """ValueError where this data set has no such place, as far as that is known without reading."""
        if min(mark.epoch, mark.piece, mark.block, mark.offset or 0) < 0 or not 0 <= mark.part <= self._shards:
            raise ValueError(f"no position in this data set: {mark}")
        if not isinstance(mark.state, dict | None):
            raise ValueError(f"no position in a data set: {mark.state}")

    def _begun(self, mark: Mark) -> tuple[Records, Iterator[Mapping[str, Any]], int]:
        """The records of the piece at `mark`, an iterator over them that stands at it, and the epoch's offset."""
        records = self._records(mark)
        if mark.offset is not None:
            return records, iter(records), mark.offset
        rng = generator(f"{self._name}/{mark.epoch}/offset")
        offset = int(rng.integers(max(BLOCK_RECORDS, MAX_SKIP // (self._shards * self._at(mark)[1].num_shards))))
        log.info("reading up to record %d of a part of %s, where this node begins", offset, self._of.name)
        there = _skip(ahead := iter(records), offset)
        if there < offset:  # the piece has no more
            offset = int(rng.integers(max(1, there)))
            records = self._records(mark)
            _skip(ahead := iter(records), offset)
        return records, ahead, offset

    def _groups(
        self, records: Records, ahead: Iterator[Mapping[str, Any]]
    ) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The texts of block after block, and the library's state after each."""
        texts = (text_of(record, self._of.field, self._of.name)[:BLOCK_TEXT] for record in ahead)
        for block in batches(texts, len, BLOCK_RECORDS, BLOCK_TEXT):
            yield block, records.state_dict()

    def _records(self, mark: Mark) -> Records:
        """Those of the piece at `mark`, from the mark's state on."""
        number, shard = self._at(mark)
        pieces = shard.num_shards
        index = int(generator(f"{self._name}/{mark.epoch}/{number}").permutation(pieces)[mark.piece])
        records = shard.shard(num_shards=pieces, index=index)
        if number == 0 and index < len(self._of.skipped):
            records = records.skip(self._of.skipped[index])
        if mark.part == self._shards:
            records = records.take(mark.offset or 0)
        if mark.state is not None:
            records.load_state_dict(mark.state)
        return records

    def _at(self, mark: Mark) -> tuple[int, Records]:
        """The shard at `mark`, and its index."""
        order = generator(f"{self._name}/{mark.epoch}").permutation(self._shards)
        index = int(order[mark.part % self._shards])
        if self._shard is None or self._shard[0] != index:
            self._shard = index, shard_of(self._of.records, index)
        return self._shard

    def _encoded(self, mark: Mark, texts: list[str]) -> Tokens:
        name = f"{self._name}/{mark.epoch}/{mark.part}/{mark.piece}/{mark.block}"
        order = generator(name).permutation(len(texts))
        return packed([texts[i] for i in order if texts[i]], self._of.tokenizer)

    def _after(self, mark: Mark, found: bool) -> tuple[Mark, bool]:
        """The next piece, and whether its epoch has had any text so far."""
        if mark.part < self._shards:
            more = mark.piece + 1 < self._at(mark)[1].num_shards
            part, piece = (mark.part, mark.piece + 1) if more else (mark.part + 1, 0)
            return Mark(mark.epoch, part, piece, offset=mark.offset), found
        if not found:
            raise UsageError(f"{self._of.name} holds no text to train on beyond what is held out: take a larger one")
        return Mark(mark.epoch + 1), False

    def _after_what_fails(self, mark: Mark, found: bool) -> tuple[Mark, bool]:
        """Where the file itself cannot be opened, that is the next file."""
        try:
            return self._after(mark, found)
        except NolocoError:
            raise
        except Exception:  # noqa: BLE001 (as above)
            return Mark(mark.epoch, mark.part + 1, offset=mark.offset), found


def _skip(records: Iterator[Any], count: int) -> int:
    """How many there were to skip, at most `count`."""
    return sum(1 for _ in islice(records, count))


def _is_temporary(error: BaseException | None) -> bool:
    """Whether another try may succeed: the network failed, by this error or its cause."""
    if error is None or isinstance(error, NolocoError):
        return False
    if isinstance(error, FileNotFoundError | PermissionError):  # also what an unreachable file is called
        return _is_temporary(error.__cause__)
    ours = isinstance(error, OSError | EOFError) or type(error).__module__.partition(".")[0] in _NETWORK
    return ours or _is_temporary(error.__cause__)


def _is_damage(error: Exception) -> bool:
    """Whether the content is wrong, as of a file that was cut off or has wrong bits: no system and no network said so.
    pyarrow raises a plain OSError then."""
    plain = isinstance(error, EOFError | BadGzipFile) or type(error) is OSError
    return plain and getattr(error, "errno", None) is None and error.__cause__ is None


def _log_waiting(name: str, error: Exception, wait_s: float) -> None:
    log.warning("waiting for the data set %s (%s): again in %.0f s", name, in_one_line(error), wait_s)
