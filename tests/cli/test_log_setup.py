"""What a node's log leaves out."""

import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from noloco_node.cli import log_setup
from noloco_node.host.home import Home
from noloco_node.observe.log_tail import LogTail


def test_a_caller_that_was_killed_leaves_no_traceback_of_grpc_in_the_log(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    with log_setup.written(home, "info", "text"):
        for text in ("ExecuteBatchError raised in core by servicer method [/x/Swap]", "something else"):
            logging.getLogger("grpc._cython.cygrpc").error(text)
    assert "something else" in home.log.read_text()
    assert "ExecuteBatchError" not in home.log.read_text()


def test_a_full_disk_costs_the_log_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path)
    home.create()
    home.log.symlink_to("/dev/full")
    with log_setup.written(home, "info", "text"):
        logging.getLogger("noloco_node").info("a round")
    said = capsys.readouterr().err
    assert "a round" in said and "Traceback" not in said


def test_in_a_process_that_is_somebody_elses_its_own_records_go_where_they_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loop, which has its own logging: nothing of it is lost, and nothing of ours comes twice."""
    home, root, ours = Home(tmp_path).create(), logging.getLogger(), logging.getLogger("noloco_node")
    before = root.level, list(root.handlers), warnings.showwarning
    ours.setLevel("ERROR")
    with log_setup.written(home, "info", "text", whole=False):
        assert (root.level, list(root.handlers), warnings.showwarning) == before
        logging.getLogger("noloco_node.x").info("a round")
        logging.getLogger("asyncio").error("a task of the node")
        logging.getLogger("mine").error("a word of the loop")
    assert [record.getMessage() for record in caplog.records] == ["a task of the node", "a word of the loop"]
    assert "a round" in capsys.readouterr().err
    written = home.log.read_text()
    assert "a round" in written and "a task of the node" in written and "a word of the loop" not in written
    assert ours.level == logging.ERROR
    ours.setLevel(logging.NOTSET)
    logging.getLogger("noloco_node.x").warning("afterwards")
    assert caplog.records[-1].getMessage() == "afterwards"


def test_of_two_nodes_in_a_process_each_has_its_own_lines_and_either_may_end_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, log = logging.getLogger("noloco_node"), logging.getLogger("noloco_node.x")
    homes, tails = (Home(tmp_path / "one").create(), Home(tmp_path / "two").create()), (LogTail(), LogTail())
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        lives = []
        for home, tail, thread in zip(homes, tails, (first, second), strict=True):
            life = ExitStack()
            thread.submit(life.enter_context, log_setup.written(home, "info", "text", whole=False)).result()
            thread.submit(life.enter_context, tail.attached()).result()
            lives.append(life)
        first.submit(log.info, "a round of the first").result()
        second.submit(log.info, "a round of the second").result()
        first.submit(lives[0].close).result()
        second.submit(log.info, "a round alone").result()
        second.submit(lives[1].close).result()
    said = ["a round of the first"], ["a round of the second", "a round alone"]
    assert [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()] == [*said[0], *said[1]]
    assert tuple([line.text for line in tail.last()] for tail in tails) == said
    for home, lines in zip(homes, said, strict=True):
        assert [line.rpartition(": ")[2] for line in home.log.read_text().splitlines()] == lines
    assert (ours.level, ours.propagate, ours.handlers) == (logging.NOTSET, True, [])


def test_a_path_that_is_no_text_costs_no_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path).create()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's could not send such a line to another process
    with log_setup.written(home, "info", "text"):
        logging.getLogger("noloco_node").info("its checkpoints: /h/\udcff")
    assert "its checkpoints: /h/\\udcff" in home.log.read_text()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--home", "{}"], ["--home={}"]])
def test_a_crash_is_noted_in_the_home_that_was_named(words: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    said = log_setup.note_crash(ValueError("odd"), ["status", *(word.format(home) for word in words)])
    assert str(home) in said and "ValueError: odd" in Home(home).log.read_text()
