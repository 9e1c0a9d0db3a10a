"""Ctrl-C and SIGTERM at any moment of a verb: it ends at once, as documented, without a traceback, and nothing is left.

The clock begins when the program catches SIGTERM, its first line but for Python's own start.
"""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE
from real_nodes import RealNodes, until
from replicas import small_replica, small_run

from noloco_node.base.identity import Identity
from noloco_node.checkpoints import checkpoint
from noloco_node.host.home import Home
from noloco_node.run import manifest, signed_file

PEER = "12D3KooWGRVwVSREWSbDM8oTn6QGPdtZKEUVDj5jSzbnYeXiGzVf"
AT_ONCE_S, NODE_S = 5.0 * PATIENCE, 15.0 * PATIENCE
"""By the clock of a machine that may be busy, or stand still for 3 s; a node takes up to 10 s to leave."""
NODES = ("start", "bootstrap", "join")
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RealNodes]:
    with RealNodes() as nodes:
        (nodes.root / "text.txt").write_text("".join(f"some words, line {number}\n" for number in range(200_000)))
        trained(Home(nodes.root / "trained").create())
        yield nodes


def trained(home: Home) -> None:
    """A home with a checkpoint."""
    run, replica = small_run(), small_replica()
    signed_file.keep(home.run(run.run_id), manifest.sign(run, Identity.load_or_create(home.identity)))
    checkpoint.save(home.run(run.run_id) / "checkpoints", replica.state(), run.run_id, replica.layout)


@pytest.fixture(scope="module")
def deaf() -> Iterator[str]:
    """The address of a node that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}/p2p/{PEER}"


def words_of(verb: str, nodes: RealNodes, deaf: str) -> list[str]:
    home = ["--home", str(nodes.root / "home")]
    had = ["--home", str(nodes.root / "trained")]
    return {
        "start": ["start", str(nodes.manifest()), *home, *LOOPBACK],
        "bootstrap": ["bootstrap", *home, *LOOPBACK],
        "join": ["join", "--bootstrap", deaf, *home, *LOOPBACK],
        "check": ["check", str(nodes.manifest()), *home],
        "peers": ["peers", "--bootstrap", deaf, *home],
        "doctor": ["doctor", "--bootstrap", deaf, *home],
        "swarm": ["swarm", "--nodes", "2"],
        "simulate": ["simulate", "--replicas", "2"],
        "export": ["export", "--to", str(nodes.root / "model"), *had],
        "tokenize": ["tokenize", str(nodes.root / "text.txt"), "--out", str(nodes.root / "x.tokens"), "--force"],
        "wait": ["wait", "--for", "training", "--timeout", "60", *home],
        "id": ["id", *home],
    }[verb]


def catches_sigterm(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # it has ended
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) & 1 << (signal.SIGTERM - 1))


def interrupted(nodes: RealNodes, words: list[str], number: signal.Signals, after_s: float) -> tuple[int, float, str]:
    """Exit code, seconds from the signal to the end, output."""
    process = subprocess.Popen(
        [*nodes.program, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=nodes.environ,
        cwd=nodes.root,
        start_new_session=True,
    )
    with process:
        until(lambda: catches_sigterm(process.pid), "the program's first line", 60)
        time.sleep(after_s)
        process.send_signal(number)
        sent = time.monotonic()
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, time.monotonic() - sent, said


def ends_well(nodes: RealNodes, deaf: str, verb: str, number: signal.Signals, after_s: float) -> None:
    words = words_of(verb, nodes, deaf)
    code, took_s, said = interrupted(nodes, words, number, after_s)
    print(f"{verb} {number.name} after {after_s:g} s: exit {code} in {took_s:.2f} s")  # noqa: T201
    finished = {"peers": 10, "doctor": 10, "join": 10}.get(verb, 0)  # of itself: just before the signal came
    assert code in {130, finished, 0 if verb in NODES else 130}, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert took_s < (NODE_S if verb in NODES else AT_ONCE_S), said
    until(lambda: not nodes.left_over(), lambda: f"nothing left: {nodes.left_over()}", 60)


VERBS = ("start", "bootstrap", "join", "check", "peers", "doctor", "swarm", "simulate", "export", "tokenize", "wait")


@pytest.mark.parametrize(
    ("verb", "number", "after_s"),
    [
        ("id", signal.SIGINT, 0.0),
        ("export", signal.SIGINT, 0.05),
        ("simulate", signal.SIGTERM, 0.5),
        ("swarm", signal.SIGINT, 2.0),
        ("start", signal.SIGINT, 0.05),
        ("start", signal.SIGTERM, 1.0),
        ("start", signal.SIGINT, 3.0),
        ("join", signal.SIGINT, 2.0),
    ],
)
def test_a_signal_ends_a_verb(nodes: RealNodes, deaf: str, verb: str, number: signal.Signals, after_s: float) -> None:
    ends_well(nodes, deaf, verb, number, after_s)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_at_any_moment(nodes: RealNodes, deaf: str, verb: str, number: signal.Signals) -> None:
    for after_s in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        ends_well(nodes, deaf, verb, number, after_s)


def test_the_second_one_ends_it_whatever_it_does(nodes: RealNodes) -> None:
    """A verb that is slow to tidy up."""
    code = (
        "import time, noloco_node.__main__ as program, noloco_node.cli.parser as parser\n"
        "def verb(_):\n"
        "    try:\n"
        "        print('works', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('tidies up', flush=True)\n"
        "        time.sleep(60)\n"
        "parser.parse = lambda _: (verb, None)\n"
        "program.program()\n"
    )
    with subprocess.Popen(
        [nodes.program[0], "-c", code], stdout=subprocess.PIPE, text=True, env=nodes.environ
    ) as process:
        for line in ("works\n", "tidies up\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(15 * PATIENCE) == 130


@pytest.mark.parametrize(
    "dies", ["Thing.__del__ = struck", "kept = weakref.ref(thing, struck)"], ids=["a destructor", "a weak reference"]
)
def test_one_that_python_loses_is_heard(nodes: RealNodes, dies: str) -> None:
    code = (
        "import os, signal, weakref, noloco_node.__main__ as program, noloco_node.cli.parser as parser\n"
        "class Thing: pass\n"
        "def struck(_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def verb(_):\n"
        "    thing = Thing()\n"
        f"    {dies}\n"
        "    del thing\n"
        "    return 0\n"
        "parser.parse = lambda _: (verb, None)\n"
        "program.program()\n"
    )
    done = subprocess.run([nodes.program[0], "-c", code], capture_output=True, env=nodes.environ, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_what_is_ignored_stays_ignored(nodes: RealNodes) -> None:
    """As in a background job of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = "import noloco_node.__main__, signal; print(signal.getsignal(signal.SIGINT))"
        done = subprocess.run(
            [nodes.program[0], "-c", code], capture_output=True, text=True, env=nodes.environ, check=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(done.stdout) == signal.SIG_IGN
