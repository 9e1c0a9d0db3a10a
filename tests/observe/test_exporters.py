"""Curves for TensorBoard and Weights & Biases: the real libraries, and that nothing of theirs reaches the node."""

import importlib.util
import threading
import time
import warnings

import pytest

from noloco_node.base.events import (
    Evaluated,
    PeerFaulted,
    PhaseDone,
    RolledBack,
    RoundCommitted,
    Sampled,
    TakenBack,
    WentSolo,
)
from noloco_node.errors import UsageError
from noloco_node.observe import exporters

EVENTS = [
    (PhaseDone(1, 50, 3.5, 1000, 2.0, stall_ms=7.0, tokens_total=9000, learning_rate=3e-3, gradient_norm=1.5), 50),
    (WentSolo(1, "no_peers"), 50),
    (PhaseDone(2, 100, 2.5, tokens=1000, seconds=2.0), 100),
    (Evaluated(2, 2.75), 100),
    (Sampled(2, "the", " cat\n  # and"), 100),
    (PeerFaulted("12D3KooW", "bad_digest"), 100),
    (RoundCommitted(2, "12D3KooW", 0.5, 4096, 2048), 100),
]
"""Each with the step at the last boundary."""


class Kept:
    def __init__(self):
        self.written, self.closed = [], False

    def write(self, figures, step):
        self.written.append((step, figures))

    def close(self):
        self.closed = True


class Broken(Kept):
    def write(self, figures, step):
        raise RuntimeError("no more")


class Stuck(Kept):
    def __init__(self):
        super().__init__()
        self.freed = threading.Event()

    def write(self, figures, step):
        self.freed.wait()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A busy machine takes its time, the first import of a library above all."""
    monkeypatch.setattr(exporters, "CLOSE_S", 60.0)


def closed_after(events, **openers):
    written = exporters.Exporters(openers)
    for event, step in events:
        written.write(event, step)
    written.close()


def test_what_was_undone_is_a_mark_on_the_curves():
    figures = exporters.Figures()
    assert figures.of(RolledBack(3, 2, "nan")) == {"train/rolled_back": 1.0}
    assert figures.of(TakenBack(3, "12D3KooW", 9.0, 2.0)) == {"train/taken_back": 1.0}


def test_each_figure_at_its_step():
    kept = Kept()
    closed_after(EVENTS, kept=lambda: kept)
    assert kept.closed
    assert [step for step, _ in kept.written] == [50, 50, 100, 100, 100, 100]
    assert kept.written[0][1] == {
        "train/loss": 3.5,
        "train/learning_rate": 3e-3,
        "train/gradient_norm": 1.5,
        "train/tokens": 9000,
        "train/stall_ms": 7.0,
        "train/tokens_per_s": 500.0,
        "round": 1,
    }
    assert kept.written[3:] == [
        (100, {"eval/loss": 2.75}),
        (100, {"sample": "the cat\n  # and"}),
        (
            100,
            {
                "rounds/committed": 1,
                "swap/seconds": 0.5,
                "swap/sent_bytes": 4096,
                "swap/received_bytes": 2048,
                "swap/resent_blocks": 0.0,
                "swap/relative_error": 0.0,
            },
        ),
    ]


def test_one_that_fails_is_given_up_and_the_other_goes_on(caplog):
    def missing():
        raise ImportError("libsomething.so")

    kept = Kept()
    closed_after(EVENTS, broken=Broken, missing=missing, kept=lambda: kept)
    assert len(kept.written) == 6
    assert [record.getMessage() for record in caplog.records] == [
        "missing is given up: ImportError: libsomething.so",
        "broken is given up: RuntimeError: no more",
    ]


@pytest.mark.parametrize("times", [1, 1000])
def test_one_that_hangs_holds_nobody_up(monkeypatch, times):
    """Whether the end finds room in its queue or not."""
    monkeypatch.setattr(exporters, "CLOSE_S", 0.2)
    stuck = Stuck()
    try:
        closed_after(EVENTS * times, stuck=lambda: stuck)
        assert not stuck.closed, "it still hangs"
    finally:
        stuck.freed.set()


def test_none_at_all_starts_no_thread():
    before = set(threading.enumerate())  # that of the test before may still be ending
    closed_after(EVENTS)
    assert set(threading.enumerate()) <= before


def test_a_package_that_is_missing_is_named_before_anything_begins(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb_of_nobody").mkdir()
    for name in ("wandb_of_nobody", "nowhere_to_be_found"):
        with pytest.raises(UsageError, match=rf"-m pip install {name}"):
            exporters.check([name])
    exporters.check([])


def test_tensorboard_reads_what_was_written(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings(action="ignore"):  # not ours
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        closed_after(EVENTS, **exporters.chosen(["tensorboard"], tmp_path, "tiny-3f9a", "brisk-heron"))
        assert not caplog.records
        board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/loss")] == [(50, 3.5), (100, 2.5)]
    assert [(point.step, point.value) for point in board.Scalars("eval/loss")] == [(100, 2.75)]
    assert [(point.step, point.value) for point in board.Scalars("rounds/solo")] == [(50, 1.0)]
    (text,) = board.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (100, [b"    the cat\n      # and"])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb: pip install '.[wandb]'")
def test_weights_and_biases_writes_a_folder_to_upload(tmp_path, caplog):
    with warnings.catch_warnings(action="ignore"):  # not ours
        closed_after(EVENTS, **exporters.chosen(["wandb"], tmp_path, "tiny-3f9a", "brisk-heron"))
    assert not caplog.records
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while written.stat().st_size <= 500:  # by a process of the library's, which may finish a little after we close
        assert time.monotonic() < deadline, "nothing but a header was written"
