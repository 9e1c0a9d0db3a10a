"""What a node says of its checkpoints: room beforehand, what became of the last one, and from which it went on."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from noloco_node.base import atomic_files
from noloco_node.checkpoints.keeper import CheckpointKeeper
from noloco_node.errors import DiskFull
from noloco_node.terminal.text import print_status
from noloco_node.views.status import StatusView

RUN, LAYOUT = "ab" * 32, bytes(32)
PARAMETERS = 1_000_000


@dataclass
class Replica:
    round: int = 7
    step: int = 70
    weights: dict[str, Tensor] = field(default_factory=lambda: {"a": torch.randn(3)})
    outer: dict[str, Tensor] = field(default_factory=lambda: {"phi": torch.randn(3), "delta": torch.zeros(3)})
    inner: dict[str, Any] = field(default_factory=dict)


def room(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(atomic_files, "free_bytes", lambda _: free)


def test_a_warning_until_two_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = CheckpointKeeper(tmp_path, RUN)
    for free in (None, 40_000_000):
        room(monkeypatch, free)
        assert keeper.health(PARAMETERS) == ()
    assert keeper.room(PARAMETERS) == "a checkpoint takes 20.0 MB, the disk has 40.0 MB left"
    room(monkeypatch, 39_999_999)
    (finding,) = keeper.health(PARAMETERS)
    assert (finding.level, finding.text) == ("warning", "disk: 40.0 MB left, a checkpoint needs 20.0 MB")


def test_an_error_from_one_that_did_not_fit_to_one_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = CheckpointKeeper(tmp_path, RUN)
    room(monkeypatch, 1)
    with pytest.raises(DiskFull):
        keeper.save(Replica(), LAYOUT)
    room(monkeypatch, None)
    (finding,) = keeper.health(PARAMETERS)
    assert finding.level == "error" and finding.text.endswith("and the last one was not written")
    keeper.save(Replica(), LAYOUT)
    assert keeper.health(PARAMETERS) == ()
    assert keeper.view(PARAMETERS).saved_round == 7


def test_status_says_where_it_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CheckpointKeeper(tmp_path, RUN).resume(LAYOUT) is None
    CheckpointKeeper(tmp_path, RUN).save(Replica(), LAYOUT)
    keeper = CheckpointKeeper(tmp_path, RUN)
    assert keeper.last_good(LAYOUT) is not None and keeper.view(PARAMETERS).resumed_round is None
    assert keeper.resume(LAYOUT) is not None
    keeper.save(Replica(round=9, step=90), LAYOUT)
    room(monkeypatch, 3_000_000_000)
    view = StatusView(peer_id="p", name="n", version="0", state="training", checkpoint=keeper.view(PARAMETERS))
    out = io.StringIO()
    print_status(view, Console(file=out, width=200))
    resumed = "resumed from the checkpoint of round 7 · saved at round 9"
    assert f"{resumed} · a checkpoint takes 20.0 MB, 3.0 GB left on the disk\n" in out.getvalue()
