"""What the log says of events."""

import asyncio
import logging
import math
from pathlib import Path

import pytest

from noloco_node.base.events import Evaluated, Event, PeerFaulted, PhaseDone, RoundCommitted, TakenBack, WentSolo
from noloco_node.base.peer_names import name_of
from noloco_node.observe import exporters
from noloco_node.observe.recorder import FAULTS_A_MINUTE, Recorder

PEER = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (WentSolo(3, "backing_off"), logging.INFO, "round 3 solo (waiting to call again): loss -"),
        (
            WentSolo(3, "partner_diverged", PEER),
            logging.INFO,
            f"round 3 solo (partner says diverged, {name_of(PEER)}): loss -",
        ),
        (WentSolo(3, "quarantined"), logging.INFO, "round 3 solo (quarantined by a peer): loss -"),
        (
            TakenBack(38, PEER, 2.314, 1.918),
            logging.WARNING,
            f"the correction of {name_of(PEER)} in round 38 is taken back: eval loss 2.314 with it, 1.918 without",
        ),
        (
            TakenBack(38, PEER, math.inf, 1.918),
            logging.WARNING,
            f"the correction of {name_of(PEER)} in round 38 is taken back: eval loss inf with it, 1.918 without",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_lines(event: Event, level: int, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Recorder(PEER).observe(event)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]


def test_faults_of_strangers_fill_no_files_and_are_all_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder = Recorder(PEER)
    recorder.open(tmp_path, "run", [])
    for _ in range(50 * FAULTS_A_MINUTE):
        recorder.observe(PeerFaulted(PEER, "incompatible"))
    recorder.observe(WentSolo(3, "quarantined"))
    asyncio.run(recorder.close())
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == FAULTS_A_MINUTE + 1 == len(caplog.records) and "WentSolo" in lines[-1]
    assert sum(recorder.stats.faults.values()) == 50 * FAULTS_A_MINUTE


def phase(round: int, loss: float) -> PhaseDone:
    return PhaseDone(round, 50 * round, loss, tokens=1000, seconds=4.0, tokens_total=1000 * round)


class Steps:
    """An exporter that keeps at which steps it was given something."""

    def __init__(self) -> None:
        self.given = list[int]()

    def write(self, _figures: object, step: int) -> None:
        self.given.append(step)

    def close(self) -> None:
        pass


def test_what_comes_before_the_first_phase_is_written_at_the_step_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each resume began the curve of the held-out loss anew, at step 0 with the loss of a trained model."""
    monkeypatch.setattr(exporters, "CLOSE_S", 60.0)  # a busy machine takes its time
    kept, recorder = Steps(), Recorder(PEER)
    recorder._exporters = exporters.Exporters({"kept": lambda: kept})
    recorder.stats.steps_a_round = 50
    recorder.stats.move_to(40, 2000)
    recorder.observe(Evaluated(40, 1.4))
    recorder.stats.move_to(60)
    recorder.observe(Evaluated(60, 1.3))
    recorder.observe(phase(61, 1.2))
    asyncio.run(recorder.close())
    assert kept.given == [2000, 3000, 3050]


def test_a_round_line_has_the_figures_of_its_round(caplog: pytest.LogCaptureFixture) -> None:
    """A swap ends when later phases have ended too; a round that broke is known when the next phase is over."""
    caplog.set_level(logging.INFO)
    recorder = Recorder(PEER)
    for event in (
        phase(1, 3.5),
        phase(2, 2.75),
        RoundCommitted(1, PEER, 3.1, 12_600_000, 12_500_000),
        phase(3, 2.25),
        WentSolo(2, "too_slow", PEER),
        WentSolo(3, "no_partner"),
    ):
        recorder.observe(event)
    assert [line.partition(", lr")[0].split(": ")[1].split(", ")[:2] for line in caplog.messages] == [
        ["step 50", "loss 3.500"],
        ["step 100", "loss 2.750"],
        ["step 150", "loss 2.250"],
    ]
    shown = recorder.curves.view()
    assert [point.loss for point in shown.points] == [3.5, 2.75, 2.25], "what top and the page draw"
