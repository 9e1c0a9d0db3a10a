"""A crafted checkpoint, with the digests that it should have, costs one checkpoint: the one before it is used."""

import hashlib
import io
import json
import logging
import os
import pickle
import random
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replicas import small_replica, small_run, train
from safetensors.torch import save_file

from noloco_node.checkpoints import checkpoint
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.core.state import State
from noloco_node.errors import Incompatible
from noloco_node.node.build_training import require_good, using
from noloco_node.run.schema import MAX_ROUNDS
from noloco_node.training.replica import Replica

RUN = small_run(rounds=10)
BEFORE = small_replica("a", RUN).state()
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def replica() -> Replica:
    made = small_replica("a", RUN)
    train(made, 4)
    return made


@pytest.fixture(scope="module")
def later(replica: Replica) -> State:
    """The state some steps after that of the checkpoint before."""
    other = small_replica("a", RUN)
    other.load(replica.state())
    train(other, 4)
    return other.state()


def resumed(home: Path, replica: Replica) -> int | None:
    """The step of the checkpoint that it resumes from. A step of training shows that it can go on."""
    keeper = CheckpointKeeper(home, RUN.run_id)
    found = keeper.resume(replica.layout, using(RUN, replica, replica.load), replica.parameters)
    if found:
        replica.step()
    return found.step if found else None


def write_two(home: Path, replica: Replica, later: State) -> Path:
    """The good one, and the newer one whose folder is returned."""
    checkpoint.save(home, BEFORE, RUN.run_id, replica.layout)
    return checkpoint.save(home, later, RUN.run_id, replica.layout)


def sign(path: Path, **about: Any) -> None:
    """Make the digests right again."""
    there = json.loads((path / "state.json").read_text())
    for name in there["files"]:
        if (path / name).is_file():
            content = (path / name).read_bytes()
            there["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (path / "state.json").write_text(json.dumps(there | about))


def test_what_was_written_is_taken(tmp_path: Path, replica: Replica, later: State) -> None:
    write_two(tmp_path, replica, later)
    assert resumed(tmp_path, small_replica("a", RUN)) == later.step
    assert resumed(tmp_path, replica) == later.step


def inner(**values: Any) -> Callable[[State], State]:
    return lambda state: replace(state, inner={**state.inner, **values})


def without(name: str) -> Callable[[State], State]:
    return lambda state: replace(state, inner={key: value for key, value in state.inner.items() if key != name})


def moments(change: Callable[[dict[Any, Any]], object]) -> Callable[[State], State]:
    def changed(state: State) -> State:
        table = {place: dict(of_one) for place, of_one in state.inner["optimizer"].items()}
        return replace(state, inner={**state.inner, "optimizer": change(table) or table})

    return changed


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[State], State]:
    def changed(state: State) -> State:
        table = {name: tensor.clone() for name, tensor in state.weights.items()}
        change(table)
        return replace(state, weights=table)

    return changed


def slow(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: replace(state, outer={**state.outer, name: value(state.outer[name])})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    spoiled = tensor.clone()
    spoiled.view(-1)[3] = NAN
    return spoiled


def some_large() -> Any:
    """10^18 values in a few bytes."""
    some: Any = [0] * 10
    for _ in range(17):
        some = [some] * 10
    return some


COUNTERS = ("phase_step", "taken", "skipped", "skipped_in_row", "warm_up_left")
CRAFTED: dict[str, Callable[[State], State]] = {
    **{
        f"{name} is {value!r}": inner(**{name: value})
        for name in COUNTERS
        for value in (-1, 2**60, "1", 1.5, None, True)
    },
    **{f"no {name}": without(name) for name in (*COUNTERS, "optimizer", "position", "rng", "norms", "last_loss")},
    **{f"phase_s is {value!r}": inner(phase_s=value) for value in (-1.0, NAN, INF, "1", None, [1])},
    **{f"last_loss is {value!r}": inner(last_loss=value) for value in (NAN, INF, "1", None, 1e300)},
    **{f"norms {value!r}": inner(norms=value) for value in ([], ["1"], [NAN] * 12, 3, None, {1: 2}, [1.0] * 999)},
    "position of 10^18 values": inner(position=some_large()),
    "a bytearray": inner(more=bytearray(5)),
    "a short rng": inner(rng=torch.zeros(3, dtype=torch.uint8)),
    "an rng of zeros": inner(rng=torch.zeros(5056, dtype=torch.uint8) + 255),
    "an rng of floats": inner(rng=torch.zeros(5056)),
    "rng is a text": inner(rng="x"),
    "device_rng is a text": inner(device_rng="x"),
    "the optimizer is a list": moments(lambda _: [1, 2]),
    "the optimizer is no table": moments(lambda _: 5),
    "a place beyond": moments(lambda m: m.update({99: m[0]})),
    "a negative place": moments(lambda m: m.update({-1: m[0]})),
    "a place by name": moments(lambda m: m.update({"w": m[0]})),
    "moments that are no table": moments(lambda m: m.update({0: [1]})),
    "no step": moments(lambda m: m[0].pop("step")),
    "a key too many": moments(lambda m: m[0].update(max_exp_avg_sq=m[0]["exp_avg_sq"])),
    "a step of two": moments(lambda m: m[0].update(step=torch.ones(2))),
    "a negative step": moments(lambda m: m[0].update(step=torch.tensor(-5.0))),
    "a step that is a number": moments(lambda m: m[0].update(step=5)),
    "moments of another shape": moments(lambda m: m[0].update(exp_avg=m[0]["exp_avg"].flatten())),
    "moments in bf16": moments(lambda m: m[0].update(exp_avg=m[0]["exp_avg"].bfloat16())),
    "moments of whole numbers": moments(lambda m: m[0].update(exp_avg=m[0]["exp_avg"].long())),
    "a NaN in a moment": moments(lambda m: m[1].update(exp_avg=with_nan(m[1]["exp_avg"]))),
    "a moment below zero": moments(lambda m: m[0].update(exp_avg_sq=-m[0]["exp_avg_sq"] - 1)),
    "one number for all": moments(lambda m: m[0].update(exp_avg=torch.zeros(1).expand(m[0]["exp_avg"].shape))),
    "moments without numbers": moments(lambda m: m[0].update(exp_avg=m[0]["exp_avg"].to("meta"))),
    "a NaN in the weights": weights(lambda w: w.update({next(iter(w)): with_nan(next(iter(w.values())))})),
    "a NaN in phi": slow("phi", with_nan),
    "an Inf in delta": slow("delta", lambda d: torch.full_like(d, INF)),
    "a short phi": slow("phi", lambda p: p[:-1]),
    "a square phi": slow("phi", lambda p: p.view(-1, 1)),
    "weights of another name": weights(lambda w: w.update(other=w.pop(next(iter(w))))),
    "weights of another shape": weights(lambda w: w.update({next(iter(w)): torch.zeros(3)})),
    "more rounds than any run has": lambda state: replace(state, round=MAX_ROUNDS + 1),
    "a negative round": lambda state: replace(state, round=-1),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_wrong_value_costs_one_checkpoint(
    name: str, tmp_path: Path, replica: Replica, later: State, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_two(tmp_path, replica, CRAFTED[name](later))
    assert resumed(tmp_path, replica) == 0
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"checkpoint {path.name} is skipped: ") and len(line) < 300 and "\n" not in line


@pytest.mark.parametrize("place", [[], [1], [-1, 0], ["a", 0], {}, None, (0, 10**9)], ids=repr)
def test_a_place_that_the_data_does_not_have_costs_none(
    place: object, tmp_path: Path, replica: Replica, later: State, caplog: pytest.LogCaptureFixture
) -> None:
    """A volunteer's files may have become fewer."""
    write_two(tmp_path, replica, inner(position=place)(later))
    assert resumed(tmp_path, replica) == later.step
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("the data, or Python, has changed since the checkpoint")


@pytest.mark.parametrize("name", ["model.safetensors", "outer.safetensors"])
@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.long], ids=str)
def test_vectors_of_another_type(name: str, change: Any, tmp_path: Path, replica: Replica, later: State) -> None:
    path = write_two(tmp_path, replica, later)
    tensors = later.weights if name == "model.safetensors" else later.outer
    save_file({key: change(value) for key, value in tensors.items()}, path / name)
    sign(path)
    assert resumed(tmp_path, replica) == 0


ABOUT: list[dict[str, Any]] = [
    {"round": -1},
    {"step": -1},
    {"round": 1e308},
    {"round": True},
    {"files": []},
    {"files": {"inner.pt": 3}},
    {"eval_loss": "high"},
    {"eval_loss": []},
    {"loss": {}},
    {"loss": 10**400},
    {"measured_on": 7},
]


@pytest.mark.parametrize("about", ABOUT, ids=str)
def test_a_state_json_with_wrong_values(about: dict[str, Any], tmp_path: Path, replica: Replica, later: State) -> None:
    sign(write_two(tmp_path, replica, later), **about)
    assert resumed(tmp_path, replica) == 0


@pytest.mark.parametrize("bytes", ["Infinity", "-1", "1e400", '"many"', "[]", "null", "9" * 4000])
def test_a_size_that_is_none(bytes: str, tmp_path: Path, replica: Replica, later: State) -> None:
    state = write_two(tmp_path, replica, later) / "state.json"
    about = json.loads(state.read_text())
    about["files"]["inner.pt"]["bytes"] = "HERE"
    state.write_text(json.dumps(about).replace('"HERE"', bytes))
    assert resumed(tmp_path, replica) == 0


def test_a_file_of_a_tebibyte_is_not_read(tmp_path: Path, replica: Replica, later: State) -> None:
    path = write_two(tmp_path, replica, later)
    about = json.loads((path / "state.json").read_text())
    os.truncate(path / "model.safetensors", 1 << 40)
    about["files"]["model.safetensors"]["bytes"] = 1 << 40
    (path / "state.json").write_text(json.dumps(about))
    began = time.process_time()  # reading it would take minutes of it
    assert resumed(tmp_path, replica) == 0
    assert time.process_time() - began < 5


def packed(pickled: bytes, how: int = zipfile.ZIP_STORED, called: str = "data.pkl") -> bytes:
    """As torch packs it."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", how) as pack:
        for name, content in {called: pickled, "byteorder": b"little", "version": b"3\n"}.items():
            pack.writestr(f"archive/{name}", content)
    return into.getvalue()


PICKLES = {
    "nothing": b"",
    "no pickle": b"garbage",
    "an empty stack": b"\x80\x02.",
    "an empty stack, tuple": b"\x80\x02\x87.",
    "a memo that is not there": b"\x80\x02h\x09.",
    "an append to a number": b"\x80\x02K\x01K\x02a.",
    "a list": pickle.dumps([1, 2], protocol=2),
    "a number": pickle.dumps(5, protocol=2),
    "an empty table": pickle.dumps({}, protocol=2),
    "deep": b"\x80\x02" + b"(l" * 100_000 + b"a" * 99_999 + b".",
    "a foreign function": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "a storage that is not there": b"\x80\x02(X\x07\x00\x00\x00storageq\x00Q.",
    "a text of 2 GiB": b"\x80\x02X\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("as_it_is", [False, True], ids=["packed", "alone"])
def test_an_inner_file_that_is_no_state(
    name: str, as_it_is: bool, tmp_path: Path, replica: Replica, later: State
) -> None:
    path = write_two(tmp_path, replica, later)
    (path / "inner.pt").write_bytes(PICKLES[name] if as_it_is else packed(PICKLES[name]))
    sign(path)
    assert resumed(tmp_path, replica) == 0


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL"])
def test_a_number_that_becomes_as_many_bytes(name: str, tmp_path: Path, replica: Replica, later: State) -> None:
    """torch finds the pickle by any spelling."""
    path = write_two(tmp_path, replica, later)
    bomb = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + (1 << 46).to_bytes(6, "little") + b"\x85R."
    (path / "inner.pt").write_bytes(packed(bomb, called=name))
    sign(path)
    assert resumed(tmp_path, replica) == 0


def test_numbers_that_are_not_in_the_file(tmp_path: Path, replica: Replica, later: State) -> None:
    """Before 2.10 torch reads on behind what it has in memory (CVE-2026-24747)."""
    path = write_two(tmp_path, replica, later)
    with zipfile.ZipFile(path / "inner.pt") as pack:
        parts = {part.filename: pack.read(part) for part in pack.infolist()}
    with zipfile.ZipFile(path / "inner.pt", "w", zipfile.ZIP_STORED) as pack:
        for name, content in parts.items():
            pack.writestr(name, content[: len(content) // 2] if "/data/" in name else content)
    sign(path)
    assert resumed(tmp_path, replica) == 0


def test_a_file_that_grows_when_it_is_unpacked(tmp_path: Path, replica: Replica, later: State) -> None:
    path = write_two(tmp_path, replica, later)
    bomb = packed(b"\x80\x02" + b"N0" * 10_000_000 + b"N.", zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    (path / "inner.pt").write_bytes(bomb)
    sign(path)
    assert resumed(tmp_path, replica) == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_any_damage_with_right_digests(
    tmp_path_factory: pytest.TempPathFactory, replica: Replica, later: State, rng: random.Random
) -> None:
    """Bytes changed anywhere: another checkpoint is used, or what was changed are numbers that a replica can have."""
    home = tmp_path_factory.mktemp("home")
    path = write_two(home, replica, later)
    victim = path / rng.choice(["inner.pt", "inner.pt", "model.safetensors", "outer.safetensors"])
    content = bytearray(victim.read_bytes())
    for _ in range(rng.choice([1, 3, 30])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    victim.write_bytes(content)
    sign(path)
    assert resumed(home, replica) in (0, later.step)


@pytest.mark.parametrize("name", ["model.safetensors", "outer.safetensors", "inner.pt", "state.json"])
@pytest.mark.parametrize("size", [0, None])
def test_a_fifo_in_the_place_of_a_file(
    name: str, size: int | None, tmp_path: Path, replica: Replica, later: State
) -> None:
    path = write_two(tmp_path, replica, later)
    (path / name).unlink()
    os.mkfifo(path / name)
    if size is not None and name != "state.json":
        about = json.loads((path / "state.json").read_text())
        about["files"][name]["bytes"] = size
        (path / "state.json").write_text(json.dumps(about))
    assert resumed(tmp_path, replica) == 0


def test_where_only_another_models_is_there_that_is_said(tmp_path: Path, replica: Replica, later: State) -> None:
    checkpoint.save(tmp_path, CRAFTED["weights of another name"](later), RUN.run_id, replica.layout)
    with pytest.raises(Incompatible, match="another model"):
        resumed(tmp_path, replica)


def test_a_roll_back_takes_no_crafted_one_either(tmp_path: Path, replica: Replica, later: State) -> None:
    write_two(tmp_path, replica, CRAFTED["a NaN in phi"](later))
    found = CheckpointKeeper(tmp_path, RUN.run_id).last_good(replica.layout, using(RUN, replica))
    assert found and found.step == 0


def test_a_roll_back_takes_none_whose_last_steps_were_skipped(tmp_path: Path, replica: Replica, later: State) -> None:
    write_two(tmp_path, replica, replace(later, inner={**later.inner, "skipped_in_row": 3}))
    keeper, use = CheckpointKeeper(tmp_path, RUN.run_id), using(RUN, replica, require_good)
    assert (keeper.last_good(replica.layout, use) or later).step == 0
    assert (keeper.resume(replica.layout, using(RUN, replica)) or later).step == later.step, "a start goes on with it"
