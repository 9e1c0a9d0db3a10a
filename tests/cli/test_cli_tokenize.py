"""`tokenize`: a token file that a run's volunteers can share, and the lines for run.toml."""

import hashlib
import json
import tomllib
from pathlib import Path

import pytest

from noloco_node.cli import main
from noloco_node.data.corpus import Corpus, load
from noloco_node.data.sources import Sources
from noloco_node.data.token_file import FileTokens
from noloco_node.run import toml
from noloco_node.run.schema import DataSpec


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = "".join(json.dumps({"body": f"text number {i}"}) + "\n" for i in range(100))
    (tmp_path / "texts.jsonl").write_text(lines)
    return tmp_path / "texts.jsonl"


def test_what_is_printed_goes_into_run_toml(texts: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "corpus.tokens"
    assert main(["tokenize", str(texts), "--field", "body", "--out", str(out)]) == 0
    said, _, lines = capsys.readouterr().out.partition("\n\n")
    assert said.startswith(f"wrote {out}: 1,") and said.endswith("held out. In run.toml:")
    (tmp_path / "run.toml").write_text(f'name = "a"\n{lines}')
    run = toml.load(tmp_path / "run.toml")
    assert run.data == DataSpec(**tomllib.loads(lines)["data"])
    corpus = load(run.data, Sources((str(out),)))
    assert isinstance(corpus, Corpus) and isinstance(corpus.train, FileTokens)
    assert b"text number 7\0" in corpus.train[:].tobytes() + corpus.held_out[:].tobytes()


def test_a_file_that_is_there_is_replaced_only_when_told_so(texts: Path, capsys) -> None:
    out = Path("corpus.tokens")
    out.write_bytes(b"mine")
    words = ["tokenize", str(texts), "--field", "body", "--out", str(out)]
    assert main(words) == 2
    assert "corpus.tokens exists already: name another file, or replace it with --force" in capsys.readouterr().err
    assert main([*words[:-1], 300 * "a" + ".tokens"]) == 2
    assert "aa.tokens: File name too long. Name another file with --out" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert main([*words, "--force"]) == 0
    assert out.read_bytes() != b"mine"


def test_json_and_a_tokenizer(texts: Path, tmp_path: Path, capsys) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "text": 1, "number": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path, out = tmp_path / "tokenizer.json", tmp_path / "corpus.tokens"
    tokenizer.save(str(path))
    args = ["tokenize", str(tmp_path), "--field", "body", "--tokenizer", str(path), "--out", str(out), "--json"]
    assert main(args) == 0
    said = json.loads(capsys.readouterr().out)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert said["data"] == {"source": "files", "tokenizer": f"sha256:{digest}", "field": "body"}
    assert (said["schema"], said["vocabulary"], said["bytes"]) == (1, 4, out.stat().st_size)
    assert said["tokens"]["train"] + said["tokens"]["held_out"] == 400
    corpus = load(DataSpec(**said["data"]), Sources((str(out),), path))
    assert isinstance(corpus, Corpus)
    assert corpus.train[:8].tolist() == [1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["texts.jsonl", "--out", "corpus"], "--out must end in .tokens"),
        (["none.jsonl", "--out", "corpus.tokens"], "there is no file"),
        (["texts.jsonl", "--out", "corpus.tokens"], "texts.jsonl, line 1 is no record with a text in 'text'"),
        (["texts.jsonl", "--out", "corpus.tokens", "--tokenizer", "none.json"], "cannot read the tokenizer none.json"),
        (["texts.jsonl", "--out", "corpus.tokens", "--tokenizer", "texts.jsonl"], "is not a tokenizer.json"),
        (["texts.jsonl", "corpus.tokens", "--out", "corpus.tokens"], "which is one of the files to read"),
        (["texts.jsonl", "--out", "texts.jsonl/corpus.tokens", "--field", "body"], "cannot write the token file"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_leaves_nothing(args, sentence, texts: Path, capsys) -> None:
    if "corpus.tokens" in args[:2]:
        Path("corpus.tokens").write_bytes(b"x")
    there = sorted(texts.parent.iterdir())
    assert main(["tokenize", *args]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert sorted(texts.parent.iterdir()) == there


# ---- what a run leaves to the volunteer ----
@pytest.mark.parametrize(
    ("spec", "args", "sentence"),
    [
        ('source = "files"', [], "the run leaves the data to you: name yours, as in --data 'corpus/*.parquet'"),
        ('source = "files"', ["--data", "none/*.txt"], "there is no file 'none/*.txt' here"),
        (f'tokenizer = "sha256:{"0" * 64}"', [], "give its file with --tokenizer"),
        (f'tokenizer = "sha256:{"0" * 64}"', ["--tokenizer", "run.toml"], "run.toml is not the run's tokenizer"),
    ],
)
def test_what_a_run_lacks_is_said_before_anything_starts(spec, args, sentence, tmp_path, capsys) -> None:
    Path("run.toml").write_text(f'name = "a"\n[data]\n{spec}\n')
    assert main(["start", "run.toml", "--home", "home", *args]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err and shown.err.count("\n") == 1
    assert not (tmp_path / "home").exists()
