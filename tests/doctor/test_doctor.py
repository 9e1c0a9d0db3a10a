"""`doctor`: the verdicts, with their limits and remedies; and the probes, on this machine."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from ports import quiet_port

from noloco_node.base import atomic_files
from noloco_node.base.addresses import ANY_PORT, Address
from noloco_node.doctor import probes, run_checks, verdicts
from noloco_node.doctor.verdicts import ERROR, OK, UNKNOWN, WARNING, Finding, Place, Torch
from noloco_node.errors import PortInUse, UsageError
from noloco_node.host import config, memory
from noloco_node.host.home import Home
from noloco_node.transport.self_view import ClockSkew
from noloco_node.views.status import Health, StatusView

OPEN_PORT = Address("ip4", "0.0.0.0", 4001)
CPU = Torch("2.13.0", "cpu", None, None, 4, "numba")
PLACE = Place("/home/me/.noloco", exists=True, ours=True, writable=True, mode=0o700, socket_bytes=60)
VIEW = StatusView(peer_id="p", name="brisk-heron", version="0", state="paused", run="tiny-1", round=4)


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (verdicts.device(CPU), OK, "4 CPU threads, swaps encoded by numba"),
        (verdicts.device(replace(CPU, kernels="torch")), WARNING, "install numba"),
        (verdicts.device(Torch("2", "cuda", "H200", 10**9, 1, "triton")), OK, "H200, 1.0 GB free"),
        (verdicts.device(Torch("2", "cuda", "H200", 10**9, 1, "torch")), OK, "encoded by torch"),
        (verdicts.device(replace(CPU, amx=True)), OK, "on cpu with AMX, 4 CPU threads"),
        (verdicts.disk(10**8, "/x"), ERROR, "100 MB free in /x"),
        (verdicts.disk(5 * 10**9, "/x"), WARNING, "free some"),
        (verdicts.disk(10**11, "/x"), OK, "100 GB"),
        (verdicts.disk(None, "/x"), UNKNOWN, "/x"),
        (
            verdicts.device(Torch("2", "cuda", "A", 1, 1, "numba", 10**9, 2 * 10**9)),
            OK,
            "1.0G parameters, 2.0G with --mom",
        ),
        (verdicts.device(Torch("2", "cpu", None, None, 1, "numba", 10**8)), OK, "numba, memory for 100M parameters"),
        (verdicts.memory(10**8), ERROR, "end other programs"),
        (verdicts.memory(2 * 10**9), WARNING, "2.0 GB free"),
        (verdicts.memory(10**10), OK, "10.0 GB free"),
        (verdicts.clock(None), UNKNOWN, "--bootstrap"),
        (verdicts.clock(ClockSkew(0.2, 1)), OK, "within 1.0 s"),
        (verdicts.clock(ClockSkew(-3.0, 1)), WARNING, "timedatectl"),
        (verdicts.clock(ClockSkew(100.0, 2)), ERROR, "1 min 40 s ahead"),
        (verdicts.clock(ClockSkew(100.0, 1)), WARNING, "one of the two is wrong"),
        (verdicts.port(ANY_PORT, None, False), OK, "any free one"),
        (verdicts.port(OPEN_PORT, None, False), OK, "/ip4/0.0.0.0/tcp/4001 is free"),
        (verdicts.port(OPEN_PORT, PortInUse("the port is in use: see --listen"), False), ERROR, "--listen"),
        (verdicts.port(OPEN_PORT, None, True), OK, "held by the node"),
        (verdicts.descriptors(100), ERROR, "ulimit"),
        (verdicts.descriptors(512), WARNING, "512"),
        (verdicts.descriptors(4096), OK, "4096"),
        (verdicts.reachable("directly", True), OK, "directly"),
        (verdicts.reachable("mapped", True), OK, "router"),
        (verdicts.reachable("relayed", True), WARNING, "--announce"),
        (verdicts.reachable("outgoing", True), WARNING, "nobody can call"),
        (verdicts.reachable(None, True), UNKNOWN, "not known"),
        (verdicts.reachable(None, False), UNKNOWN, "--bootstrap"),
        (verdicts.bootstrap([], None, None), UNKNOWN, "--bootstrap"),
        (verdicts.bootstrap(["a"], "it refuses", None), ERROR, "ask the run's author"),
        (verdicts.bootstrap(["a"], None, []), WARNING, "knows no run"),
        (verdicts.bootstrap(["a"], None, ["tiny-1", "big-2"]), OK, "tiny-1, big-2"),
        (verdicts.home(PLACE), OK, "/home/me/.noloco"),
        (verdicts.home(replace(PLACE, exists=False)), OK, "will be created"),
        (verdicts.home(replace(PLACE, mode=0o755)), WARNING, "or if others use it too, as /tmp, name one of its own"),
        (verdicts.home(replace(PLACE, mode=0o755, root="/home/me/my node")), WARNING, "`chmod 700 '/home/me/my node'`"),
        (verdicts.home(replace(PLACE, ours=False)), WARNING, "another user"),
        (verdicts.home(replace(PLACE, writable=False)), ERROR, "cannot be written"),
        (verdicts.home(replace(PLACE, socket_bytes=200)), ERROR, "too long"),
    ],
)
def test_verdicts(finding, level, says):
    assert finding.level == level
    assert says in f"{finding.text}: {finding.remedy}"
    assert bool(finding.remedy) == (level in (WARNING, ERROR)), "what is wrong has a remedy"


def test_a_node_says_what_is_wrong_with_it():
    assert [f.level for f in verdicts.node(None, None)] == [OK]
    assert [f.level for f in verdicts.node(None, "it is just starting")] == [ERROR]
    (paused,) = verdicts.node(VIEW, None)
    assert (paused.level, paused.text) == (OK, "brisk-heron is paused in tiny-1, round 4")
    ill = replace(VIEW, health=(Health("error", "network: degraded", "it is being started again"),))
    assert [f.level for f in verdicts.node(ill, None)] == [OK, ERROR]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ([], 0),
        (["disk"], 1),
        (["clock"], 11),
        (["bootstrap"], 10),
        (["clock", "bootstrap"], 10),
        (["clock", "disk"], 11),
        (["port"], 5),
        (["disk", "port"], 5),
        (["port", "clock"], 11),
    ],
)
def test_exit_codes(wrong, code):
    findings = [Finding(subject, ERROR, "x") for subject in wrong]
    assert verdicts.exit_code([Finding("port", WARNING, "x"), *findings]) == code


def test_probes_of_this_machine(tmp_path):
    assert memory.free_bytes() is None or memory.free_bytes() > 0
    assert atomic_files.free_bytes(tmp_path / "not" / "there") > 0
    assert atomic_files.free_bytes(Path("/proc/x")) is None, "no disk, and so no full one"
    assert probes.descriptors() > 0


async def test_a_card_that_another_program_fills_is_one_finding(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(probes, "torch", fails)
    monkeypatch.setattr("noloco_node.doctor.gpu_probes.look", fails)
    settings = config.resolve({"home": str(tmp_path)}, {}, {})
    found = [finding async for finding in run_checks.examine(settings)]
    assert [f.remedy for f in found if f.level == ERROR] == [
        "end other programs that use the GPU, or train with --device cpu"
    ]
    assert found[0].subject == "memory", "what takes no import of torch comes first"
    assert not any("\n" in finding.text for finding in found)
    assert found[-1].subject == "clock", "the other checks were made"


def test_a_port_in_use_is_found():
    port = quiet_port()
    with socket.create_server(("127.0.0.1", port)):
        found = verdicts.port(OPEN_PORT, probes.port(Address("ip4", "127.0.0.1", port)), False)
    assert "in use" in found.text and verdicts.exit_code([found]) == PortInUse.exit_code
    assert probes.port(Address("ip4", "127.0.0.1", port)) is None


def test_a_port_that_is_refused_ends_a_start_and_doctor_alike():
    """As one below 1024, for most users; this address lacks its interface."""
    refused = probes.port(Address("ip6", "fe80::1", 4001))
    found = verdicts.port(OPEN_PORT, refused, False)
    assert found.text.startswith("the port 4001 on fe80::1 is refused (")
    assert found.remedy == "choose another one with --listen"
    assert verdicts.exit_code([found]) == refused.exit_code == UsageError.exit_code


def test_a_home_is_checked_and_not_created(tmp_path):
    home = Home(tmp_path / "a" / "home")
    place = probes.place(home)
    assert (place.exists, place.writable, place.ours) == (False, True, True)
    assert not (tmp_path / "a").exists()
    place = probes.place(home.create())
    assert (place.exists, place.mode, place.socket_bytes) == (True, 0o700, len(os.fsencode(home.socket)))


def test_a_file_in_the_way_is_no_home(tmp_path):
    (tmp_path / "file").write_text("x")
    place = probes.place(Home(tmp_path / "file"))
    assert (place.exists, place.writable) == (False, False)
    assert verdicts.home(place).level == ERROR
