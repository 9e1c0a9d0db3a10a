"""Checkpoints: whole or not there, the newest that verifies is the one that loads, nothing is left by a full disk."""

import errno
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from noloco_node.base import atomic_files
from noloco_node.checkpoints import checkpoint, listing
from noloco_node.checkpoints.checkpoint import newest, save, slow_weights
from noloco_node.core.state import State
from noloco_node.errors import DiskFull, Incompatible, UsageError

RUN, LAYOUT = "ab" * 32, bytes(range(32))


def a_state(**given: Any) -> State:
    usual = {
        "round": 2,
        "step": 100,
        "weights": {"a.weight": torch.randn(3, 5), "b": torch.randn(7)},
        "outer": {"phi": torch.randn(22), "delta": torch.zeros(22)},
        "inner": {"position": [1, 7], "moments": {0: torch.randn(22)}},
    }
    return State(**usual | given)


def loaded(directory: Path) -> State:
    found = newest(directory, RUN, LAYOUT)
    assert found.checkpoint is not None and found.skipped == ()
    return found.checkpoint


def test_what_was_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    state = a_state()
    path = save(tmp_path / "checkpoints", state, RUN, LAYOUT)
    there = loaded(tmp_path / "checkpoints")
    assert (path.name, there.round, there.step) == ("100", 2, 100)
    assert {n: w.tolist() for n, w in there.weights.items()} == {n: w.tolist() for n, w in state.weights.items()}
    assert torch.equal(there.outer["phi"], state.outer["phi"]) and torch.equal(there.outer["delta"], torch.zeros(22))
    assert there.inner["position"] == [1, 7] and torch.equal(there.inner["moments"][0], state.inner["moments"][0])


def test_other_tools_read_the_model(tmp_path: Path) -> None:
    state = a_state()
    path = save(tmp_path, state, RUN, LAYOUT)
    with safe_open(path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"a.weight", "b"} and file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("a.weight"), state.weights["a.weight"])


def test_views_of_one_vector_and_empty_tensors_are_saved(tmp_path: Path) -> None:
    flat = torch.randn(10)
    weights = {"x": flat[:4].view(2, 2), "y": flat[4:].view(3, 2).T, "z": torch.zeros(0)}
    save(tmp_path, a_state(weights=weights), RUN, LAYOUT)
    assert {n: w.tolist() for n, w in loaded(tmp_path).weights.items()} == {n: w.tolist() for n, w in weights.items()}


def test_state_json_names_size_and_digest_of_each_file(tmp_path: Path) -> None:
    path = save(tmp_path, a_state(), RUN, LAYOUT)
    about = json.loads((path / "state.json").read_text())
    assert (about["run_id"], about["layout"], about["round"], about["step"]) == (RUN, LAYOUT.hex(), 2, 100)
    assert {n: f["bytes"] for n, f in about["files"].items()} == {
        n: (path / n).stat().st_size for n in ("model.safetensors", "outer.safetensors", "inner.pt")
    }


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 20, 100):
        save(tmp_path, a_state(step=step), RUN, LAYOUT, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["100", "20"]
    assert loaded(tmp_path).step == 100, "steps are numbers: 100 comes after 20"


def test_a_second_one_at_the_same_step_takes_nothing_from_the_first(tmp_path: Path) -> None:
    first = save(tmp_path, a_state(round=1), RUN, LAYOUT)
    second = save(tmp_path, a_state(round=2), RUN, LAYOUT)
    assert first.exists() and second.exists() and loaded(tmp_path).round == 2
    third = save(tmp_path, a_state(round=3), RUN, LAYOUT, keep=1)
    assert loaded(tmp_path).round == 3 and list(tmp_path.iterdir()) == [third]


def test_what_training_could_not_go_on_from_is_in_nobodys_way(tmp_path: Path) -> None:
    """Damaged ones of later steps would else be kept as the newest, and the good ones removed."""
    for step in (50, 100, 150):
        save(tmp_path, a_state(step=step), RUN, LAYOUT)
    for step in (100, 150):
        (tmp_path / str(step) / "inner.pt").unlink()
    found = newest(tmp_path, RUN, LAYOUT)
    assert found.checkpoint is not None and found.checkpoint.step == 50
    save(tmp_path, a_state(step=60), RUN, LAYOUT)
    assert loaded(tmp_path).step == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["50", "60"]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert newest(tmp_path / "never", RUN, LAYOUT).checkpoint is None
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "lost+found").mkdir()
    assert newest(tmp_path, RUN, LAYOUT) == checkpoint.Found(None, ())


@pytest.mark.parametrize("name", ["model.safetensors", "outer.safetensors", "inner.pt", "state.json"])
@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "gone"])
def test_a_damaged_one_is_skipped_and_the_one_before_loads(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, a_state(step=50), RUN, LAYOUT)
    path = save(tmp_path, a_state(step=100), RUN, LAYOUT) / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 0x80]) + whole[middle + 1 :]
        path.write_bytes({"flipped": flipped, "short": whole[:-1], "empty": b""}[damage])
    found = newest(tmp_path, RUN, LAYOUT)
    assert found.checkpoint is not None and found.checkpoint.step == 50
    (why,) = found.skipped
    assert why.startswith("checkpoint 100 is skipped: ") and name in why and "\n" not in why


def test_an_empty_folder_is_skipped_too(tmp_path: Path) -> None:
    save(tmp_path, a_state(step=50), RUN, LAYOUT)
    (tmp_path / "100").mkdir()
    found = newest(tmp_path, RUN, LAYOUT)
    assert found.checkpoint is not None and found.checkpoint.step == 50
    assert found.skipped == ("checkpoint 100 is skipped: it has no state.json",)


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"schema": true}', "[" * 9999, '{"round": true}', "\xff"])
def test_any_other_state_json_is_damage(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, a_state(), RUN, LAYOUT)
    (path / "state.json").write_text(text, encoding="latin-1")
    assert newest(tmp_path, RUN, LAYOUT).checkpoint is None


def test_one_of_a_newer_version_is_no_damage(tmp_path: Path) -> None:
    path = save(tmp_path, a_state(step=100), RUN, LAYOUT) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": listing.SCHEMA + 1, "new": {}}))
    with pytest.raises(Incompatible, match="100 was written by a newer version of noloco-node: update this one"):
        newest(tmp_path, RUN, LAYOUT)
    with pytest.raises(Incompatible, match="newer version"):
        slow_weights(listing.kept(tmp_path), RUN, LAYOUT)


def test_all_damaged_says_so_of_each(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, a_state(step=step), RUN, LAYOUT) / "inner.pt").unlink()
    assert len(newest(tmp_path, RUN, LAYOUT).skipped) == 2


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    """Someone who may write here could do worse; but checkpoints are handed around, and digests are theirs to make."""
    save(tmp_path, a_state(step=50), RUN, LAYOUT)
    path = save(tmp_path, a_state(step=100), RUN, LAYOUT)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"), protocol=2)
    (path / "inner.pt").write_bytes(bomb)
    about = json.loads((path / "state.json").read_text())
    about["files"]["inner.pt"] = {"sha256": hashlib.sha256(bomb).hexdigest(), "bytes": len(bomb)}
    (path / "state.json").write_text(json.dumps(about))
    found = newest(tmp_path, RUN, LAYOUT)
    assert found.checkpoint is not None and found.checkpoint.step == 50
    assert "cannot be read" in found.skipped[0]
    assert not (tmp_path / "ran").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_another_run_or_layout_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, a_state(), RUN, LAYOUT)
    with pytest.raises(Incompatible, match=r"another run \(abababababab… instead of cdcdcdcdcdcd…\)"):
        newest(tmp_path, "cd" * 32, LAYOUT)
    with pytest.raises(Incompatible, match="another layout"):
        newest(tmp_path, RUN, bytes(32))


@pytest.mark.parametrize("room", [0, 10, 300, 1000, 2500])
def test_a_full_disk_leaves_nothing_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    kept = save(tmp_path, a_state(step=50), RUN, LAYOUT)
    write, left = checkpoint._Hashing.write, room

    def fills_up(self: Any, data: Any) -> int:
        nonlocal left
        left -= memoryview(data).nbytes
        if left < 0:
            self.error = OSError(errno.ENOSPC, "No space left on device")
            raise self.error
        return write(self, data)

    monkeypatch.setattr(checkpoint._Hashing, "write", fills_up)
    with pytest.raises(DiskFull, match="the disk is full"):
        save(tmp_path, a_state(step=100), RUN, LAYOUT)
    assert list(tmp_path.iterdir()) == [kept] and loaded(tmp_path).step == 50


def test_a_disk_that_is_too_small_is_not_filled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = a_state()
    needed = 4 * (22 + 44 + 22)
    monkeypatch.setattr(atomic_files, "free_bytes", lambda _: needed - 1)
    monkeypatch.setattr(checkpoint, "_write_all", lambda *_: pytest.fail("nothing is to be written"))
    with pytest.raises(DiskFull):
        save(tmp_path, state, RUN, LAYOUT)
    assert list(tmp_path.iterdir()) == []


def test_slow_weights_need_nothing_but_their_file(tmp_path: Path) -> None:
    state = a_state(step=50)
    save(tmp_path, a_state(step=40), RUN, LAYOUT)
    path = save(tmp_path, state, RUN, LAYOUT)
    (path / "inner.pt").unlink()
    slow = checkpoint.slow_weights(listing.kept(tmp_path), RUN, LAYOUT)
    assert (slow.source, slow.step) == (path, 50) and torch.equal(slow.phi, state.outer["phi"])
    (path / "outer.safetensors").write_bytes(b"")
    assert checkpoint.slow_weights(listing.kept(tmp_path), RUN, LAYOUT).step == 40
    with pytest.raises(UsageError, match="no checkpoint that can be used: checkpoint 50 is skipped"):
        checkpoint.slow_weights([path], RUN, LAYOUT)
    with pytest.raises(Incompatible):
        checkpoint.slow_weights(listing.kept(tmp_path), RUN, bytes(32))


def test_a_disk_that_fills_up_while_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(checkpoint.os, "fsync", no_room)
    with pytest.raises(DiskFull):
        save(tmp_path, a_state(), RUN, LAYOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write a checkpoint into"):
        save(tmp_path / "file", a_state(), RUN, LAYOUT)


def test_what_a_kill_left_half_written_is_never_loaded_and_goes_with_the_next(tmp_path: Path) -> None:
    half = tmp_path / ".writing-x"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert newest(tmp_path, RUN, LAYOUT) == checkpoint.Found(None, ())
    path = save(tmp_path, a_state(), RUN, LAYOUT)
    assert list(tmp_path.iterdir()) == [path]


def test_everything_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = checkpoint.os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(checkpoint.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, a_state(), RUN, LAYOUT)
    assert done[:4] == ["model.safetensors", "outer.safetensors", "inner.pt", "state.json"]
    assert done[4].startswith(".writing-") and done[5:] == ["renamed", tmp_path.name]
