"""Small state files: whole or not at all whatever fails, and a damaged one is named."""

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from faults import fail_at

from noloco_node.base import atomic_files
from noloco_node.base.atomic_files import DamagedFile, create, part_of, read_json, read_json_or_set_aside, write
from noloco_node.errors import DiskFull, UsageError


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "read-only")]
)
@pytest.mark.parametrize("place", range(1, 8))
def test_a_write_that_fails_anywhere_leaves_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, fault: BaseException
) -> None:
    path = tmp_path / "state.json"
    write(path, "old")
    with fail_at(monkeypatch, place, fault) as calls, pytest.raises((KeyboardInterrupt, DiskFull, UsageError)) as got:
        write(path, "new")
        raise KeyboardInterrupt  # after the last call
    assert path.read_text() == ("new" if calls.count("replace") and calls[-1] != "replace" else "old")
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"
    if len(calls) == place:
        kinds = {errno.ENOSPC: DiskFull, errno.EROFS: UsageError, None: KeyboardInterrupt}
        assert got.type is kinds[getattr(fault, "errno", None)]


def test_it_is_synced_before_it_is_named_and_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fail_at(monkeypatch, 0, KeyboardInterrupt()) as calls:
        write(tmp_path / "state.json", "new")
    assert calls == ["open", "fsync", "replace", "open", "fsync"]
    with fail_at(monkeypatch, 0, KeyboardInterrupt()) as calls:
        create(tmp_path / "identity.key", b"new")
    assert calls == ["open", "fsync", "link", "open", "fsync"]


@pytest.mark.parametrize("place", range(1, 6))
def test_a_file_that_is_made_once_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    path = tmp_path / "web.token"
    with fail_at(monkeypatch, place, KeyboardInterrupt()) as calls, pytest.raises(KeyboardInterrupt):
        create(path, "whole", mode=0o600)
    assert len(calls) == place
    assert list(tmp_path.iterdir()) == ([path] if path.exists() else [])
    assert not path.exists() or (path.read_text(), path.stat().st_mode & 0o777) == ("whole", 0o600)


def test_of_two_that_make_it_the_first_wins(tmp_path: Path) -> None:
    assert create(tmp_path / "key", "first") and not create(tmp_path / "key", "second")
    assert (tmp_path / "key").read_text() == "first" and len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_fills_up_while_the_content_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux's /dev/full takes nothing, as a full disk."""
    path, real = tmp_path / "state.json", os.open
    write(path, "old")
    monkeypatch.setattr(os, "open", lambda name, flags, *mode: real("/dev/full", os.O_WRONLY))
    with pytest.raises(DiskFull, match=r"the disk is full: cannot write .*state\.json\. Free some space, or name"):
        write(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"


def test_modes(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        write(tmp_path / "open", "")
        write(tmp_path / "closed", "", mode=0o600)
    finally:
        os.umask(umask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "closed")] == [0o644, 0o600]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    abandoned, other = tmp_path / f".state.json.0-{ended.pid}.part", tmp_path / f".other.json.0-{ended.pid}.part"
    used = tmp_path / f".state.json.0-{os.getppid()}.part"
    for part in (abandoned, used, other):
        part.write_text("half of it")
    assert part_of(tmp_path / "state.json") != part_of(tmp_path / "state.json"), "two threads write two files"
    assert sorted(tmp_path.iterdir()) == sorted([used, other])
    write(tmp_path / "state.json", "whole")
    assert (tmp_path / "state.json").read_text() == "whole"


# ---- reading ----
def number(found: Any) -> int:
    if not isinstance(found, int):
        raise ValueError("it is not a number")
    return found


GARBAGE = [b"", b"{", b'"x"', b"\xff", b"[" * 100_000, b"1" * 5000, b"1" + b" " * 100]


@pytest.mark.parametrize("content", GARBAGE, ids=lambda content: repr(content)[:12])
def test_a_damaged_file_is_named_with_its_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.json"
    assert read_json(path, number, 100, "delete it") is None
    path.write_bytes(b"17")
    assert read_json(path, number, 100, "delete it") == 17
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"^/.*/state\.json is damaged \(.*\): delete it$") as raised:
        read_json(path, number, 100, "delete it")
    assert raised.value.exit_code == 2 and path.read_bytes() == content, "and it is kept"


@pytest.mark.parametrize("content", GARBAGE, ids=lambda content: repr(content)[:12])
def test_or_is_set_aside_where_going_on_is_safe(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert read_json_or_set_aside(path, number, 100, "the number is forgotten") is None
    assert "state.json is damaged" in caplog.text and "the number is forgotten. It is kept as" in caplog.text
    assert [found.name for found in tmp_path.iterdir()] == ["state.json.damaged"]
    assert (tmp_path / "state.json.damaged").read_bytes() == content


def test_a_file_that_cannot_be_read_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: it is not a regular file. Move it away"):
        read_json(tmp_path, number, 100, "delete it")
    assert read_json_or_set_aside(tmp_path, number, 100, "the number is forgotten") is None
    assert "cannot read" in caplog.text and tmp_path.is_dir(), "it is left where it is"


def test_sentences() -> None:
    full = atomic_files.cannot_write("a checkpoint into /x", OSError(errno.EDQUOT, "quota"))
    assert str(full) == (
        "the disk is full: cannot write a checkpoint into /x. Free some space, or name another directory with --home "
        "or NOLOCO_HOME"
    )
    other = atomic_files.cannot_write("/x", OSError(errno.EACCES, "Permission denied"), "name another file with --to")
    assert str(other) == "cannot write /x: Permission denied. Name another file with --to"
