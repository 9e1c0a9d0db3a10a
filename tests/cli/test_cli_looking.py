"""The verbs that show something: `peers`, `ping`, `wait`, `logs`, `paths`, `bugreport`; with a node and without."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_node import OTHER, PEERS, STATUS
from ports import quiet_port
from pretend_terminal import PretendTerminal

from noloco_node.base.addresses import parse
from noloco_node.base.peer_names import short_id
from noloco_node.cli import logs, main
from noloco_node.cli.control import Goal
from noloco_node.cli.options import print_json
from noloco_node.cli.peers import _print_changes, rate
from noloco_node.control import socket_client
from noloco_node.errors import EXIT_INTERRUPTED, UsageError
from noloco_node.run import invitation
from noloco_node.run.invitation import Invitation
from noloco_node.terminal.filter import PeerFilter
from noloco_node.views.peers import PeersView

ROOT = Path(__file__).parents[2]
OTHERS_NAME = "fair-hippo"
pytestmark = pytest.mark.usefixtures("home")


def shown(capsys):
    return json.loads(capsys.readouterr().out)


@contextmanager
def begin(program: list[str], **environ: str) -> Iterator[subprocess.Popen]:
    """A process that ends with its test, whatever the result."""
    with subprocess.Popen(
        [sys.executable, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# ---- peers ----
def test_peers_are_sorted_and_narrowed_down(running, capsys):
    assert main(["peers", "--sort", "loss", "--state", "training", "--name", "otter", "--json"]) == 0
    view = shown(capsys)
    assert (view["schema"], [peer["name"] for peer in view["peers"]]) == (1, ["calm-otter"])
    assert main(["peers", "--name", short_id(OTHER), "--json"]) == 0
    assert [peer["peer_id"] for peer in shown(capsys)["peers"]] == [OTHER]
    assert main(["peers", "--state", "paused"]) == 0
    assert capsys.readouterr().out == "none of 1 peer matches\n"
    assert main(["peers", "--state", "foo"]) == 2
    assert "--state must be starting, joining, training, solo, paused, leaving, finished or gone, not 'foo'" in (
        capsys.readouterr().err
    )
    assert main(["peers", "--sort", "looss"]) == 2
    assert "did you mean loss?" in capsys.readouterr().err


def test_peers_watched_through_a_pipe_until_ctrl_c(running):
    for words, first in ((), "calm-otter training, round 40, loss 1.900"), (("--json",), '"schema": 1'):
        with begin(["-m", "noloco_node", "peers", "--watch", *words]) as watching:
            assert first in watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == EXIT_INTERRUPTED
            assert watching.stderr.read() == ""
            *_, last = ["", *watching.stdout]
            ended = {"schema": 1, "error": {"code": 130, "sentence": "interrupted by Ctrl-C or SIGTERM"}}
            assert (json.loads(last) == ended) if words else ("interrupted" not in last)


def test_peers_watched_on_a_terminal_that_redraws_nothing(running):
    with PretendTerminal("peers", "--watch", "--home", os.environ["NOLOCO_HOME"], environ={"TERM": "dumb"}) as terminal:
        terminal.until(lambda seen: "calm-otter training, round 40" in seen, "a line")
        terminal.type("\x03")
        assert terminal.ended() == EXIT_INTERRUPTED


async def test_a_watcher_is_told_when_a_quarantine_begins_and_ends(monkeypatch, capsys):
    monkeypatch.setattr("noloco_node.cli.peers._WATCH_S", 0)
    (usual,) = PEERS.peers
    banned = replace(usual, quarantined_s=90.0, quarantined_why="taken_back")
    seen = iter([usual, usual, banned, replace(banned, quarantined_s=88.0), usual])

    async def get_peers():
        return PeersView((next(seen),))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await _print_changes(get_peers, PeerFilter(), as_json=False)
    lines = [line.partition("loss 1.900")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{words} (12D3KooW…33Jw)" for words in ("", ", quarantined for 1 min 30 s, taken back", "")]


def test_watching_ends_with_the_node(running):
    with begin(["-m", "noloco_node", "peers", "--watch"]) as watching:
        assert "calm-otter" in watching.stdout.readline()
        running.kill()
        running.wait(60)
        assert watching.wait(60) == 3
        assert "no node is running" in watching.stderr.read()


@pytest.mark.parametrize("verb", ["peers", "ping x", "doctor --json"])
def test_a_swarm_that_cannot_be_reached(verb, capsys):
    assert main([*verb.split(), "--bootstrap", f"/ip4/127.0.0.1/tcp/{quiet_port()}/p2p/{OTHER}"]) == 10
    assert "refuses the connection" in "".join(capsys.readouterr())


@pytest.mark.parametrize("verb", ["peers", "ping x", "doctor --json"])
def test_the_swarm_of_an_invitation(verb, capsys):
    port = quiet_port()
    there = parse(f"/ip4/127.0.0.1/tcp/{port}/p2p/{OTHER}")
    word = invitation.write(Invitation((there,), 32 * "ab", OTHER))
    assert main([*verb.split(), "--bootstrap", word]) == 10
    assert f"127.0.0.1:{port} refuses the connection" in "".join(capsys.readouterr()).replace("/tcp/", ":")
    assert main([*verb.split(), "--bootstrap", word[:-1]]) == 2
    assert "the invitation is damaged" in capsys.readouterr().err


def test_an_invalid_address(capsys):
    assert main(["peers", "--bootstrap", "example.org"]) == 2
    assert "--bootstrap must be a list of" in (said := capsys.readouterr().err) or "/ip4/" in said


# ---- ping ----
def test_ping_shows_time_route_and_rate(running, capsys):
    assert main(["ping", OTHER, "--count", "2", "--json"]) == 0
    view = shown(capsys)
    assert (view["schema"], view["peer_id"], view["name"], view["via"]) == (1, OTHER, OTHERS_NAME, "direct")
    assert (view["ms"], view["median_ms"], view["lost"]) == ([2.0, 2.0], 2.0, 0)
    assert view["bytes_per_s"] == pytest.approx(1e6)
    for part in (short_id(OTHER), OTHER[:14], OTHER[-6:]):
        assert main(["ping", part, "--count", "1", "--json"]) == 0
        assert shown(capsys)["peer_id"] == OTHER
    assert main(["ping", OTHERS_NAME, "--count", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{OTHERS_NAME} (12D3KooW…33Jw) answers after 2.0 ms, direct"
    assert lines[1] == "1: 2.0 ms"
    assert lines[2] == "1 of 1 answered, median 2.0 ms (2.0 ms to 2.0 ms), about 1.0 MB/s there"


@pytest.mark.parametrize(
    ("word", "code", "says"),
    [
        ("fair-hipo", 6, "did you mean fair-hippo?"),
        ("brisk-heron", 2, "is the node on this machine"),
        (short_id(STATUS.peer_id), 2, "is the node on this machine"),
        ("12D3KooWGRVwVSREWSbDM8oTn6QGPdtZKEUVDj5jSzbnYeXiGzVf", 6, "does not answer (unavailable)"),
        ("fair-hippo --count 0", 2, "--count must be a whole number from 1 to 1000, not '0'"),
    ],
)
def test_pings_that_fail(word, code, says, running, capsys):
    assert main(["ping", *word.split()]) == code
    assert says in capsys.readouterr().err


def test_a_rate_is_what_the_payload_took_beyond_an_empty_call():
    assert rate(1000, 1.1, 0.1) == pytest.approx(1000)
    assert rate(1000, 0.1, 0.2) == pytest.approx(20_000), "noise makes no rate infinite"


# ---- wait ----
@pytest.mark.parametrize(
    ("goal", "changes", "reached"),
    [
        ("training", {}, True),
        ("training", {"state": "paused"}, False),
        ("round=41", {}, True),
        ("round=42", {}, False),
        ("finished", {}, False),
        ("finished", {"state": "finished"}, True),
        ("finished", {"state": "leaving"}, False),
        ("finished", {"state": "leaving", "rounds_target": 41}, True),
    ],
)
def test_goals(goal, changes, reached):
    assert Goal.parse(goal).reached(replace(STATUS, **changes)) is reached


@pytest.mark.parametrize(
    ("goal", "changes", "why"),
    [
        ("training", {"state": "rendezvous"}, "does not train"),
        ("training", {"state": "finished"}, "has finished"),
        ("round=101", {}, "never reaches round 101"),
        ("round=100", {}, None),
        ("round=100", {"rounds_target": None}, None),
        ("finished", {"state": "finished"}, None),
    ],
)
def test_goals_that_will_not_be_reached(goal, changes, why):
    sentence = Goal.parse(goal).why_never(replace(STATUS, **changes))
    assert sentence is None if why is None else why in sentence


@pytest.mark.parametrize("goal", ["", "round", "round=", "round=-1", "round=x", "paused"])
def test_invalid_goals(goal):
    with pytest.raises(UsageError, match="--for must be"):
        Goal.parse(goal)


def test_wait_for_a_node_that_starts_later(home, capsys, monkeypatch):
    pretended = str(Path(__file__).parents[1] / "helpers" / "pretend_node.py")
    words = [pretended, "start", "run.toml", "--home", str(home.root), "--rounds", "2"]
    monkeypatch.setattr("noloco_node.cli.control.COMES_S", 90.0)  # a busy machine takes its time to start it
    with begin(words, PRETEND_STEP_S="0.4") as node:
        assert main(["wait", "--for", "round=2", "--timeout", "90"]) == 0
        assert "waiting for round 2: " in capsys.readouterr().err
        assert main(["wait", "--for", "finished", "--timeout", "90", "--json"]) == 0
        view = shown(capsys)
        assert (view["schema"], view["state"], view["round"]) == (1, "finished", 2)
        assert main(["status", "--json"]) == 0
        assert shown(capsys) == view
        assert main(["wait", "--for", "training"]) == 1
        assert "has finished, at round 2" in capsys.readouterr().err
        node.terminate()


def test_wait_ends_at_its_timeout_and_with_its_node(running, capsys, monkeypatch):
    monkeypatch.setattr("noloco_node.cli.control.ANSWER_S", 60.0)
    assert main(["wait", "--for", "round=42", "--timeout", "0.1", "--json"]) == 6
    said = capsys.readouterr()
    assert "round 42 was not reached within 0.1 s (brisk-heron is training at round 41)" in said.err
    assert json.loads(said.out) == {"schema": 1, "error": {"code": 6, "sentence": said.err.splitlines()[-1]}}
    with begin(["-m", "noloco_node", "wait", "--for", "round=42"]) as waiting:
        assert waiting.stderr.readline() == "waiting for round 42: brisk-heron is training at round 41\n"
        running.kill()
        running.wait(60)
        assert waiting.wait(60) == 1
        assert "brisk-heron ended before round 42 was reached" in waiting.stderr.read()


def test_wait_says_at_once_what_no_waiting_will_change(home, capsys, monkeypatch):
    def refused(_):
        raise UsageError("the node belongs to another user: ask as that user")

    monkeypatch.setattr(socket_client, "_require_listener", refused)
    assert main(["wait", "--for", "training", "--timeout", "60"]) == 2
    assert "another user" in capsys.readouterr().err


def test_wait_takes_no_longer_than_its_timeout_beside_a_node_that_does_not_answer(running, capsys, monkeypatch):
    monkeypatch.setattr("noloco_node.cli.control.ANSWER_S", 0.3)
    running.send_signal(signal.SIGSTOP)
    took_s = []
    for _ in range(3):  # a machine that stands still does so for one of them
        began = time.monotonic()
        assert main(["wait", "--for", "training", "--timeout", "0.2"]) == 6
        took_s.append(time.monotonic() - began)
    assert "(no node answered)" in capsys.readouterr().err
    assert min(took_s) < 4


def test_wait_with_a_timeout_and_no_node(capsys):
    assert main(["wait", "--for", "training", "--timeout", "0.2"]) == 3
    assert main(["wait", "--for", "training", "--timeout", "soon"]) == 2


# ---- logs ----
def test_the_last_lines(home, capsys):
    assert main(["logs"]) == 1
    assert "no node has run there yet" in capsys.readouterr().err
    home.create()
    Path(f"{home.log}.1").write_text("".join(f"old {number}\n" for number in range(9)))
    home.log.write_text("".join(f"new {number}\n" for number in range(3)))
    assert main(["logs", "--lines", "2"]) == 0
    assert capsys.readouterr().out == "new 1\nnew 2\n"
    assert main(["logs", "--lines", "4", "--json"]) == 0
    view = shown(capsys)
    assert (view["schema"], view["lines"]) == (1, ["old 8", "new 0", "new 1", "new 2"])
    assert main(["logs", "-f", "--json"]) == 2


def test_the_end_of_a_long_log(home):
    home.create()
    home.log.write_text("".join(f"line {number} {'x' * 90}\n" for number in range(5000)))
    with home.log.open("rb") as file:
        found = logs.last_lines(file, home.log, 3000)
        assert file.read() == b""
    assert len(found) == 3000
    assert found[0].startswith("line 2000 ")


def test_following_a_log_over_its_rotation(home):
    home.create()
    home.log.write_text("before\n")
    with begin(["-m", "noloco_node", "logs", "-f", "--lines", "1"]) as following:
        assert following.stdout.readline() == "before\n"
        with home.log.open("a") as log:
            log.write("added\n")
        assert following.stdout.readline() == "added\n"
        with home.log.open("a") as log:
            log.write("the last of the old one\n")
        home.log.rename(f"{home.log}.1")
        home.log.write_text("the first of the new one\n")
        assert following.stdout.readline() == "the last of the old one\n"
        assert following.stdout.readline() == "the first of the new one\n"
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == EXIT_INTERRUPTED


def test_the_level_of_a_running_node(running, capsys):
    assert main(["logs", "--level", "debug"]) == 0
    assert capsys.readouterr().out == "brisk-heron logs at debug until it ends: `noloco-node logs -f` shows it\n"
    assert main(["logs", "--level", "info", "--json"]) == 0
    assert shown(capsys) == {"schema": 1, "level": "info"}
    assert main(["logs", "--level", "loud"]) == 2
    assert "--level must be debug, info, warning or error" in capsys.readouterr().err


# ---- paths, bugreport ----
def test_paths(home, capsys):
    (home.create().run("ab" * 32) / "checkpoints" / "10").mkdir(parents=True)
    (home.run("ab" * 32) / "checkpoints" / "10" / "model.safetensors").write_bytes(bytes(1000))
    (home.run("ab" * 32) / "events.jsonl").write_bytes(bytes(10))
    (home.run("ab" * 32) / "events.jsonl.1").write_bytes(bytes(100))
    assert main(["paths", "--json"]) == 0
    view = shown(capsys)
    sizes = {row["what"]: row["bytes"] for row in view["paths"]}
    assert view["schema"] == 1
    assert (sizes["home"], sizes["checkpoints"], sizes["events.jsonl"], sizes["identity"]) == (1110, 1000, 110, None)
    assert main(["paths"]) == 0
    assert f"run {'ab' * 32}" in (text := capsys.readouterr().out)
    assert str(home.log) in text


def test_a_bug_report_of_a_running_node(running, home, tmp_path, capsys):
    home.log.write_text("12:00 hello\n")
    assert main(["bugreport", "--to", "report.zip", "--json"]) == 0
    assert shown(capsys)["file"] == str(tmp_path / "report.zip")
    with zipfile.ZipFile("report.zip") as pack:
        of_the_node = {"status.json", "peers.json", "rounds.log", "node.log"}
        assert set(pack.namelist()) == of_the_node | {"versions.txt", "doctor.json"}
        assert "Tick()" in pack.read("rounds.log").decode()
        status = json.loads(pack.read("status.json"))
        findings = json.loads(pack.read("doctor.json"))["findings"]
        assert str(tmp_path) not in pack.read("doctor.json").decode()
    assert (status["name"], status["addresses"]) == (
        "brisk-heron",
        [STATUS.addresses[0].replace("203.0.113.7", "<ip-1>")],
    )
    assert {"torch", "disk", "node", "bootstrap"} <= {finding["subject"] for finding in findings}
    assert main(["bugreport", "--to", "report.zip"]) == 2


def test_a_bug_report_without_a_node(home, capsys):
    assert main(["bugreport", "--to", "report.zip"]) == 0
    with zipfile.ZipFile("report.zip") as pack:
        assert "no node is running in <home>" in pack.read("status.txt").decode()


def test_a_number_that_json_lacks_is_null_in_what_any_verb_shows(capsys):
    """As the loss of a model that has diverged, by `eval`."""
    print_json({"eval_loss": float("nan"), "rows": [{"perplexity": float("inf")}]})
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail)["rows"] == [{"perplexity": None}]


# ---- how quick ----
@pytest.mark.parametrize("verb", ["status", "peers"])
def test_showing_the_node_here_is_quick(verb, running):
    """Processor time, and the best of ten, so that a busy machine does not decide."""

    def spent_s():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        with begin(["-m", "noloco_node", verb]) as looking:
            assert looking.wait(60) == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{verb}: {spent:.2f} s of CPU, {time.monotonic() - began:.2f} s by the clock")  # noqa: T201
        return spent

    assert any(spent_s() < 0.5 for _ in range(10))
