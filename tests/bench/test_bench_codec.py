"""`bench codec`: every row is there and makes sense; replicas that hardly train stand in for the real pairs."""

import argparse
import json
from typing import Any

import pytest
import torch

from noloco_node.bench import codec as bench
from noloco_node.bench import cost, replica_pairs
from noloco_node.cli import bench as verb
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK
from noloco_node.errors import UsageError


@pytest.fixture(scope="module")
def met() -> list[replica_pairs.PairMeeting]:
    return replica_pairs.meetings(lambda *at: None, plan=(1, 1, 2), steps=2)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.options(parser)
    return parser.parse_args(["codec", *words])


def test_replicas_meet_as_planned_and_come_closer(met: list[replica_pairs.PairMeeting]) -> None:
    assert [m.apart_rounds for m in met] == [1, 1, 2]
    for m in met:
        assert len(m.one.moved) == -(-len(m.one.u) // BLOCK)
        assert 0 < (m.other.u - m.one.u).norm() < m.one.u.norm()


def test_a_vector_is_made_longer_of_fragments_all_alike(met: list[replica_pairs.PairMeeting]) -> None:
    side = met[0].one
    whole = len(side.u) // BLOCK * BLOCK
    fragments = side.repeated((2 << 20) + 1).fragments()
    assert [len(f.u) for f in fragments] == [1 << 20, 1 << 20, BLOCK]
    assert torch.equal(fragments[0].u, fragments[1].u) and torch.equal(fragments[0].moved, fragments[1].moved)
    assert torch.equal(fragments[0].u[whole : 2 * whole], side.u[:whole])
    assert torch.equal(fragments[0].moved[whole // BLOCK : 2 * whole // BLOCK], side.moved[: whole // BLOCK])


def test_rows_as_json(
    met: list[replica_pairs.PairMeeting], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replica_pairs, "meetings", lambda say, *plan: met)
    assert verb.run(parsed("--params", "300000", "--device", "cpu", "--codecs", "bf16,lattice:4", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    rows = {(row["codec"], row["apart_rounds"]): row for row in document["rows"]}
    assert set(rows) == {("bf16", 1), ("bf16", 2), ("lattice", 1), ("lattice", 2)}
    for row in rows.values():
        assert row["device"] == "cpu"
        assert min(row["encode_gb_s"], row["decode_gb_s"], row["copy_gb_s"]) > 0
        assert row["peak_extra_bytes"] is None or row["peak_extra_bytes"] < 64 << 20
    assert rows["bf16", 1]["bytes_per_param"] == 2
    lattice = rows["lattice", 1]
    assert lattice["bits"] == 4
    assert 0.5 < lattice["bytes_per_param"] < 0.8 and 0 < lattice["relative_error"] < 0.6


def test_quick_trains_little_and_measures_fewer_elements(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(parsed("--quick", "--device", "cpu", "--codecs", "bf16,lattice:4", "--json")) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["quick"], document["params"]) == (True, 10_000_000)
    assert {row["apart_rounds"] for row in document["rows"]} == {1, 5}
    assert "training two replicas apart: 0 of 14 done" in err
    assert "lattice:4 on cpu: 1 of 2 done, about " in err


def test_the_rows_before_an_interrupt_are_printed(
    met: list[replica_pairs.PairMeeting], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replica_pairs, "meetings", lambda say, *plan: met)
    measure, measured = cost.speed, []

    def speed(name: str, *of: Any) -> cost.Speed:
        if measured:
            raise KeyboardInterrupt
        measured.append(name)
        return measure(name, *of)

    monkeypatch.setattr(cost, "speed", speed)
    with pytest.raises(KeyboardInterrupt):
        verb.run(parsed("--params", "300000", "--device", "cpu", "--codecs", "fp32,bf16", "--json"))
    assert {row["codec"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"fp32"}


def test_rows_as_a_table(
    met: list[replica_pairs.PairMeeting], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replica_pairs, "meetings", lambda say, *plan: met)
    verb.run(parsed("--params", "300000", "--device", "cpu", "--codecs", "fp32"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("codec") and lines[1].startswith("fp32")


@pytest.mark.parametrize(
    "words", [("--params", "0"), ("--device", "tpu"), ("--codecs", "bf16,morse"), ("--codecs", "lattice:9")]
)
def test_what_cannot_be_measured_is_said_before_anything_runs(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        verb.run(parsed(*words))


def test_every_codec_named_exists() -> None:
    assert {codec(name).name for name in bench.CODECS} == set(bench.CODECS) == set(bench.BITS)


def test_speed_of_a_vector_shorter_than_a_fragment(met: list[replica_pairs.PairMeeting]) -> None:
    speed = cost.speed("lattice:4", "cpu", met[0].one, met[0].other)
    assert min(speed.encode, speed.decode, speed.copy) > 0
