"""`top` in a pseudo-terminal, with a fake node: what it shows, what keys do, and that the terminal is restored."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_node
import psutil
import pytest
from pretend_terminal import PROGRAM, PretendTerminal

from noloco_node.cli import main
from noloco_node.host.home import Home
from noloco_node.views.documents import document

ROOT = Path(__file__).parents[2]


class PretendHome:
    """A home in which a fake node runs, dies and runs again."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.node: subprocess.Popen[str] | None = None

    def live(self) -> None:
        self.node = fake_node.begun(self.home.root)

    def die(self) -> None:
        if self.node:
            self.node.kill()
            self.node.wait(60)
            assert self.node.stdout is not None
            self.node.stdout.close()
            self.node = None

    def state(self, capsys: pytest.CaptureFixture[str]) -> str:
        assert main(["status", "--json", "--home", str(self.home.root)]) == 0
        return json.loads(capsys.readouterr().out)["state"]

    def top(self, *words: str, **terminal: object) -> PretendTerminal:
        return PretendTerminal("top", "--home", str(self.home.root), *words, **terminal)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendHome]:
    made = PretendHome(tmp_path_factory.mktemp("top") / "home")
    yield made
    made.die()


@pytest.fixture
def home(house: PretendHome) -> PretendHome:
    """Shared, with a running fake node."""
    if house.node is None or house.node.poll() is not None:
        house.die()
        house.live()
    return house


def test_keys_and_sizes(home: PretendHome, capsys: pytest.CaptureFixture[str]) -> None:
    with home.top() as terminal:
        terminal.until(lambda seen: "● training" in seen and "q quit" in seen, "the screen")
        assert terminal.screen.cursor.hidden
        terminal.type("?")
        terminal.until(lambda seen: "explain keys and marks" in seen, "the help")
        terminal.type("?")
        terminal.type("p")
        terminal.until(lambda seen: "brisk-heron is paused" in seen, "the answer, for some seconds")
        terminal.until(lambda seen: "○ paused" in seen, "paused")
        assert home.state(capsys) == "paused"
        terminal.type("r")
        terminal.until(lambda seen: "● training" in seen, "training again")
        assert home.state(capsys) == "training"

        terminal.resize(120, 30)
        seen = terminal.until(lambda seen: "q quit" in seen.splitlines()[-1], "all thirty rows")
        assert len(seen.splitlines()) == 30
        terminal.resize(40, 10)
        terminal.until(lambda seen: "q quit" in seen.splitlines()[-1] and "● training" in seen, "a small one")

        terminal.type("l")
        terminal.until(lambda seen: "leave the run" in seen, "the question")
        terminal.type("n")
        terminal.until(lambda seen: "leave the run" not in seen, "it is taken back")
        assert home.state(capsys) == "training"
        terminal.type("q")
        assert terminal.ended() == 0
        assert terminal.is_restored()


def test_to_quit_leaves_a_paused_node_paused(home: PretendHome, capsys: pytest.CaptureFixture[str]) -> None:
    with home.top() as terminal:
        terminal.until(lambda seen: "q quit" in seen, "the screen")
        terminal.type("p")
        terminal.until(lambda seen: "○ paused" in seen, "paused")
        terminal.type("q")
        assert terminal.ended() == 0
    assert home.state(capsys) == "paused"
    assert main(["resume", "--home", str(home.home.root)]) == 0


@pytest.mark.slow
def test_a_key_while_the_node_does_not_answer_says_so(home: PretendHome) -> None:
    # 6 s: the poller gives up after five, and closes the connection that the key's command waits on
    with home.top("--interval", "0.2") as terminal:
        terminal.until(lambda seen: "● training" in seen, "the screen")
        assert home.node is not None
        os.kill(home.node.pid, signal.SIGSTOP)
        try:
            terminal.type("p")
            terminal.until(lambda seen: "does not answer" in seen, "why nothing happens")
            assert terminal.process.poll() is None, "it goes on"
        finally:
            os.kill(home.node.pid, signal.SIGCONT)
        terminal.type("q")
        assert terminal.ended() == 0


def test_leave_ends_the_node_and_says_so(home: PretendHome) -> None:
    with home.top() as terminal:
        terminal.until(lambda seen: "q quit" in seen, "the screen")
        terminal.type("l")
        terminal.until(lambda seen: "leave the run" in seen, "the question")
        terminal.type("y")
        assert terminal.ended() == 0
        assert "brisk-heron has left; its state is kept in" in terminal.bytes.decode()
        assert terminal.is_restored()
    assert home.node.wait(60) == 0


def test_a_node_that_dies_and_comes_back(home: PretendHome) -> None:
    with home.top("--interval", "0.2") as terminal:
        terminal.until(lambda seen: "● training" in seen, "the screen")
        home.die()
        seen = terminal.until(lambda seen: "no node runs here any more" in seen, "it is missed")
        assert "calm-otter" in seen, "the last picture stays"
        terminal.type("p")
        terminal.until(lambda seen: "there is no node to do this" in seen, "the answer to a key without a node")
        home.live()
        terminal.until(lambda seen: "● training" in seen and "no node runs" not in seen, "it is back")
        terminal.type("\x03")
        assert terminal.ended() == 0, "Ctrl-C"
        assert terminal.is_restored()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_the_terminal_as_it_was(home: PretendHome, number: int, code: int) -> None:
    with home.top() as terminal:
        terminal.until(lambda seen: "q quit" in seen, "the screen")
        os.kill(terminal.process.pid, number)
        assert terminal.ended() == code
        assert terminal.is_restored()


def test_a_window_that_is_closed_ends_it(home: PretendHome) -> None:
    home.home.log.unlink(missing_ok=True)
    terminal = home.top("--interval", "0.2")
    try:
        terminal.until(lambda seen: "q quit" in seen, "the screen")
        terminal.hang_up()
        assert terminal.process.wait(60) == 129
        assert not home.home.log.exists(), "nothing failed"
    finally:
        terminal.close()


def test_a_fault_leaves_the_terminal_as_it_was(home: PretendHome, tmp_path: Path) -> None:
    """Something breaks while it draws."""
    fault = "import noloco_node.terminal.top.app as s; s.screen = None; from noloco_node.cli import main; main()"
    (tmp_path / "fault.py").write_text(f"import sys; sys.argv[0] = 'noloco-node'; {fault}")
    with home.top(program=(sys.executable, str(tmp_path / "fault.py"))) as terminal:
        terminal.ended()
        assert terminal.is_restored()
        assert "failed unexpectedly (TypeError)" in terminal.bytes.decode()


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_ctrl_z_restores_the_screen_until_fg(home: PretendHome) -> None:
    with home.top() as terminal:
        terminal.until(lambda seen: "q quit" in seen, "the screen")
        os.kill(terminal.process.pid, signal.SIGTSTP)
        terminal.until(lambda _: stopped(terminal.process.pid), "that it stops: sooner it cannot be told to go on")
        terminal.until(lambda _: terminal.is_restored(), "the shell's screen")
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.until(lambda seen: "q quit" in seen and not terminal.is_restored(), "its own again")
        terminal.type("q")
        assert terminal.ended() == 0


def test_without_colour(home: PretendHome) -> None:
    with home.top(environ={"NO_COLOR": "1"}) as terminal:
        terminal.until(lambda seen: "● training" in seen and "q quit" in seen, "the screen")
        styles = {cell.fg for row in terminal.screen.buffer.values() for cell in row.values()}
        assert styles == {"default"}
        terminal.type("q")
        assert terminal.ended() == 0


def test_a_terminal_that_cannot_place_lines_gets_them_one_by_one(home: PretendHome) -> None:
    with home.top(environ={"TERM": "dumb"}) as terminal:
        terminal.until(lambda seen: "brisk-heron training, round 41 of 100" in seen, "a line")
        terminal.type("\x03")
        assert terminal.ended() == 0
        assert b"\x1b" not in terminal.bytes


def test_in_a_pipe(home: PretendHome) -> None:
    words = [*PROGRAM, "top", "--home", str(home.home.root), "--interval", "0.2"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as process:
        first = process.stdout.readline()
        assert first.split("  ", 1)[1].startswith("brisk-heron training, round 41 of 100: step 2063, loss 1.870")
        assert "! disk" in process.stdout.readline()
        home.die()
        after = process.stdout.readline()
        if "just starting or ending" in after:  # asked between the end of its socket and that of its lock
            after = process.stdout.readline()
        assert "no node runs here any more" in after
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_in_a_pipe_it_ends_with_a_node_whose_work_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script waited there for ever."""
    monkeypatch.setenv("DONE", "1")
    done = PretendHome(tmp_path / "home")
    done.live()
    words = [*PROGRAM, "top", "--home", str(done.home.root), "--interval", "0.2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}) as top:
        assert "round 41 of 41" in top.stdout.readline()
        done.die()
        assert top.wait(60) == 0
        assert top.stdout.read().endswith("the work is done and the node has ended\n")


def test_once(home: PretendHome, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    assert main(["top", "--once", "--home", str(home.home.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 30
    assert max(map(len, lines)) <= 100
    assert "brisk-heron  ● training  round 41 of 100" in lines[0]
    assert not any(line.endswith(" ") for line in lines)


def test_once_for_programs(home: PretendHome, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--home", str(home.home.root)]) == 0
    told = json.loads(capsys.readouterr().out)
    views = (document(view) for view in (fake_node.STATUS, fake_node.PEERS, fake_node.HISTORY))
    status, peers, history = ({name: value for name, value in view.items() if name != "schema"} for view in views)
    assert told == {"schema": 1, "status": status, **peers, "history": history}
    assert main(["top", "--json", "--home", str(home.home.root)]) == 2
    assert "--json needs --once" in capsys.readouterr().err


def test_no_node_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--once"], ["--once", "--json"], []):
        assert main(["top", "--home", str(tmp_path), *words]) == 3
        assert "join <invitation>" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "nan", "soon", "-1", "1e9"])
def test_an_interval_that_makes_no_sense(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", interval]) == 2
    assert "--interval must be a number of seconds from 0.2 to 3600" in capsys.readouterr().err
