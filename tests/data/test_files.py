"""A volunteer's files: what arrives is what stands in them, across a resume; what is wrong is one sentence."""

import errno
import gzip
import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from replicas import small_run, train
from texts import jsonl, parquet, texts, tokenizer_json

from noloco_node.data import corpus, files, sources, token_file
from noloco_node.data.corpus import Corpus
from noloco_node.data.documents import Reading
from noloco_node.data.sources import Sources
from noloco_node.data.stream import TokenStream, spread
from noloco_node.data.token_file import FileTokens
from noloco_node.data.tokens import BYTES, FileTokenizer, Tokenizer, Tokens
from noloco_node.errors import DiskFull, UsageError
from noloco_node.run.schema import DataSpec, Manifest, ModelSpec
from noloco_node.training.build import build_replica

FILES = DataSpec(source="files")


def nothing(progress: files.FilesProgress) -> None:
    """Nobody looks on."""


def load(where: Sources, spec: DataSpec = FILES) -> Corpus:
    found = corpus.load(spec, where)
    assert isinstance(found, Corpus)
    return found


def given(folder: Path, *names: Path | str, tokenizer: Path | None = None) -> Sources:
    return Sources(tuple(map(str, names)), tokenizer, folder / "cache")


def written(stored: Tokens | FileTokens, tokenizer: Tokenizer = BYTES) -> list[str]:
    """The documents that these tokens hold."""
    tokens = stored[:]
    *ends, after = np.flatnonzero(tokens == tokenizer.end).tolist()
    assert after == len(tokens) - 1, "the last one ends too"
    return [
        tokenizer.decode(part[part != tokenizer.end].tolist())
        for part in np.split(tokens, [e + 1 for e in [*ends, after]][:-1])
    ]


def a_set(folder: Path, kind: str, content: list[str]) -> str:
    """One corpus in the form that a volunteer may have it; what `--data` says."""
    if kind == "jsonl.gz":
        return str(jsonl(folder / "set.jsonl.gz", content))
    if kind == "parquet":
        parquet(folder / "a.parquet", content[:150])
        parquet(folder / "b.parquet", content[150:])
        return f"{folder}/*.parquet"
    if kind == "folder":
        datasets.Dataset.from_dict({"text": content}).save_to_disk(folder / "set", num_shards=2)
        return str(folder / "set")
    if kind == "tokens":
        out = folder / "set.tokens"
        files.tokenize([jsonl(folder / "set.jsonl", content)], out, BYTES, Reading(), nothing)
        return str(out)
    if kind == "text":
        (folder / "set").mkdir()
        for i, text in enumerate(content):
            (folder / "set" / f"{i:04}.txt").write_text(text, encoding="utf-8")
        return str(folder / "set")
    return str(jsonl(folder / "set.jsonl", content))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "folder", "tokens", "text"])
def test_the_tokens_that_arrive_are_those_in_the_files_across_a_resume(kind: str, tmp_path: Path) -> None:
    content = texts(300)
    corpus = load(given(tmp_path, a_set(tmp_path, kind, content)))
    train, held_out = written(corpus.train), written(corpus.held_out)
    assert sorted(train + held_out) == sorted(content)
    assert 5 <= len(held_out) <= 40
    assert train == sorted(train, key=content.index), "in their order"

    length, rows = 16, []
    stream = corpus.stream(length, 1, "a")
    windows, position = (len(corpus.train) - length) // length, stream.position
    for start in range(0, windows, 97):  # each batch by a process of its own, as it were
        again = load(given(tmp_path, again_named(tmp_path, kind))).stream(length, 1, "a")
        again.seek(json.loads(json.dumps(position)))
        rows += again.next(min(97, windows - start))[0].tolist()
        position = again.position
    assert rows == stream.next(windows)[0].tolist() and stream.position == position
    assert any(sorted(rows) == sorted(grid(corpus.train, length, shift)) for shift in range(length)), "a whole epoch"


def again_named(folder: Path, kind: str) -> str:
    names = {"parquet": "*.parquet", "jsonl": "set.jsonl", "jsonl.gz": "set.jsonl.gz", "tokens": "set.tokens"}
    return str(folder / names.get(kind, "set"))


def grid(tokens: Tokens | FileTokens, length: int, shift: int) -> list[list[int]]:
    starts = range(shift, shift + (len(tokens) - length) // length * length, length)
    return [tokens[start : start + length + 1].tolist() for start in starts]


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    content, path = texts(300), tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_json())
    tokenizer = FileTokenizer(path.read_bytes())
    spec = DataSpec(source="files", tokenizer=f"sha256:{tokenizer.digest.hex()}")
    corpus = load(given(tmp_path, parquet(tmp_path / "set.parquet", content), tokenizer=path), spec)
    assert corpus.tokenizer.vocabulary == 300 and corpus.train[:].dtype == np.uint16
    assert sorted(written(corpus.train, tokenizer) + written(corpus.held_out, tokenizer)) == sorted(content)
    assert spread(corpus.held_out, 16, 4).shape == (4, 17)


def test_a_replica_goes_on_in_its_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_json())
    spec = DataSpec(
        source="files", tokenizer=f"sha256:{FileTokenizer(path.read_bytes()).digest.hex()}", sequence_length=16
    )
    run = small_run().model_copy(update={"data": spec})
    where = given(tmp_path, parquet(tmp_path / "set.parquet", texts(300)), tokenizer=path)
    one, other = (build_replica(run, "a", device="cpu", threads=1, sources=where) for _ in range(2))
    train(one, 4)
    other.load(one.state())
    assert train(one, 4) == train(other, 4) and one.stream.position == other.stream.position
    assert one.module.get_input_embeddings().num_embeddings == 300  # type: ignore[operator, union-attr]


def test_files_are_tokenized_once_and_again_when_they_change(tmp_path: Path) -> None:
    where = given(tmp_path, jsonl(tmp_path / "set.jsonl", texts(100)))
    load(where)
    (kept,) = where.cache.iterdir()
    made = kept.stat().st_ino
    load(where)
    assert [path.stat().st_ino for path in where.cache.iterdir()] == [made]
    jsonl(tmp_path / "set.jsonl", texts(101))
    assert len(load(where).train) and len(list(where.cache.iterdir())) == 2
    load(replace(where, encoding="latin-1"))
    assert len(list(where.cache.iterdir())) == 3, "another encoding makes another text"


def test_a_kept_file_that_is_damaged_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody made it with a command, or knows that it may be deleted."""
    where = given(tmp_path, jsonl(tmp_path / "set.jsonl", texts(100)))
    whole = load(where).train[:]
    (kept,) = where.cache.iterdir()
    os.truncate(kept, kept.stat().st_size - 1)
    assert np.array_equal(load(where).train[:], whole)
    assert f"{kept} is damaged" in caplog.text


def test_token_files_among_others_are_put_together(tmp_path: Path) -> None:
    content = texts(300)
    files.tokenize([jsonl(tmp_path / "a.jsonl", content[:100])], tmp_path / "a.tokens", BYTES, Reading(), nothing)
    corpus = load(given(tmp_path, tmp_path / "a.tokens", parquet(tmp_path / "b.parquet", content[100:])))
    assert sorted(written(corpus.train) + written(corpus.held_out)) == sorted(content)


def sides(corpus: Corpus) -> tuple[set[str], set[str]]:
    """The lines to train on and those held out."""
    train, held_out = ("".join(written(part)) for part in (corpus.train, corpus.held_out))
    return set(train.splitlines()), set(held_out.splitlines())


def test_one_large_text_file_has_a_held_out_part(tmp_path: Path) -> None:
    lines = [f"{line}\n" for line in texts(3000)]
    (tmp_path / "large.txt").write_text("".join(lines), encoding="utf-8")
    corpus = load(given(tmp_path, tmp_path / "large.txt"))
    pieces = written(corpus.train) + written(corpus.held_out)
    assert sorted("".join(pieces).splitlines()) == sorted("".join(lines).splitlines())
    assert all(piece.endswith("\n") for piece in pieces), "cut after lines"
    assert 0.02 < len(corpus.held_out) / len(corpus.train) < 0.15
    assert len(written(corpus.train)) <= len(written(corpus.held_out)) + 1, "neighbours on one side are one text"


@pytest.mark.parametrize("kind", ["another name", "jsonl", "parquet", "among others", "something before it"])
def test_the_same_text_is_on_the_same_side_for_every_volunteer(kind: str, tmp_path: Path) -> None:
    text = "".join(f"{line}\n" for line in texts(3000))
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    train, held_out = sides(load(given(tmp_path / "a", tmp_path / "mine.txt")))
    assert len(train) > 2000 and len(held_out) > 50
    name = tmp_path / "yours.md"
    if kind == "jsonl":
        jsonl(name := tmp_path / "yours.jsonl", ["another", text])
    elif kind == "parquet":
        parquet(name := tmp_path / "yours.parquet", [text, "another"])
    elif kind == "something before it":
        name.write_text("Once upon a time\n" * 30 + text, encoding="utf-8")
    else:
        name.write_text(text, encoding="utf-8")
    if kind == "among others":
        for i, other in enumerate(texts(300, seed=3)):
            (tmp_path / f"{i}.txt").write_text(f"other {other}", encoding="utf-8")
        name = tmp_path / "*.[mt][dx]*"
        (tmp_path / "mine.txt").unlink()
    theirs, theirs_held_out = sides(load(given(tmp_path / "b", name)))
    both = (train & theirs_held_out) | (held_out & theirs)
    assert len(both) <= (60 if kind == "something before it" else 0), "the first part at most"
    assert len(train & theirs) > 2000 and len(held_out & theirs_held_out) > 50


def test_a_loop_of_links_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "folder").mkdir()
    for name in (f"{tmp_path}/a", f"{tmp_path}/folder/../a", f"{tmp_path}/folder/../a/x.txt"):
        with pytest.raises(UsageError, match=r"there is no file .* here"):
            sources.find((name,))


def test_memory_stays_small_whatever_the_file(tmp_path: Path) -> None:
    """Batches of documents go to the tokenizer; never the file."""
    path = jsonl(tmp_path / "set.jsonl", ["x" * 10_000] * 2_000)

    class Watched:
        vocabulary, end, digest = BYTES.vocabulary, BYTES.end, BYTES.digest
        most = 0

        def encode(self, given: list[str]) -> list[Tokens]:
            Watched.most = max(Watched.most, sum(map(len, given)))
            return BYTES.encode(given)

    files.tokenize([path], tmp_path / "set.tokens", Watched(), Reading(), nothing)  # type: ignore[arg-type]
    assert 0 < Watched.most <= files.BATCH_TEXT + 10_000


def test_progress_grows_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BATCH_PARTS", 20)
    said: list[files.FilesProgress] = []
    paths = [jsonl(tmp_path / "a.jsonl.gz", texts(200)), parquet(tmp_path / "b.parquet", texts(200))]
    total = sum(files.tokenize(paths, tmp_path / "set.tokens", BYTES, Reading(), said.append))
    shares = [progress.share for progress in said]
    assert len(said) == 20 and shares == sorted(shares) and shares[-1] == 1
    assert said[-1].tokens == total and said[-1].left_s == 0


# ---- what can be wrong ----
def test_what_is_missing_is_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"name yours, as in --data 'corpus/\*\.parquet'"):
        sources.check(FILES, Sources())
    both = FILES.model_copy(update={"tokenizer": f"sha256:{'a' * 64}"})
    with pytest.raises(
        UsageError, match=r"--data 'corpus/\*\.parquet'; and .* \(SHA-256 a{12}…\).* with --tokenizer \(the"
    ):
        sources.check(both, Sources())
    for name in ("none.txt", "*.parquet", "~nobody-by-this-name/x", "a**b"):
        with pytest.raises(UsageError, match=r"there is no file|is no pattern|names no user"):
            load(given(tmp_path, name if name.startswith("~") else tmp_path / name))
    needs = DataSpec(source="files", tokenizer=f"sha256:{64 * '0'}", where="https://example.org/corpus")
    with pytest.raises(UsageError) as told:
        sources.check(needs, Sources())
    for words in ("--data 'corpus", "--tokenizer", "author says where to get it: https://example.org/corpus"):
        assert words in str(told.value), "all of it in one go"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no file in the folder .* ends in \.txt, .* or \.tokens"):
        load(given(tmp_path, tmp_path / "empty"))


def test_records_without_a_text_are_passed_over(tmp_path: Path) -> None:
    content = texts(100)
    corpus = load(given(tmp_path, jsonl(tmp_path / "set.jsonl", [*content[:50], None, "", *content[50:]])))
    other = load(given(tmp_path, parquet(tmp_path / "set.parquet", [None, "", *content])))
    for found in (corpus, other):
        assert sorted(written(found.train) + written(found.held_out)) == sorted(content)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not valid JSON"),
        ('{"txt": "x"}', "line 2 is no record with a text in 'text'"),
        ('{"text": 3}', "line 2 is no record"),
        ("[]", "line 2 is no record"),
        ("[" * 100_000, "line 2 is not valid JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"text": "x"}}\n{line}\n')
    with pytest.raises(UsageError, match=sentence):
        load(given(tmp_path, path))
    assert not list((tmp_path / "cache").iterdir()), "and nothing is left"


@pytest.mark.parametrize(
    ("run", "reads"),
    [
        (Manifest(name="x"), "the sources of Python's standard library"),
        (Manifest(name="x", data=DataSpec(source="hub", dataset="owner/texts")), "owner/texts"),
        (Manifest(name="x", model=ModelSpec(task="blobs")), "the data of its task blobs"),
        (Manifest(name="x", data=FILES), None),
    ],
)
def test_files_that_the_run_does_not_read_are_named(run: Manifest, reads: str | None) -> None:
    said = [f"warning: this run reads {reads}: --data is not used"] if reads else []
    assert list(sources.unused(run, Sources(("nowhere",)))) == said
    said = ["warning: this run's tokenizer is bytes: --tokenizer is not used"]
    assert list(sources.unused(run, Sources(tokenizer=Path("nowhere")))) == said
    assert not list(sources.unused(run, Sources()))


@pytest.mark.parametrize("name", ["set.parquet", "set.arrow", "set.jsonl.gz"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PAR1 this is none" * 10)
    with pytest.raises(UsageError, match=f"cannot read .*{name}"):
        load(given(tmp_path, tmp_path / name))
    whole = jsonl(tmp_path / "whole.jsonl.gz", texts(500)).read_bytes()
    (tmp_path / "whole.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"cannot read .*whole\.jsonl\.gz, which is damaged"):
        load(given(tmp_path, tmp_path / "whole.jsonl.gz"))


def test_a_file_that_a_bad_disk_does_not_give_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(io.FileIO):
        def readinto(self, _: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "set.txt").write_text("text")
    whole = Path.open
    dying = lambda path, mode="r", **how: io.BufferedReader(Dying(path)) if mode == "rb" else whole(path, mode, **how)  # noqa: E731
    monkeypatch.setattr(Path, "open", dying)
    (tmp_path / "cache").mkdir()
    with pytest.raises(UsageError, match=r"cannot read .*set\.txt.*Input/output error"):
        load(given(tmp_path, tmp_path / "set.txt"))


def test_arrow_is_read_as_a_stream_and_as_a_file(tmp_path: Path) -> None:
    table = pyarrow.table({"text": texts(400)})
    for name, new in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table)
    found = [sides(load(given(tmp_path, tmp_path / name))) for name in ("stream.arrow", "file.arrow")]
    assert found[0] == found[1] and "".join(found[0][0])


def test_a_folder_that_this_user_may_not_enter_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", closed)
    with pytest.raises(UsageError, match=r"Permission denied\. Make it readable for this user"):
        sources.find((str(tmp_path / "closed"),))


def test_what_is_hidden_is_no_data_unless_it_is_named(tmp_path: Path) -> None:
    """As the copies that other programs keep of a file: a Mac's are no text."""
    for name in ("a.txt", "._a.txt", "in/b.txt", ".git/c.md", ".ipynb_checkpoints/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")

    def found(*names: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in sources.find(tuple(f"{tmp_path}/{name}" for name in names))]

    assert found("") == found("**/*.txt") == ["a.txt", "in/b.txt"]
    assert found("*.txt") == ["a.txt"] and found("._a.txt", ".git/*", ".i*/*") == [
        "._a.txt",
        ".git/c.md",
        ".ipynb_checkpoints/a.txt",
    ]
    assert [path.name for path in sources.find((f"{tmp_path}/.git",))] == ["c.md"]


def test_a_folder_that_is_there_is_meant_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name looks like a pattern, or a pattern is typed in it."""
    (folder := tmp_path / "[old] texts" / "*").mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    monkeypatch.chdir(folder)
    for name in ("*.txt", f"{folder}/?.txt", f"{folder.parent}/**/*.txt", f"{tmp_path}/*/*/a.txt"):
        assert sources.find((name,)) == [folder / "a.txt"], name


def test_a_column_that_is_not_there_or_holds_no_text(tmp_path: Path) -> None:
    path = parquet(tmp_path / "set.parquet", texts(100))
    with pytest.raises(UsageError, match="has no column 'content', the field that is read; there are: id, text"):
        load(given(tmp_path, path), DataSpec(source="files", field="content"))
    with pytest.raises(UsageError, match="has no text in its column 'id'"):
        load(given(tmp_path, path), DataSpec(source="files", field="id"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_that_is_there_twice_is_named(suffix: str, tmp_path: Path) -> None:
    path, column = tmp_path / f"set.{suffix}", pyarrow.array(texts(100))
    table = pyarrow.Table.from_arrays([column, column], names=["text", "text"])
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(UsageError, match="has 2 columns 'text', and one is read: rename the others"):
        load(given(tmp_path, path))


def test_a_pipe_is_said_to_be_one_and_not_waited_for(tmp_path: Path) -> None:
    """As a shell's `<(zcat corpus.gz)` gives one: it could not be read at the next start."""
    os.mkfifo(pipe := tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match="is a pipe or a device: write what comes from it to a file"):
        load(given(tmp_path, pipe))
    with pytest.raises(UsageError, match=r"cannot read the tokenizer .*: it is not a regular file"):
        sources.read_tokenizer(pipe)


def test_an_empty_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    jsonl(tmp_path / "set.jsonl", texts(300))
    load(given(tmp_path, tmp_path / "empty.txt", tmp_path / "blank.jsonl", tmp_path / "set.jsonl"))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"{tmp_path / 'blank.jsonl'} holds no text", f"{tmp_path / 'empty.txt'} holds no text"]
    with pytest.raises(UsageError, match=r"empty\.txt is empty"):
        sources.check(FILES, given(tmp_path, tmp_path / "empty.txt"))
    with pytest.raises(UsageError, match=r"there is no text in 2 files, .*blank\.jsonl first"):
        load(given(tmp_path, tmp_path / "empty.txt", tmp_path / "blank.jsonl"))


@pytest.mark.parametrize("name", ["set.txt", "set.jsonl", "set.jsonl.gz"])
def test_text_that_is_not_utf_8_is_named_and_read_when_told_how(name: str, tmp_path: Path) -> None:
    content = ["née le 3 mars"] * 3 + texts(3000)
    path = tmp_path / name
    lines = [text if name == "set.txt" else json.dumps({"text": text}, ensure_ascii=False) for text in content]
    raw = "".join(f"{line}\n" for line in lines).replace("ï", "i").encode("cp936")
    path.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    at = raw.index("é".encode("cp936"))
    with pytest.raises(UsageError, match=rf"{path} is not UTF-8 text: byte {at} is 0xa8\. Name its encoding, as in"):
        load(given(tmp_path, path))
    assert not list((tmp_path / "cache").iterdir())
    train, held_out = sides(load(replace(given(tmp_path, path), encoding="cp936")))
    assert "née le 3 mars" in "".join(train | held_out)
    with pytest.raises(UsageError, match=f"{path} is not ASCII text: byte {at}"):
        load(replace(given(tmp_path, path), encoding="ascii"))
    with pytest.raises(UsageError, match=f"{path} is not UTF-16 text: .*BOM.*Try --encoding utf-16-le"):
        load(replace(given(tmp_path, path), encoding="utf-16"))


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    """UTF-7 may write a surrogate alone."""
    (tmp_path / "set.txt").write_bytes(b"words +2AA- words\n" + "".join(f"{t}\n" for t in texts(3000)).encode("utf-7"))
    train, held_out = sides(load(replace(given(tmp_path, tmp_path / "set.txt"), encoding="utf-7")))
    assert "words \ufffd\ufffd\ufffd words" in "".join(train | held_out)


@pytest.mark.parametrize("at", [0, 3, (1 << 20) - 1, (1 << 20) + 2])
def test_the_byte_that_is_not_utf_8_is_found_wherever_it_is(at: int, tmp_path: Path) -> None:
    path, good = tmp_path / "set.txt", "é\n".encode()
    before = "".join("é\n" if k % 1000 == 0 else "é " for k in range(at // 3)).encode() + b"ok\n"
    for raw, where in (
        (before + b"\xff" + good, len(before)),
        (before + b"\xc3", len(before)),
        (b"\xef\xbb\xbf" + before + b"\xff", 3 + len(before)),
    ):
        path.write_bytes(raw)
        with pytest.raises(UsageError, match=f"byte {where} is 0x(ff|c3)"):
            load(given(tmp_path, path))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text("".join(f"{line}\n" for line in texts(3000)), encoding="utf-8-sig")
    train, held_out = sides(load(given(tmp_path, tmp_path / "set.txt")))
    assert not any("\ufeff" in line for line in train | held_out)


def test_a_column_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    offsets, raw = np.array([0, 2, 4], np.int32), b"ok\xff\xfe"
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(raw)])
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "set.parquet")
    with pytest.raises(UsageError, match=r"set\.parquet has a text in 'text' that is not UTF-8"):
        load(given(tmp_path, tmp_path / "set.parquet"))


def test_too_little_to_hold_a_part_back(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not enough text to hold some out"):
        load(given(tmp_path, jsonl(tmp_path / "set.jsonl", ["one"])))


# ---- the token file ----
@pytest.fixture
def made(tmp_path: Path) -> Path:
    files.tokenize([jsonl(tmp_path / "set.jsonl", texts(100))], tmp_path / "set.tokens", BYTES, Reading(), nothing)
    return tmp_path / "set.tokens"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda raw: b"", "set.tokens is empty"),
        (lambda raw: raw[:40], "is not a token file"),
        (lambda raw: b"PK" + raw[2:], "is not a token file"),
        (lambda raw: raw[:8] + b"\1" + raw[9:], "has version 1 of the format, and this is version 2. Make it again"),
        (lambda raw: raw[:-1], "is damaged: it has"),
        (lambda raw: raw + b"x", "is damaged: it has"),
        (lambda raw: raw[:10] + b"\4" + raw[11:], "is damaged: it has"),
        (lambda raw: raw[:16] + b"\xff" * 8 + raw[24:], "is damaged: it has"),
        (lambda raw: raw[:40] + b"x" + raw[41:], "was made with another tokenizer"),
    ],
)
def test_a_damaged_token_file_is_refused(damage, sentence: str, made: Path, tmp_path: Path) -> None:
    made.write_bytes(damage(made.read_bytes()))
    with pytest.raises(UsageError, match=sentence):
        load(given(tmp_path, made))


def test_a_token_beyond_the_vocabulary_is_found(tmp_path: Path) -> None:
    tokenizer, path = FileTokenizer(tokenizer_json()), tmp_path / "set.tokens"
    files.tokenize([jsonl(tmp_path / "set.jsonl", texts(100))], path, tokenizer, Reading(), nothing)
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + b"\xff\xff")
    with pytest.raises(UsageError, match="holds the token 65535"):
        token_file.load(path, tokenizer)


def test_a_file_that_becomes_shorter_or_is_overwritten_while_it_is_read_is_named(tmp_path: Path) -> None:
    """A mapped one ended the process by SIGBUS."""
    tokenizer, path = FileTokenizer(tokenizer_json()), tmp_path / "set.tokens"
    files.tokenize([jsonl(tmp_path / "set.jsonl", texts(100))], path, tokenizer, Reading(), nothing)
    train, held_out = token_file.load(path, tokenizer)
    raw = path.read_bytes()
    os.truncate(path, len(raw) - 2)
    assert len(train[:]) == len(train)
    with pytest.raises(UsageError, match="became shorter while it was read"):
        held_out[:]
    with path.open("r+b") as file:
        file.write(b"\xff" * len(raw))
    with pytest.raises(UsageError, match="is damaged: it holds the token 65535"):
        TokenStream(train, 16, 1, "a").next(1)


def test_a_killed_write_leaves_the_old_file(made: Path, tmp_path: Path) -> None:
    before = made.read_bytes()
    with pytest.raises(KeyboardInterrupt), token_file.Writer(made, BYTES) as writer:
        writer.add(np.zeros(10, np.uint8), held_out=False)
        raise KeyboardInterrupt
    assert made.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.jsonl", "set.tokens"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    abandoned, used = tmp_path / f".set.tokens.0-{ended.pid}.part", tmp_path / f".set.tokens.0-{os.getppid()}.part"
    for part in (abandoned, used):
        part.write_bytes(b"half of it")
    files.tokenize([jsonl(tmp_path / "set.jsonl", texts(100))], tmp_path / "set.tokens", BYTES, Reading(), nothing)
    assert used.exists() and not abandoned.exists()


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """Linux's /dev/full takes nothing, as a full disk."""
    with pytest.raises(DiskFull, match="the disk is full"), token_file.Writer(tmp_path / "set.tokens", BYTES) as writer:
        writer._file.close()
        writer._file = open("/dev/full", "wb")  # noqa: PTH123, SIM115
        writer.add(np.zeros(1 << 20, np.uint8), held_out=False)
    assert not list(tmp_path.iterdir())
