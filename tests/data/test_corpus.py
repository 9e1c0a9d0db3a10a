"""What is read, in which order, and what is held out."""

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.data import corpus, stdlib
from noloco_node.data.parts import is_held_out
from noloco_node.data.stream import TokenStream, spread
from noloco_node.data.tokens import Tokens
from noloco_node.errors import UsageError
from noloco_node.run.schema import DataSpec

TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)


def stream(length: int = 10, seed: int = 1, peer: str = "a", text: Tokens = TEXT) -> TokenStream:
    return TokenStream(text, length, seed, peer)


# ---- the corpus ----
def library(root: Path, names: list[str]) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return root


def test_only_sources_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = [f"package/m{i}.py" for i in range(60)]
    others = ["site-packages/x.py", "test/t.py", "package/tests/t.py", "idlelib/i.py", "package/notes.txt"]
    read, held_out = stdlib.read(library(tmp_path, names + others))
    assert read == sorted(read) and held_out == sorted(held_out)
    assert sorted(read + held_out) == sorted(f"# {name}\n".encode() for name in names)


def test_the_same_files_are_held_out_wherever_they_lie(tmp_path: Path) -> None:
    names = [f"m{i}.py" for i in range(60)]
    _, here = stdlib.read(library(tmp_path / "here", names))
    _, there = stdlib.read(library(tmp_path / "there", [*names, "another.py"]))
    assert here == there or is_held_out(b"another.py")
    assert 0 < sum(is_held_out(name.encode()) for name in names) < 12


def test_a_huge_file_and_a_huge_library_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(stdlib, "MAX_BYTES", 400)
    library(tmp_path, [f"m{i:02}.py" for i in range(99)])
    (tmp_path / "a.py").write_text("x" * 101)
    texts = [text for part in stdlib.read(tmp_path) for text in part]
    assert 300 < sum(map(len, texts)) + len(texts) <= 400
    assert not any(b"x" in text for text in texts)


def test_no_sources_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="came without the sources"):
        stdlib.read(tmp_path)


def test_the_standard_library_is_there() -> None:
    whole = corpus.load(DataSpec())
    assert isinstance(whole, corpus.Corpus) and whole.tokenizer.vocabulary == 256
    assert len(whole.train) > 10 * len(whole.held_out) > 1 << 20
    assert b"import " in bytes(whole.train[:100_000])


def test_held_out_windows_are_spread_and_fixed() -> None:
    small = corpus.Corpus(TEXT, TEXT)
    windows = spread(small.held_out, 9, 5)
    assert windows.shape == (5, 10) and windows.dtype == torch.int64
    assert windows[0].tolist() == list(range(10)) and windows[4, -1] == TEXT[-1]
    assert torch.equal(windows, spread(small.held_out, 9, 5))
    with pytest.raises(UsageError, match="sequence_length"):
        spread(small.held_out, 1000, 1)


# ---- the stream ----
def test_rows_are_pieces_of_the_text() -> None:
    rows = stream().next(50)[0]
    assert rows.shape == (50, 11) and rows.dtype == torch.int64
    assert torch.equal(rows[:, 1:], (rows[:, :1] + torch.arange(1, 11)) % 256)


def test_an_epoch_reads_every_window_once() -> None:
    text = np.arange(256, dtype=np.int64).astype(np.uint8)
    one = stream(10, text=text)
    windows = (256 - 10) // 10
    for epoch in range(3):
        assert one.position == (epoch, 0) or one.position == (epoch - 1, windows)
        starts = sorted(one.next(windows)[0][:, 0].tolist())
        assert {b - a for a, b in pairwise(starts)} == {10}


def test_the_same_seed_and_peer_read_the_same_and_others_do_not() -> None:
    assert torch.equal(stream().next(20)[0], stream().next(20)[0])
    assert not torch.equal(stream().next(20)[0], stream(peer="b").next(20)[0])
    assert not torch.equal(stream().next(20)[0], stream(seed=2).next(20)[0])


@given(before=st.integers(0, 250), batch=st.integers(1, 30))
def test_reading_goes_on_exactly_at_a_position(before: int, batch: int) -> None:
    one, other = stream(), stream()
    for _ in range(before):
        one.next(1)
    other.seek(one.position)
    assert torch.equal(one.next(batch)[0], other.next(batch)[0]) and one.position == other.position


def test_two_replicas_are_at_the_same_window_as_rarely_as_chance_has_it() -> None:
    """Over 40 windows, counted for 15 pairs in step: windows that overlap at all, by chance about 2 of 40."""
    length, windows, epochs = 25, 40, 40
    text = np.arange(length * windows + 2 * length, dtype=np.int64).astype(np.uint16)
    replicas = [stream(length, peer=str(peer), text=text) for peer in range(6)]
    starts = np.array([replica.next(windows * epochs)[0][:, 0].tolist() for replica in replicas])
    pairs = list(combinations(range(6), 2))
    met = sum(int((abs(starts[a] - starts[b]) < length).sum()) for a, b in pairs)
    chance = len(pairs) * windows * epochs * 2 / windows
    assert 0.8 * chance < met < 1.1 * chance


def test_eight_replicas_read_as_much_of_a_text_as_is_possible_without_knowing_of_each_other() -> None:
    """400 of 4000 windows each: the tokens that at least one has read."""
    text = np.arange(8 * 4001, dtype=np.int64).astype(np.uint16)
    read = {int(i) for peer in range(8) for i in stream(8, peer=str(peer), text=text).next(400)[0][:, 1:].flatten()}
    assert len(read) == pytest.approx(len(text) * (1 - 0.9**8), rel=0.02)


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (0, 1000), [0], {"epoch": 0}, ("a", 0), None])
def test_a_position_of_another_text_is_refused(position: object) -> None:
    with pytest.raises(ValueError, match="position"):
        stream().seek(position)  # type: ignore[arg-type]


@given(size=st.integers(0, 60), length=st.integers(2, 30))
def test_a_text_is_long_enough_or_refused(size: int, length: int) -> None:
    text = TEXT[:size]
    if size < 2 * length:
        with pytest.raises(UsageError, match=f"{length} needs a text of {2 * length} tokens, and there are {size}"):
            stream(length, text=text)
    else:
        assert stream(length, text=text).next(7)[0].shape == (7, length + 1)
