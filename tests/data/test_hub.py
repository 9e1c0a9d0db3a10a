"""A streamed data set: every record once an epoch, exactly there after a resume, on through a failing network."""

import gzip
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from real_nodes import until
from texts import jsonl, parquet, texts, tokenizer_json

from noloco_node.data import corpus, hub
from noloco_node.data.hub import HubCorpus
from noloco_node.data.hub_stream import BLOCKS_READY, Ahead, HubStream, Mark
from noloco_node.data.sources import AWAITED_S, Sources
from noloco_node.data.stream import spread
from noloco_node.data.tokens import BYTES, FileTokenizer, Tokenizer
from noloco_node.errors import NolocoError, UsageError
from noloco_node.run.schema import DataSpec

LENGTH = 16
CONTENT = texts(300)
SHARDS = (CONTENT[:120], CONTENT[120:200], CONTENT[200:])
BEGINNING = {"epoch": 0, "part": 0, "piece": 0, "block": 0, "state": None, "offset": None, "taken": 0}


@pytest.fixture(autouse=True)
def _quick_and_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BLOCK_RECORDS", 16)
    monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def shards(tmp_path: Path) -> Any:
    """Three parquet files, as a data set of the hub has them."""
    paths = [str(parquet(tmp_path / f"{i}.parquet", content)) for i, content in enumerate(SHARDS)]
    return datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)


def opened(records: Any, tokenizer: Tokenizer = BYTES) -> HubCorpus:
    return hub.corpus("a set", records, None, tokenizer, "text")


@pytest.fixture
def streams() -> Iterator[Callable[..., HubStream]]:
    made: list[HubStream] = []

    def stream(of: HubCorpus, peer: str = "a") -> HubStream:
        made.append(of.stream(LENGTH, 1, peer))
        return made[-1]

    yield stream
    for each in made:
        each.close()


def documents(rows: torch.Tensor, tokenizer: Tokenizer = BYTES) -> list[str]:
    """The documents that end in rows, each of which begins with the last token of the one before."""
    tokens = torch.cat([rows[0, :1], rows[:, 1:].flatten()]).numpy()
    ends = np.flatnonzero(tokens == tokenizer.end) + 1
    return [tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends)[:-1]]


# ---- what arrives ----
@pytest.mark.parametrize("kind", ["parquet", "pieces", "jsonl", "folder"])
def test_an_epoch_reads_every_record_once_and_what_is_held_out_never(
    kind: str, tmp_path: Path, shards: Any, streams: Callable[..., HubStream]
) -> None:
    if kind == "jsonl":
        paths = [str(jsonl(tmp_path / f"{i}.jsonl", content)) for i, content in enumerate(SHARDS)]
        shards = datasets.load_dataset("json", data_files=paths, split="train", streaming=True)
    elif kind == "pieces":
        paths = [str(parquet(tmp_path / f"{i}.parquet", content, 7)) for i, content in enumerate(SHARDS)]
        shards = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)
    elif kind == "folder":
        folder = tmp_path / "set"
        folder.mkdir()
        for i, content in enumerate(SHARDS):
            parquet(folder / f"train-{i}.parquet", content)
        shards = datasets.load_dataset(str(folder), split="train", streaming=True)
    corpus = opened(shards)
    held_out = CONTENT[:8]
    assert documents(torch.from_numpy(corpus.held_out.astype(np.int64))[None]) == held_out
    train = CONTENT[8:]
    found = documents(streams(corpus).next(4 * sum(len(text.encode()) + 1 for text in train) // LENGTH)[0])
    epochs = [found[start : start + len(train)] for start in range(0, len(found), len(train))]
    assert len(epochs) >= 4 and all(sorted(epoch) == sorted(train) for epoch in epochs[:3])
    assert len({tuple(epoch) for epoch in epochs[:3]}) == 3, "each in an order of its own"


def test_reading_goes_on_exactly_at_a_position(shards: Any, streams: Callable[..., HubStream]) -> None:
    corpus = opened(shards, FileTokenizer(tokenizer_json()))
    straight, rows = streams(corpus), []
    position: Any = straight.position
    rng = np.random.default_rng(1)
    for _ in range(60):
        again = streams(corpus)
        again.seek(json.loads(json.dumps(position)))  # plain values, as a checkpoint keeps them
        batch = int(rng.integers(1, 40))
        rows.append((batch, again.next(batch)[0]))
        position = again.position
        again.close()
    for batch, row in rows:
        assert torch.equal(straight.next(batch)[0], row)
    assert straight.position == position and position["epoch"] >= 1


def test_a_checkpoint_keeps_the_position(shards: Any, streams: Callable[..., HubStream], tmp_path: Path) -> None:
    stream = streams(opened(shards))
    stream.next(100)
    torch.save(stream.position, tmp_path / "inner.pt")
    assert torch.load(tmp_path / "inner.pt", weights_only=True) == stream.position


def test_the_same_position_twice_and_a_closed_stream_goes_on(shards: Any, streams: Callable[..., HubStream]) -> None:
    stream = streams(opened(shards))
    stream.next(30)
    position = stream.position
    first = stream.next(30)[0]
    stream.seek(position)
    stream.close()
    assert stream.position == position and torch.equal(stream.next(30)[0], first)


def test_back_in_the_same_block_nothing_is_read_again(shards: Any, streams: Callable[..., HubStream]) -> None:
    """As after the batch that is tried out before the first step: a node begins far inside of a file."""
    stream = streams(opened(shards))
    beginning = stream.position
    first = stream.next(1)[0]
    reader = stream._ahead
    stream.seek(beginning)
    assert stream.position["taken"] == 0 and torch.equal(stream.next(1)[0], first)
    assert stream._ahead is reader
    other = {**stream.position, "part": 1, "taken": 0}
    stream.seek(other)
    assert stream.position == other and stream._ahead is None


def test_a_closed_stream_keeps_no_block(shards: Any, streams: Callable[..., HubStream]) -> None:
    stream = streams(opened(shards))
    stream.next(1)
    assert stream._ahead is not None
    reader = weakref.ref(stream._ahead)
    stream.close()
    until(lambda: reader() is None, "the end of its reader")


def test_a_split_of_its_own_is_held_out_where_there_is_one(tmp_path: Path, shards: Any) -> None:
    path = str(parquet(tmp_path / "validation.parquet", texts(40, seed=2)))
    apart = datasets.load_dataset("parquet", data_files=path, split="train", streaming=True)
    corpus = hub.corpus("a set", shards, apart, BYTES, "text")
    assert documents(torch.from_numpy(corpus.held_out.astype(np.int64))[None]) == texts(40, seed=2)
    assert corpus.skipped == () and spread(corpus.held_out, LENGTH, 4).shape == (4, LENGTH + 1)


def test_replicas_are_at_the_same_block_as_rarely_as_chance_has_it(
    shards: Any, streams: Callable[..., HubStream]
) -> None:
    """Ten replicas in step, looked at 30 times over some epochs: which records two of them read between two looks."""
    corpus = opened(shards)
    replicas = [streams(corpus, str(peer)) for peer in range(10)]
    met = looked = 0
    for _ in range(30):
        at = [{int(text.split()[0]) for text in documents(replica.next(60)[0])[1:]} for replica in replicas]
        for one, other in combinations(at, 2):
            looked += len(one)
            met += len(one & other)
    read = looked / (30 * 45)  # records that each reads between two looks
    assert met / looked < 1.2 * read / (len(CONTENT) - 8)


def test_seed_and_peer_decide_what_is_read(shards: Any, streams: Callable[..., HubStream]) -> None:
    corpus = opened(shards)
    assert torch.equal(streams(corpus).next(20)[0], streams(corpus).next(20)[0])
    assert not torch.equal(streams(corpus).next(20)[0], streams(corpus, "b").next(20)[0])


def test_of_an_endless_record_only_its_beginning_is_taken(
    monkeypatch: pytest.MonkeyPatch, streams: Callable[..., HubStream]
) -> None:
    monkeypatch.setattr(hub, "HELD_OUT_TEXT", 1000)
    monkeypatch.setattr(hub, "BLOCK_TEXT", 2000)
    given = ["b" * 900, *["a" * 50_000] * 40]
    found = opened(datasets.IterableDataset.from_generator(lambda: iter([{"text": text} for text in given])))
    assert documents(torch.from_numpy(found.held_out.astype(np.int64))[None]) == ["b" * 900, "a" * 1000]
    blocks = hub.Reader(found, "1/a").blocks(Mark(offset=0), threading.Event())
    assert {len(next(blocks).tokens) for _ in range(10)} == {2001}


def test_a_large_part_of_a_parquet_file_is_read_in_small_ones(tmp_path: Path) -> None:
    """A text that is written once and meant by a million records takes a few bytes in the file."""
    path = parquet(tmp_path / "a.parquet", ["a long text"] * 1000, row_group=1000)
    builder = datasets.load_dataset_builder("parquet", data_files=str(path))
    hub.read_little_at_once("o/n", builder.config)
    tables = [table for _, table in builder.as_streaming_dataset("train")._ex_iterable.iter_arrow()]
    assert sum(map(len, tables)) == 1000 and max(map(len, tables)) == hub.BATCH_RECORDS


@pytest.mark.parametrize(("kind", "option"), [("json", "chunksize"), ("json", "block_size"), ("csv", "chunksize")])
def test_a_data_set_does_not_say_how_much_of_it_is_in_memory(kind: str, option: str, tmp_path: Path) -> None:
    (path := tmp_path / "a").write_text("".join(f'{{"text": "{"words " * 30}"}}\n' for _ in range(60_000)))
    builder = datasets.load_dataset_builder(kind, data_files=str(path), **{option: 1 << 30})
    hub.read_little_at_once("o/n", builder.config)
    tables = builder.as_streaming_dataset("train")._ex_iterable.iter_arrow()
    assert max(len(table) for _, table in tables) < 59_000


def test_a_file_that_can_only_be_read_whole_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text('{"data": [{"text": "words"}]}')
    builder = datasets.load_dataset_builder("json", data_files=str(path), field="data")
    with pytest.raises(UsageError, match="o/n has its records in one field of a JSON file"):
        hub.read_little_at_once("o/n", builder.config)


# ---- the thread ----
def test_a_few_blocks_are_kept_ready_and_no_more(shards: Any, streams: Callable[..., HubStream]) -> None:
    stream = streams(opened(shards))
    stream.next(1)
    assert stream._ahead is not None
    waiting = stream._ahead._queue
    until(waiting.full, "they are ready")
    assert waiting.qsize() == BLOCKS_READY


def test_the_thread_ends_with_the_stream(shards: Any) -> None:
    before = set(threading.enumerate())
    stream = opened(shards).stream(LENGTH, 1, "a")
    stream.next(1)
    assert set(threading.enumerate()) - before
    del stream
    until(lambda: set(threading.enumerate()) <= before, "its end")


# ---- what can go wrong ----
def failing(errors: list[BaseException], at: int) -> Any:
    """A data set of two shards whose reading fails at one record, once with each of `errors`."""

    def records(shard: list[int]) -> Iterator[dict[str, str]]:
        for i in range(100):
            if shard[0] == 1 and i == at and errors:
                raise errors.pop()
            yield {"text": CONTENT[100 * shard[0] + i]}

    return datasets.IterableDataset.from_generator(records, gen_kwargs={"shard": [0, 1]})


def test_a_network_that_fails_is_waited_for(
    streams: Callable[..., HubStream], caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException] = [ConnectionError("no route"), TimeoutError("the hub is slow"), EOFError("cut off")]
    wanted = streams(opened(failing([], at=50))).next(600)[0]
    with caplog.at_level(logging.WARNING):
        assert torch.equal(streams(opened(failing(errors, at=50))).next(600)[0], wanted)
    assert not errors
    said = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert len(said) == 3 and said[0].startswith("waiting for the data set a set (cut off): again in")


def test_what_is_waited_for_too_long_is_shown(
    streams: Callable[..., HubStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a token has expired: the errors of the hub are those of a network, too."""
    monkeypatch.setattr(hub, "FIRST_WAIT_S", 600.0)
    errors: list[BaseException] = [ConnectionError("403 Forbidden\n\nSee the page")]
    where = Sources()
    stream = streams(replace(opened(failing(errors, at=0)), awaited=where.awaited))
    while not where.awaited._waits:
        stream.ready(10_000, 0.01)
    now = time.monotonic()
    assert where.awaited.health(now) == ()
    (finding,) = where.awaited.health(now + AWAITED_S + 60)
    assert finding.text.startswith("data: nothing has come for 6 m") and "403 Forbidden" in finding.text
    assert "\n" not in finding.text and "token" in finding.remedy
    stream.close()
    monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.01)
    assert len(stream.next(60)[0]) == 60 and where.awaited.health(now + AWAITED_S + 60) == ()


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    "error", [FileNotFoundError("gone"), ValueError("no parquet"), TypeError("couldn't cast array of type int64")]
)
def test_a_part_that_cannot_be_read_is_left_out(
    error: Exception, streams: Callable[..., HubStream], caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would end every node that comes to it, again after each restart."""
    stream = streams(opened(failing([error], at=50)))
    assert len(stream.next(60)[0]) == 60
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert said and said[0] == f"a part of a set cannot be read and is left out: {error}"


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_file_is_left_out_after_some_tries(
    cut: bool, tmp_path: Path, streams: Callable[..., HubStream], caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is an OSError or an EOFError, as those of a network are: to wait for it would never end."""
    for number, content in enumerate((CONTENT[:100], CONTENT[100:200])):
        packed = bytearray(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in content).encode()))
        if number and cut:
            del packed[-20:]
        elif number:
            packed[-8] ^= 1  # of the check sum
        (tmp_path / f"{number}.jsonl.gz").write_bytes(packed)
    files = [str(tmp_path / f"{number}.jsonl.gz") for number in (0, 1)]
    stream = streams(opened(datasets.load_dataset("json", data_files=files, split="train", streaming=True)))
    rows = stream.next(600)[0]
    said = [record.getMessage() for record in caplog.records]
    assert len(rows) == 600 and sum("left out" in line for line in said) >= 1
    assert sum("waiting" in line for line in said) % hub.DAMAGED_TRIES == 0


def test_a_file_that_cannot_be_opened_is_left_out(
    streams: Callable[..., HubStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file's description is at its end."""
    opens, failed = hub.shard_of, list[int]()

    def damaged(records: Any, index: int) -> Any:
        if index == 1:
            failed.append(index)
            raise ValueError("no description")
        return opens(records, index)

    corpus = opened(failing([], at=50))
    monkeypatch.setattr(hub, "shard_of", damaged)
    stream = streams(corpus)
    assert len(stream.next(60)[0]) == 60 and failed


@pytest.mark.parametrize("error", [UsageError("mend it"), Panic("at its limit")])
def test_what_does_not_pass_ends_the_reading_for_good(error: BaseException, streams: Callable[..., HubStream]) -> None:
    stream = streams(opened(failing([error], at=50)))
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            stream.next(10_000)


def test_who_only_asks_does_not_wait_for_the_network(
    monkeypatch: pytest.MonkeyPatch, streams: Callable[..., HubStream]
) -> None:
    wanted = streams(opened(failing([], at=50)), "b")  # who begins in the other shard
    again = streams(opened(failing([], at=50)), "b")
    monkeypatch.setattr(hub, "FIRST_WAIT_S", 600.0)
    stream = streams(opened(failing([ConnectionError("no route")], at=50)), "b")
    taken = []
    while stream.ready(1, 0.3):
        taken.append(stream.next(1)[0])
    assert taken and not stream.ready(10_000, 0.0)
    assert torch.equal(torch.cat(taken), wanted.next(len(taken))[0])
    again.seek(stream.position)
    assert torch.equal(again.next(50)[0], wanted.next(50)[0]), "what is at hand already is not lost"


def test_closing_while_the_network_is_waited_for_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FIRST_WAIT_S", 600.0)
    corpus = opened(failing([ConnectionError("no route")], at=0))
    ahead = Ahead(lambda stopped: hub.Reader(corpus, "1/b").blocks(Mark(), stopped))
    ahead.close()
    assert not ahead._thread.is_alive()


@pytest.mark.parametrize(
    "position",
    [
        None,
        (0, 0),
        {},
        {"epoch": 0, "part": 0, "block": 0, "state": None},
        {"part": 0, "block": 0, "state": None, "taken": 0},
        {**BEGINNING, "part": 9},
        {**BEGINNING, "epoch": -1},
        {**BEGINNING, "piece": -1},
        {**BEGINNING, "offset": -1},
        {**BEGINNING, "taken": -1},
        {**BEGINNING, "block": "x"},
        {**BEGINNING, "piece": None},
        {**BEGINNING, "state": []},
        {**BEGINNING, "more": 1},
    ],
)
def test_a_position_of_other_data_is_refused(position: Any, shards: Any, streams: Callable[..., HubStream]) -> None:
    with pytest.raises(ValueError, match="no position"):
        streams(opened(shards)).seek(position)


@pytest.mark.parametrize("change", [{"block": 3, "state": {"examples_iterable": {"x": 1}}}, {"piece": 7}])
def test_data_that_changed_is_read_from_its_beginning(
    change: dict[str, Any], shards: Any, streams: Callable[..., HubStream], caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint is not refused for it; nor is one whose data file became smaller (tests/training/)."""
    stream, fresh = streams(opened(shards)), streams(opened(shards))
    stream.seek({**BEGINNING, "offset": 0, "taken": 5, **change})
    assert torch.equal(stream.next(20)[0], fresh.next(20)[0]) and stream.position == fresh.position
    said = "a set, or the `datasets` library, has changed since the checkpoint: training goes on at its beginning"
    assert caplog.messages.count(said) == 1


def test_a_set_without_the_field_or_without_text(tmp_path: Path, streams: Callable[..., HubStream]) -> None:
    records = datasets.IterableDataset.from_generator(lambda: iter([{"body": "x"}] * 50))
    with pytest.raises(UsageError, match="has no text in 'text', the field that is read; its records have: body"):
        opened(records)
    records = datasets.IterableDataset.from_generator(lambda: iter([{"text": "x"}] * 2 + [{"text": None}] * 50))
    with pytest.raises(UsageError, match="holds no text to train on"):
        streams(opened(records)).next(10)


def test_only_data_and_only_its_own_files_are_read() -> None:
    own = {"train": ["hf://datasets/o/n@0123/a.parquet"], "test": ["zip://x.jsonl::hf://datasets/o/n@0123/b.zip"]}
    assert hub.check_files("o/n", "datasets.packaged_modules.parquet.parquet", own) == own
    with pytest.raises(UsageError, match="is not a data set of records with text"):
        hub.check_files("o/n", "datasets.packaged_modules.pandas.pandas", own)
    for path in ("/home/me/letters.txt", "hf://datasets/o/other@0123/a", "hf://datasets/o/n2@0/a", "file://etc/passwd"):
        with pytest.raises(UsageError, match="names files that are not its own"):
            hub.check_files("o/n", "datasets.packaged_modules.json.json", {"train": [path]})


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(NolocoError, match=r"cannot open the data set owner/name: .* Is this machine online") as raised:
        corpus.load(DataSpec(source="hub", dataset="owner/name"))
    assert "\n" not in str(raised.value)
