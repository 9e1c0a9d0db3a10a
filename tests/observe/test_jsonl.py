"""JSON lines that outlive the node and do not fill its disk."""

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from noloco_node.base.events import Evaluated, as_json
from noloco_node.observe.jsonl import KEPT, JsonLines, figures
from noloco_node.views.status import Health, StatusView

VIEW = StatusView(peer_id="p", name="n", version="0", state="training", round=7, loss=1.5)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_added_to_what_is_there(tmp_path):
    for round_ in (1, 2):
        events = JsonLines(tmp_path / "run" / "events.jsonl")
        events.write(as_json(Evaluated(round_, 2.5), 0.0))
        events.close()
    assert [(line["event"], line["round"]) for line in read(tmp_path / "run" / "events.jsonl")] == [
        ("Evaluated", 1),
        ("Evaluated", 2),
    ]


def test_full_files_rotate_and_the_oldest_is_removed(tmp_path):
    lines = JsonLines(tmp_path / "events.jsonl", max_bytes=100)
    for number in range(100):
        lines.write({"number": number})
    lines.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    assert all(path.stat().st_size < 100 + 20 for path in files)
    newest_last = [line["number"] for path in (files[2], files[1], files[0]) for line in read(path)]
    assert newest_last == list(range(100 - len(newest_last), 100)), "without a gap"
    assert KEPT == 2


def test_a_file_that_was_full_before_the_start_rotates_too(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("x" * 200 + "\n")
    lines = JsonLines(path, max_bytes=100)
    lines.write({"number": 1})
    assert read(path) == [{"number": 1}]
    lines.close()


def test_a_disk_that_is_full_costs_lines_only(caplog):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    lines = JsonLines(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        lines.write({"number": 1})
        lines.write({"number": 2})
        lines.close()
    assert [record.message for record in caplog.records] == [
        "no lines are written to /dev/full for now: No space left on device"
    ]


def test_a_disk_that_has_room_again_gets_lines_again(tmp_path, caplog):
    """A node runs for months: it should not need a restart for that."""
    lines = JsonLines(tmp_path / "events.jsonl")
    write, free = lines.stream.write, [100, 0, 0, 100, 100]

    def written(text: str) -> int:
        if not free.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(text)

    lines.stream.write = written
    for number in range(5):
        lines.write({"number": number})
    lines.close()
    assert [line["number"] for line in read(tmp_path / "events.jsonl")] == [0, 3, 4]
    assert len(caplog.records) == 1


def test_a_place_where_no_file_can_be_costs_lines_only(tmp_path, caplog):
    (tmp_path / "events.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        for path in (tmp_path / "events.jsonl", Path("/proc/nowhere/events.jsonl")):
            events = JsonLines(path)
            events.write(as_json(Evaluated(1, 2.5), 0.0))
            events.close()
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "Is a directory",
        "No such file or directory",
    ]


def test_a_fifo_in_its_place_costs_lines_only(tmp_path, caplog):
    os.mkfifo(tmp_path / "events.jsonl")
    events = JsonLines(tmp_path / "events.jsonl")
    events.write({"a": 1})
    assert "no lines are written" in caplog.text and "not a regular file" in caplog.text


def test_the_figures_of_a_minute(tmp_path):
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    metrics.write(figures(replace(VIEW, health=(Health("warning", "disk", "free some"),)), at=1.0))
    metrics.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["at"], line["state"], line["round"], line["loss"], line["eval_loss"]) == (
        1.0,
        "training",
        7,
        1.5,
        None,
    )
    assert line["rounds"] == {"committed": 0, "solo": 0, "by_reason": {}}
    assert line["health"] == ["disk"]
