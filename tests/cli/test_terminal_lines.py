"""A terminal that takes nothing for a while, and the order of what is said."""

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from noloco_node.cli import log_setup, terminal_lines
from noloco_node.cli.terminal_lines import MAX_WAITING, TerminalLines, report
from noloco_node.host.home import Home

LOG = logging.getLogger("noloco_node.x")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A stream that takes 64 KiB, and its other end."""
    monkeypatch.setattr(terminal_lines, "PATIENCE_S", 0.1)
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    yield stream, read
    os.close(read)
    for thread in threading.enumerate():
        if thread.name == "terminal":
            thread.join(10)
    with suppress(BrokenPipeError):
        stream.close()


def test_a_terminal_that_takes_nothing_holds_up_neither_a_node_nor_its_end(
    tmp_path: Path,
    stopped: tuple[TextIO, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = Home(tmp_path).create()
    monkeypatch.setattr(sys, "stdout", stopped[0])
    with log_setup.written(home, "info", "text"):
        for _ in range(2 * MAX_WAITING):
            report("x" * 1000)
        LOG.info("a round")
    assert "a round" in home.log.read_text()
    sys.stdout.flush()  # as a program does at its end
    sys.stderr.write("the last sentence")
    assert sys.stdout is not stopped[0] and capsys.readouterr().err == "the last sentence"
    sys.stdout.close()


def test_in_a_process_that_is_somebody_elses_the_streams_stay(
    tmp_path: Path, stopped: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stopped[0])
    with log_setup.written(Home(tmp_path).create(), "info", "text", whole=False):
        report("x" * 100_000)
    assert sys.stdout is stopped[0]


def test_a_terminal_that_reads_again_has_the_first_lines(stopped: tuple[TextIO, int]) -> None:
    stream, read = stopped
    lines = TerminalLines()
    for number in range(2 * MAX_WAITING):
        lines.say(stream, f"{number:0999}")
    found = b""
    while found.count(b"\n") < MAX_WAITING:
        found += os.read(read, 1 << 20)
    assert [int(line) for line in found.splitlines()[:MAX_WAITING]] == list(range(MAX_WAITING))
    lines.close(whole=False)


def test_what_is_reported_and_what_is_logged_come_in_their_order_and_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with log_setup.written(Home(tmp_path).create(), "info", "text"):
        for number in range(0, 100, 2):
            report(f"{number}")
            LOG.info("%d", number + 1)
    report("100")
    assert [int(line.split()[-1]) for line in terminal.getvalue().splitlines()] == list(range(101))
