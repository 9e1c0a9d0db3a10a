"""Token files that nobody wants any more go; the others stay."""

import os
from pathlib import Path

import numpy as np
import pytest

from noloco_node.data import files, token_cache, token_file
from noloco_node.data.sources import Sources
from noloco_node.data.tokens import BYTES

NOW = 2e9
DAY_S = 86_400.0


def kept(folder: Path, name: str, days_ago: float, size: int = 10) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    os.utime(path, (NOW, NOW - days_ago * DAY_S))
    return path


def test_what_no_run_has_used_for_long_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    old, fresh = kept(tmp_path, "a.tokens", 31), kept(tmp_path, "b.tokens", 29)
    notes, link = kept(tmp_path, "notes.txt", 400), tmp_path / "c.tokens"
    link.symlink_to(notes)
    assert token_cache.prune(tmp_path, NOW) == [old]
    assert fresh.exists() and notes.exists() and link.is_symlink()
    assert f"removed {old}" in caplog.text and "31 days ago" in caplog.text
    assert token_cache.prune(tmp_path / "nowhere", NOW) == []


def test_the_latest_used_stays_and_the_others_fit_into_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "OTHERS_BYTES", 25)
    used = kept(tmp_path, "used.tokens", 0, size=1000)
    one, two, three = (kept(tmp_path, f"{days}.tokens", days) for days in (1, 2, 3))
    assert token_cache.prune(tmp_path, NOW) == [three]
    assert used.exists() and one.exists() and two.exists()


def test_what_was_made_before_the_clock_was_set_back_is_not_the_latest_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = kept(tmp_path, "used.tokens", 0, size=1000)
    tomorrow, in_two_months = (kept(tmp_path, f"{days}.tokens", -days) for days in (1, 60))
    assert token_cache.prune(tmp_path, NOW) == [], "it may be this machine's clock that is far behind"
    monkeypatch.setattr(token_cache, "OTHERS_BYTES", 15)
    assert token_cache.prune(tmp_path, NOW) == [in_two_months]
    assert used.exists() and tomorrow.exists()


def test_reading_it_is_a_use(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(20_000)))
    sources = Sources((str(text),), cache=tmp_path / "data")
    files.load(sources, BYTES, "text")
    (made,) = sources.cache.glob("*.tokens")
    os.utime(made, (1e9, 1e9))
    train, _ = files.load(sources, BYTES, "text")
    assert made.stat().st_mtime > 1.5e9 and token_cache.prune(sources.cache) == []
    assert np.array_equal(train[:], token_file.load(made, BYTES)[0][:])
