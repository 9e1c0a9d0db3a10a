"""Progress as lines of a log, and as a bar on a terminal."""

import io

import pytest
from rich.console import Console

from noloco_node.terminal.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [False, True], ids=["a file", "a terminal that redraws nothing"])
def test_in_a_log_a_line_for_what_is_new_and_one_every_ten_seconds(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out, force_terminal=terminal), clock) as say:
        for done in range(5):
            say("fp32", done, 20)
            clock.now += 4
        say("bf16 [of 16]", 5, 20, "loss 1.87")
        say("memory", 0, 2)
        clock.now += 3
        say("memory too", 1, 2)
        say("memory too", 2, 2)
    assert out.getvalue().splitlines() == [
        "fp32: 0 of 20 done",
        "fp32: 3 of 20 done, about 1 min 8 s left",
        "bf16 [of 16]: 5 of 20 done, about 1 min left, loss 1.87",
        "memory: 0 of 2 done",
        "memory too: 1 of 2 done, about 3.0 s left",
    ]


def test_on_a_terminal_a_bar_that_goes_and_lines_that_stay():
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out, force_terminal=True, width=100), clock) as say:
        say("lattice:4", 0, 10)
        clock.now += 6
        say("lattice:4", 6, 10, "loss 1.87")
        say.line("lattice:4 has ended")
    shown = out.getvalue()
    assert "6 of 10 done, about 4.0 s left loss 1.87" in shown
    assert "lattice:4 has ended\n" in shown
    assert shown.endswith("\x1b[2K") or shown.rstrip("\x1b[?25h").endswith("\x1b[2K")
