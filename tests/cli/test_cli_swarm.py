"""`swarm`, with pretended nodes: what it shows, what it returns, and that it leaves nothing behind.

Real nodes are in tests/node. Here the processes, sockets and homes are real, the training is not.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE
from ports import quiet_port
from real_nodes import until

from noloco_node.run import toml
from noloco_node.run.schema import Manifest

PROGRAM = Path(__file__).parents[1] / "helpers" / "pretend_swarm.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def swarm(tmp_path):
    """A function that starts a swarm, its temporary files below tmp_path; all of it is gone at the end of the test."""
    scratch = tmp_path / "t"
    scratch.mkdir()
    started = []

    def start(*args, **pretend):
        steered = {key: str(value) for key, value in pretend.items()}
        environ = os.environ | steered | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT), "NOLOCO_BOOTSTRAP": "x"}
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    until(lambda: not _processes(scratch), "no process left")


def _ended(process):
    """Exit code and what it printed."""
    out, err = process.communicate(timeout=60 * PATIENCE)
    return process.returncode, out, err


def _processes(scratch):
    """Those whose command line or environment names our temporary directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(scratch) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _lives(process, tmp_path):
    """Its directory, once the last of its nodes answers."""

    def home():
        words = [word for node in _processes(tmp_path / "t") for word in node.cmdline()]
        return next((Path(word) for word in words if word.endswith("/node-2")), None)

    until(lambda: (found := home()) and (found / "control.sock").exists(), "the nodes")
    return home().parent


def test_a_good_end(swarm):
    code, out, err = _ended(swarm("--nodes", "2", "--rounds", "3"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    label = Manifest(name="tiny", rounds=3).label
    assert lines[0].endswith(f"2 nodes on this machine · run {label} · Ctrl-C stops everything")
    row = re.compile(r"done +3/3 +150 +1\.667 +1\.833 +fair-hippo +1\.2 MB +98% +9\.8k")
    assert sum(row.search(line) is not None for line in lines) == 2
    at, *said = lines[-4:]
    assert re.search(r"^done in .* s: each node met 1 other in 3 rounds \(none of 6 solo\)$", at)
    assert said == [
        "mean loss 5.000 → 1.667, on held-out data 5.500 → 1.833",
        "29.4k tokens trained on, 0.52 bytes sent per parameter and round",
        "nothing is kept: --keep DIR keeps the nodes' homes, with their checkpoints and logs",
    ]


def test_json(swarm, tmp_path):
    (tmp_path / "mine.toml").write_text(toml.template("mine", rounds=2))
    code, out, err = _ended(swarm("--nodes", "2", "--run", "mine.toml", "--json", "--keep", "kept"))
    assert code == 0
    shown = json.loads(out)
    assert (shown["schema"], shown["rounds"]) == (1, 2)
    assert shown["run_id"] == toml.load(tmp_path / "mine.toml").run_id
    assert shown["eval_loss"]["first"] == 5.5
    assert set(shown["eval_loss"]) == {"first", "last", "average_of_weights"}
    assert shown["loss"]["first"] == 5.0
    assert shown["wall_s"] > 0
    assert [node["exit_code"] for node in shown["nodes"]] == [0, 0]
    assert all(node["rounds"]["committed"] for node in shown["nodes"])
    assert "2 nodes on this machine" in err
    assert (tmp_path / "kept/node-2/identity.key").exists()


def test_where_the_disk_is_full_the_report_is_not_lost(swarm, tmp_path):
    process = swarm("--nodes", "2", "--rounds", "3", "--json", "--keep", "kept")
    assert "2 nodes on this machine" in process.stderr.readline(), "the folder was found to be empty"
    (tmp_path / "kept" / "run.toml").symlink_to("/dev/full")
    out, err = process.communicate(timeout=60 * PATIENCE)
    assert process.returncode == 20
    document = json.loads(out)
    assert [node["exit_code"] for node in document["nodes"]] == [0, 0]
    assert document["error"] == {"code": 20, "sentence": err.splitlines()[-1]}
    assert re.search(r"cannot write .*kept/run.toml", err)
    assert not list((tmp_path / "kept").iterdir()), "what was copied would fill the disk"


def test_a_folder_that_holds_something_is_not_written_to(swarm, tmp_path):
    (tmp_path / "kept").mkdir()
    mine = tmp_path / "kept" / "run.toml"
    mine.write_text(toml.template("mine", rounds=2))
    code, out, err = _ended(swarm("--nodes", "2", "--rounds", "2", "--keep", "kept"))
    assert (code, out) == (2, "")
    assert "kept is not empty" in err
    assert mine.read_text() == toml.template("mine", rounds=2)


def test_a_web_page_for_each_node(swarm):
    first = quiet_port(in_a_row=2)
    with socket.create_server(("127.0.0.1", first + 1)):
        code, _, err = _ended(swarm("--nodes", "2", "--web", f"127.0.0.1:{first}"))
        assert code == 5
        assert err.startswith(f"a web page cannot be served at 127.0.0.1:{first + 1} (")
    code, out, err = _ended(swarm("--nodes", "2", "--rounds", "2", "--json", "--web", f"localhost:{first}"))
    assert code == 0, err
    assert [node["web"] for node in json.loads(out)["nodes"]] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    assert f"web pages, one per node: http://127.0.0.1:{first} to http://127.0.0.1:{first + 1}" in err


@pytest.mark.parametrize("address", ["8090", "127.0.0.1:0", "127.0.0.1:65535", "here:80"])
def test_an_address_that_cannot_be(swarm, address):
    code, _, err = _ended(swarm("--nodes", "2", "--web", address))
    assert code == 2
    assert err.startswith("--web must ")


def test_a_run_that_needs_each_nodes_own_files_is_refused_at_once(swarm, tmp_path):
    text = toml.template("mine").replace('source = "stdlib"', 'source = "files"')
    (tmp_path / "mine.toml").write_text(text)
    code, _, err = _ended(swarm("--run", "mine.toml"))
    assert code == 2
    assert "swarm cannot pass --data to its nodes" in err


def test_a_node_that_dies_does_not_stop_the_rest(swarm):
    code, out, err = _ended(swarm("--nodes", "3", "--rounds", "6", PRETEND="die"))
    assert code == 1
    assert re.search(r"failed: disk full: free some space", out)
    assert len(re.findall(r"done +6/6", out)) == 2
    assert re.fullmatch(
        r"\S+ ended with exit code 1: disk full: free some space\. Use --keep DIR to keep the logs\n", err
    )


def test_where_all_of_a_stage_die_the_others_do_not_wait_for_them(swarm):
    code, out, err = _ended(swarm("--nodes", "2", "--stages", "2", "--rounds", "100000", PRETEND="die"))
    assert code == 1
    assert re.search(r"failed: disk full: free some space", out)
    assert "ended with exit code 1: disk full: free some space" in err


def test_nodes_without_a_partner(swarm):
    code, out, err = _ended(swarm("--nodes", "2", "--rounds", "2", "--json", PRETEND="alone"))
    assert code == 1
    assert "found no partner in any round" in err
    document = json.loads(out)
    assert document["error"] == {"code": 1, "sentence": err.splitlines()[-1]}
    assert len(document["nodes"]) == 2


def test_no_rendezvous(swarm):
    code, _, err = _ended(swarm("--nodes", "2", PRETEND="none"))
    assert code == 1
    assert err == "the rendezvous of the local swarm did not start: no network here\n"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(swarm, tmp_path, how):
    process = swarm("--nodes", "2", "--rounds", "1000")
    directory = _lives(process, tmp_path)
    assert len(_processes(tmp_path / "t")) >= 4
    process.send_signal(how)
    process.communicate(timeout=30 * PATIENCE)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    until(lambda: not _processes(tmp_path / "t") and not directory.exists(), "nothing left")


def test_a_node_that_will_not_leave_is_killed(swarm, tmp_path):
    process = swarm("--nodes", "2", "--rounds", "1000", PRETEND="hang")
    directory = _lives(process, tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30 * PATIENCE)
    assert process.returncode == 130
    until(lambda: not directory.exists(), "no file left")
