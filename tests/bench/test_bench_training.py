"""`bench training`: both loops train the same to the bit, and every figure is there."""

import argparse
import json
from collections.abc import Iterator
from statistics import median

import pytest
import torch

from noloco_node.bench import Say, training
from noloco_node.cli import bench as verb
from noloco_node.errors import UsageError
from noloco_node.training.build import build_replica


def quiet(what: str, done: int, total: int) -> None:
    """No progress."""


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.options(parser)
    return parser.parse_args(["training", *words])


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_both_loops_train_the_same(micro_batch: int) -> None:
    run = training.manifest("tiny", 6, 512, 64)
    inner = build_replica(run, training.PEER, device="cpu", threads=1, micro_batch=micro_batch)
    losses, pairs = training.in_turn(inner, run, quiet)
    assert len(losses) == 8 and len(pairs) == 6
    assert all(mine == pytest.approx(other, rel=1e-6) for mine, other in losses)
    assert losses[-1][0] < losses[0][0] - 0.1


def test_both_loops_get_smaller_parts_where_a_gpu_has_no_room_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the plain loop says that its memory is full while it gets more than 2 examples at once."""
    tried = []

    def plain_loop(run: training.Manifest, device: torch.device, micro_batch: int) -> Iterator[float]:
        tried.append(micro_batch)
        if micro_batch > 2:
            raise torch.OutOfMemoryError
        return enough(run, device, micro_batch)

    enough = training._plain_loop
    monkeypatch.setattr(training, "_plain_loop", plain_loop)
    run = training.manifest("tiny", 2, 512, 64)
    inner, losses, _ = training._both(run, "cpu", 1, quiet)
    assert (tried, inner.micro_batch) == ([8, 4, 2], 2)
    assert all(mine == pytest.approx(other, rel=1e-6) for mine, other in losses)


def test_a_step_costs_what_a_plain_loops_does() -> None:
    """Neighbours in time share what else the machine does, and the median of many leaves out where it came between."""
    run = training.manifest("tiny", 40, 512, 64)
    _, pairs = training.in_turn(build_replica(run, training.PEER, device="cpu", threads=1, micro_batch=8), run, quiet)
    overhead = median(mine / other for mine, other in pairs) - 1
    print(f"overhead {overhead:+.1%}, median of {len(pairs)} pairs")  # noqa: T201
    assert overhead < 0.25


def test_the_figures_as_json_and_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def here(run: training.Manifest, device: str, micro_batch: int, say: Say) -> tuple[int, int]:
        """Without processes of their own, which take long to start."""
        ours, plain = (training._peak(run.canonical(), device, micro_batch, ours) for ours in (True, False))
        return ours, plain

    monkeypatch.setattr(training, "_peaks", here)
    words = ("--steps", "2", "--batch-tokens", "256", "--device", "cpu", "--threads", "1")
    assert verb.run(parsed(*words, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["steps"] == 2 and found["micro_batch"] == 2
    assert found["loss_difference"] < 1e-6 and found["mfu"] is None and found["plain_mfu"] is None
    assert found["tokens_per_s"] == pytest.approx(256 / found["step_s"])
    assert found["outer_bytes"] == 35 * found["parameters"] > 12e6
    assert 0 < found["stall_s"] < 10 and 0 < found["evaluate_s"] < 10
    assert verb.run(parsed(*words)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "tiny,",
        "a",
        "a",
        "tokens/s",
        "losses",
        "memory",
    ]


@pytest.mark.parametrize(
    "words",
    [("--model", "huge"), ("--steps", "0"), ("--threads", "-1"), ("--batch-tokens", "1000"), ("--device", "tpu")],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        verb.run(parsed(*words))
