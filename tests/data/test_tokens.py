"""Text into tokens and back."""

import hashlib
import json
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import ENDLESS, PANICS, texts, tokenizer_json, words_json

from noloco_node.data import tokens
from noloco_node.data.tokens import BYTES, FileTokenizer
from noloco_node.errors import UsageError


@pytest.fixture(scope="module")
def content() -> bytes:
    return tokenizer_json()


@given(st.lists(st.text(), max_size=5))
def test_bytes_come_back(written: list[str]) -> None:
    kept = [text for text in written if not any("\ud800" <= c <= "\udfff" for c in text)]
    assert [BYTES.decode(found) for found in BYTES.encode(kept)] == kept
    assert [found.tobytes() for found in BYTES.encode([text.encode() for text in kept])] == [t.encode() for t in kept]


def test_a_tokenizer_file_reads_back(content: bytes) -> None:
    tokenizer = FileTokenizer(content)
    assert tokenizer.vocabulary == 300 and tokenizer.end == 0
    found = tokenizer.encode(texts(20))
    assert [tokenizer.decode(each) for each in found] == texts(20)
    assert sum(map(len, found)) < 0.6 * sum(len(text.encode()) for text in texts(20)) and found[0].dtype == "u2"
    assert tokenizer.digest == hashlib.sha256(content).digest() and tokenizer.file() == content


def test_a_text_cannot_end_itself(content: bytes) -> None:
    tokenizer = FileTokenizer(content)
    (found,) = tokenizer.encode(["one <|endoftext|> two"])
    assert tokenizer.end not in found.tolist() and tokenizer.decode(found) == "one <|endoftext|> two"


def test_packed_texts_end_each() -> None:
    assert tokens.packed(["ab", b"", "c"], BYTES).tolist() == [97, 98, 0, 0, 99, 0]
    assert tokens.packed([], BYTES).tolist() == []


@pytest.mark.parametrize(("vocabulary", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_tokens_are_as_narrow_as_the_vocabulary(vocabulary: int, width: int) -> None:
    assert tokens.width(vocabulary).itemsize == width


def test_the_runs_tokenizer_is_known_by_its_digest(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    name = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert tokens.load(name, path).vocabulary == 300
    with pytest.raises(UsageError, match="give its file with --tokenizer"):
        tokens.load(name, None)
    with pytest.raises(UsageError, match="cannot read the tokenizer"):
        tokens.load(name, tmp_path / "none.json")
    path.write_bytes(content + b" ")
    with pytest.raises(UsageError, match="is not the run's tokenizer"):
        tokens.load(name, path)


@pytest.mark.parametrize("damaged", [b"", b"{}", b"\xff", b'{"version":"1.0"}', b"[" * 5000])
def test_what_is_no_tokenizer_is_one_sentence(damaged: bytes) -> None:
    with pytest.raises(UsageError, match=r"not a tokenizer\.json") as raised:
        FileTokenizer(damaged)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_an_end_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match="no token for the end of a text"):
        FileTokenizer(content.replace(b"<|endoftext|>", b"<|something|>"))


def test_a_tokenizer_that_panics_is_one_sentence() -> None:
    """Its library raises a BaseException then, which `except Exception` lets pass."""
    tokenizer = FileTokenizer(words_json(pre_tokenizer=ENDLESS))
    assert len(tokenizer.encode(["an honest text"])) == 1
    with pytest.raises(UsageError, match=r"the tokenizer fails on a text: .*retry-limit"):
        tokenizer.encode([PANICS])
    replace = {"type": "Replace", "pattern": ENDLESS["pattern"], "content": ""}
    with pytest.raises(UsageError, match=r"the tokenizer fails on tokens: .*retry-limit"):
        FileTokenizer(words_json(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]})).decode(
            [1] * 40 + [0]
        )


def replace(pattern: dict[str, str], content: str, times: int = 1) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [one] * times}


A = {"String": "a"}
TABLE = (4).to_bytes(4, "little") + bytes(4) + b"\0" + b"a" * 70_000 + b"\0"
METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replace(A, "a" * 10, 7)},
        {"normalizer": replace({"Regex": ""}, "a", 20)},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 100_000}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [METASPACE] * 20}},
        {"decoder": {"type": "Sequence", "decoders": replace(A, "a" * 10, 7)["normalizers"]}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(TABLE).decode()}},
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="may make more than 65536 characters of one"):
        FileTokenizer(words_json(**parts))


def test_many_tokens_of_few_characters_are_refused() -> None:
    tokenizer = FileTokenizer(words_json(normalizer=replace(A, "a " * 20), pre_tokenizer={"type": "Whitespace"}))
    assert len(tokenizer.encode(["a b"])[0]) == 21
    with pytest.raises(UsageError, match="makes 2000 tokens of 100 characters"):
        tokenizer.encode(["a" * 100])


def test_what_is_made_at_once_fits_into_memory(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes 350 bytes for a token: 0.7 GB for so many."""
    given: list[int] = []
    tokenizer = FileTokenizer(content)
    real = tokenizer._library.encode_batch_fast
    tokenizer._library = SimpleNamespace(  # type: ignore[assignment]
        encode_batch_fast=lambda texts, **how: given.append(sum(map(len, texts))) or real(["a"] * len(texts), **how)
    )
    tokenizer.encode(["a" * (3 << 20)])
    assert max(given) * 4 <= 2 << 20


def test_tokens_of_bytes_count_as_four_for_a_character() -> None:
    model = {"type": "BPE", "vocab": {"</s>": 0, "<0xF0>": 1}, "merges": [], "byte_fallback": True}
    assert FileTokenizer(words_json(model=model))._growth == 4 * FileTokenizer(words_json())._growth


def test_tokens_that_would_make_too_long_a_text_are_refused() -> None:
    """As a hub's author may have made them, for the prompt of the run's own sample."""
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a" * 2000: 1}, "unk_token": "</s>"}
    decoder = {"type": "Replace", "pattern": A, "content": "b" * 60_000}
    tokenizer = FileTokenizer(words_json(model=model, decoder=decoder))
    assert tokenizer.decode([0]) == "</s>"
    with pytest.raises(UsageError, match="too long a text of 2 tokens: take another"):
        tokenizer.decode([0, 1])


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "", "cleanup": True},
    ],
)
def test_a_decoder_that_doubles_a_text_is_counted(decoder: dict[str, Any]) -> None:
    many = {"type": "Sequence", "decoders": [decoder] * 17}
    with pytest.raises(UsageError, match="may make more than 65536 characters of one"):
        FileTokenizer(words_json(decoder=many))


def test_the_same_text_has_the_same_tokens_where_merges_are_left_out_by_chance(content: bytes) -> None:
    """A node would train on other tokens than the next, and be judged by others after each start."""
    document = json.loads(content)
    document["model"]["dropout"] = 0.5
    text = "".join(texts(20))
    (found,), (again,) = (FileTokenizer(json.dumps(document).encode()).encode([text]) for _ in range(2))
    (plain,) = FileTokenizer(content).encode([text])
    assert found.tolist() == again.tolist() == plain.tolist()


def test_a_long_text_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    tokenizer, given = FileTokenizer(content), ["", *texts(5), "word " * 200, "", "end"]
    whole, most = tokenizer.encode(given), []
    monkeypatch.setattr(tokens, "MOST_MADE", 4 * 50)
    real = tokenizer._library.encode_batch_fast
    tokenizer._library = SimpleNamespace(  # type: ignore[assignment]
        encode_batch_fast=lambda texts, **how: most.append(sum(map(len, texts))) or real(texts, **how)
    )
    pieces = tokenizer.encode(given)
    assert max(most) <= 50
    again = FileTokenizer(content)
    assert [again.decode(each) for each in pieces] == [again.decode(each) for each in whole] == given
