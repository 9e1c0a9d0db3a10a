"""The display of a local swarm: in 80 columns, in many, on a terminal that is redrawn."""

import io
from dataclasses import dataclass, replace

import pytest
from fake_node import OTHER, STATUS
from rich.console import Console

from noloco_node.terminal.swarm_board import LiveBoard, PlainBoard, SwarmProgress, table_and_notes
from noloco_node.terminal.swarm_report import Outcome
from noloco_node.views.status import Phase, Rounds, StageView, StatusView


@dataclass
class FakeProcess:
    view: StatusView | None = None
    exit_code: int | None = None
    label: str = "node-2"

    def last_output_line(self):
        return "disk full: free some space"


TRAINING = replace(STATUS, round=4, state="training", learning_rate=3e-4, gradient_norm=0.82, left_s=40.0)
JOINING = StatusView(peer_id=OTHER, name="dry-falcon", version="0", state="joining", waiting_for="state, 62%")


def drawn(nodes, width):
    out = Console(file=io.StringIO(), width=width)
    for part in table_and_notes(nodes, 8, width):
        out.print(part)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 200])
def test_everything_is_shown_at_any_width(width):
    nodes = [FakeProcess(TRAINING), FakeProcess(JOINING), FakeProcess(), FakeProcess(TRAINING, exit_code=20)]
    lines = drawn(nodes, width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for word in ("training", "4/8", "1.87", "1.92", "fair-hippo", "node-2", "starting", "exit 20"):
        assert word in text
    assert ("step" in lines[0] and "2063" in lines[1]) == (width == 200), "the first to go, after what nodes wait for"
    if width == 80:
        assert lines[5:] == ["dry-falcon: waiting for state, 62%", "brisk-heron: failed: disk full: free some space"]
    else:
        assert lines[2].rstrip().endswith("state, 62%")
        assert len(lines) == 5


def test_no_waiting_column_if_no_node_waits():
    assert "waiting for" not in drawn([FakeProcess(TRAINING)], 200)[0]


def test_progress():
    progress = SwarmProgress(rounds=8)
    progress.update([FakeProcess(), FakeProcess(JOINING)], 0.0)
    assert (progress.fraction, str(progress)) == (0.0, "0%")
    progress.update([FakeProcess(replace(TRAINING, round=0, phase=Phase(0.5))), FakeProcess(JOINING)], 5.0)
    assert str(progress) == "3%", "half of one round of two times eight"
    progress = SwarmProgress(rounds=8)
    progress.update([FakeProcess(replace(TRAINING, round=2)), FakeProcess(replace(TRAINING, round=2))], 10.0)
    progress.update([FakeProcess(TRAINING), FakeProcess(TRAINING)], 20.0)
    assert str(progress) == "50%   about 20 s left"
    progress.update([FakeProcess(TRAINING, exit_code=0), FakeProcess(TRAINING, exit_code=1)], 30.0)
    assert str(progress) == "100%"


def test_a_terminal_is_redrawn():
    out = Console(file=io.StringIO(), width=80, force_terminal=True)
    with LiveBoard(out, 8) as board:
        board.update([], 0.0)
        board.update([FakeProcess(TRAINING)], 1.0)
    shown = out.file.getvalue()
    assert "starting the rendezvous" in shown
    assert "brisk-heron" in shown
    assert "50%" in shown


def test_a_pipe_has_a_line_for_what_is_new():
    out = Console(file=io.StringIO(), width=200)
    with PlainBoard(out, 8, 100.0) as board:
        board.update([FakeProcess(JOINING)], 101.0)
        board.update([FakeProcess(TRAINING)], 102.0)
        board.update([FakeProcess(TRAINING)], 103.0)
        board.update([FakeProcess(JOINING)], 108.0)
        board.update([FakeProcess(JOINING), FakeProcess(), FakeProcess(JOINING)], 114.0)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == (
        "      2.0 s  brisk-heron round 4 of 8: loss 1.870, lr 3.00e-4, grad norm 0.82, 18.4k tokens/s, 40 s left"
    )
    assert lines[1] == "      8.0 s  50%   1 joining (dry-falcon waits for state, 62%)"
    assert lines[2] == "       14 s  50%   2 joining, 1 starting (2 nodes wait for state, 62%)"


def test_who_holds_a_stage_alone_has_no_partner_and_has_not_failed():
    def failure(*stages):
        alone = [replace(STATUS, rounds=Rounds(0, 2, {}), stage=StageView(number=stage, stages=2)) for stage in stages]
        return Outcome([FakeProcess(view, 0) for view in alone], "", 2, 1.0, None).failure()

    assert failure(1, 2) is None
    assert failure(1, 1, 2) == "brisk-heron found no partner in any round"
