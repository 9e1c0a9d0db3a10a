"""Each verb from the outside: its text, its JSON, its exit code."""

import hashlib
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fake_node import OTHER, SAVED, STATUS
from ports import quiet_port
from reached import reached

from noloco_node.base.addresses import parse
from noloco_node.base.identity import Identity
from noloco_node.cli import control, main
from noloco_node.errors import Diverged, SwarmUnreachable
from noloco_node.host import remembered
from noloco_node.host.home import Home
from noloco_node.run import amendment, invitation, manifest, signed_file, toml
from noloco_node.run.amendment import Amendment
from noloco_node.run.invitation import Invitation
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest

pytestmark = pytest.mark.usefixtures("home")


# ---- init, id ----
def test_init_writes_a_run_that_loads(tmp_path, capsys):
    assert main(["init"]) == 0
    assert capsys.readouterr().out == "wrote run.toml: edit it, then run `noloco-node start run.toml`\n"
    assert toml.load(tmp_path / "run.toml").name == "tiny"


def test_init_does_not_overwrite_unasked(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("precious")
    assert main(["init", "mine.toml"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "mine.toml").read_text() == "precious"
    assert main(["init", "mine.toml", "--force"]) == 0
    assert toml.load(tmp_path / "mine.toml").name == "mine"


@pytest.mark.parametrize(
    ("file", "name"), [("My Run_2.toml", "my-run-2"), ("\u4e16.toml", "tiny"), (40 * "a", 32 * "a")]
)
def test_init_names_the_run_after_the_file(file, name, tmp_path, capsys):
    assert main(["init", file]) == 0
    advised = capsys.readouterr().out.split("`")[1]
    assert shlex.split(advised) == ["noloco-node", "start", file], "as a shell takes it"
    assert toml.load(tmp_path / file).name == name


def test_init_into_a_directory(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert main(["init", "runs"]) == 0
    assert (tmp_path / "runs" / "run.toml").exists()
    assert main(["init", "nowhere/run.toml"]) == 2
    assert capsys.readouterr().err == "there is no folder nowhere: make it first, or name another file\n"


def test_init_of_a_name_that_is_too_long(capsys):
    assert main(["init", 300 * "a"]) == 2
    assert capsys.readouterr().err == f"cannot write {300 * 'a'}: File name too long. Name another file\n"


def test_init_where_the_disk_is_full(tmp_path, capsys):
    (tmp_path / "full.toml").symlink_to("/dev/full")
    assert main(["init", "full.toml", "--force"]) == 20
    assert capsys.readouterr().err == (
        "the disk is full: cannot write full.toml. Free some space, or name another file\n"
    )


def test_init_that_was_cut_off_is_not_in_the_way_of_the_next_one(tmp_path):
    """The limit on a file's size stands for a full disk, which has room for the name."""
    init = f"{sys.executable} -m noloco_node init"
    done = subprocess.run(f"ulimit -f 0; {init}; {init}", shell=True, capture_output=True, check=False)
    assert done.stderr.decode() == 2 * "cannot write run.toml: File too large. Name another file\n"
    assert not list(tmp_path.iterdir())


def test_id_stays_the_same(home, capsys):
    assert main(["id", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == 1
    assert shown["peer_id"] == Identity.load_or_create(home.identity).peer_id
    assert shown["home"] == str(home.root)
    assert main(["id"]) == 0
    assert shown["peer_id"] in (text := capsys.readouterr().out)
    assert shown["name"] in text


def test_a_path_is_shown_without_dots(tmp_path, capsys):
    (tmp_path / "here").mkdir()
    assert main(["id", "--home", "here/../there", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["home"] == str(tmp_path.resolve() / "there")


# ---- status, peers, leave ----
def test_status_and_peers(running, capsys):
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["peer_id"], shown["round"]) == (1, STATUS.peer_id, 41)
    assert main(["peers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peers"][0]["peer_id"] == OTHER
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("brisk-heron (12D3KooW…e2Xo) in tiny-3f9a2c81d0e4")
    assert main(["peers"]) == 0
    assert "calm-otter" in capsys.readouterr().out


def test_leave_waits_until_the_node_is_gone(running, home, capsys):
    assert main(["leave"]) == 0
    assert running.wait(60) == 0
    assert home.holder() is None
    assert capsys.readouterr().out == f"brisk-heron has left; its state is kept in {home.root}\n"


@pytest.fixture
def trained(monkeypatch, request):
    """A node that has rounds to save."""
    monkeypatch.setenv("TRAINED", "yes")
    return request.getfixturevalue("running")


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((41,), "its state is kept in"),
        ((40,), "round 41 is not saved, the last that is saved is round 40: see"),
        ((), "round 41 is not saved, and no earlier one is: see"),
    ],
)
def test_leave_says_what_a_node_could_not_save(saved, said, home, capsys):
    """As on a full disk. By the checkpoints there are, since a node that has ended answers no more."""
    for round in saved:
        reached(home.run(STATUS.run_id) / "checkpoints", round)
    assert main(["leave"]) == (0 if 41 in saved else 1)
    assert said in "".join(capsys.readouterr())


@pytest.fixture
def saving(monkeypatch, request):
    """A node that must write a checkpoint before it ends, which takes longer than leaving may: until it has said so."""
    monkeypatch.setenv("SAVES", "yes")
    monkeypatch.setattr(control, "_LEAVE_S", 0.3)
    awaited = control._awaited

    async def then_saved(home):
        found = await awaited(home)
        monkeypatch.setattr(control, "_LEAVE_S", 60.0)
        (home.root / SAVED).touch()
        return found

    monkeypatch.setattr(control, "_awaited", then_saved)
    return request.getfixturevalue("running")


def test_leave_waits_while_the_node_reports_that_it_saves(saving, capsys):
    assert main(["leave"]) == 0
    assert saving.wait(60) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "brisk-heron is leaving, and waits for its last checkpoint"
    assert last.startswith("brisk-heron has left")


def test_pause_and_resume_print_the_new_state(running, capsys):
    assert main(["pause"]) == 0
    assert capsys.readouterr().out == "brisk-heron is paused: `noloco-node resume` continues\n"
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "paused"
    assert main(["resume"]) == 0
    assert capsys.readouterr().out == "brisk-heron is training\n"


@pytest.mark.parametrize(
    "verb", ["status", "peers", "ping x", "logs --level debug", "wait --for training", "leave", "pause", "resume"]
)
def test_no_node_runs(verb, capsys):
    assert main(verb.split()) == 3
    assert "join <invitation>" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "top --once", "leave"])
def test_no_node_runs_in_a_home_that_knows_a_run(verb, home, tmp_path, monkeypatch, capsys):
    remembered.keep(home.create(), {}, "ab" * 32, "cd" * 32)
    assert main(verb.split()) == 3
    assert "start one with `noloco-node join`, or name" in capsys.readouterr().err
    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path / "another"))
    assert main([*verb.split(), "--home", str(home.root)]) == 3
    assert f"start one with `noloco-node join --home {home.root}`, or name" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "leave", "logs", "runs", "id", "wait --for training", "doctor"])
def test_a_home_whose_name_is_too_long_for_any_file(verb, capsys):
    assert main([*verb.split(), "--home", "/tmp/" + 5000 * "x"]) == 2
    assert "too long" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "leave", "logs", "runs", "id", "wait --for training", "paths"])
def test_a_home_that_is_a_file(verb, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*verb.split(), "--home", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'file'} is no directory: name another home with --home or NOLOCO_HOME\n"
    )


def test_a_home_by_flag(running, home, monkeypatch, capsys):
    monkeypatch.setenv("NOLOCO_HOME", "/nowhere")
    assert main(["status"]) == 3
    assert main(["status", "--home", str(home.root)]) == 0


# ---- start, join, bootstrap ----
@pytest.fixture
def node(monkeypatch):
    """Replaces node/main.py, and records its arguments."""
    module = ModuleType("noloco_node.node.main")
    module.calls, module.result = [], 0

    async def run(config, kind, signed, report):
        module.calls.append((config, kind, signed, Home(config.home).holder()))
        report("others join with: …")
        if isinstance(module.result, Exception):
            raise module.result
        return module.result

    module.train = lambda config, signed, report, _again, _seen: run(config, "trains", signed, report)
    module.rendezvous = lambda config, report: run(config, "rendezvous", None, report)
    monkeypatch.setitem(sys.modules, "noloco_node.node.main", module)
    monkeypatch.setattr("noloco_node.node.main", module, raising=False)
    return module


@pytest.fixture
def address():
    """An address at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}/p2p/{OTHER}"


def free_address():
    return f"/ip4/127.0.0.1/tcp/{quiet_port()}/p2p/{OTHER}"


def test_start_signs_the_manifest(node, home, capsys):
    assert main(["init"]) == 0
    capsys.readouterr()
    assert main(["start", "run.toml", "--threads", "2", "--rounds", "3", "--linger", "30"]) == 0
    [(config, kind, signed, holder)] = node.calls
    assert kind == "trains"
    assert manifest.verify(signed) == toml.load(Path("run.toml"))
    assert signed.author == Identity.load_or_create(home.identity).peer_id
    assert (config.threads, config.rounds, config.linger, config.home) == (2, 3, 30.0, home.root)
    assert holder is not None
    assert home.holder() is None
    assert capsys.readouterr().out == "others join with: …\n"


def test_a_finished_run_started_again_says_so_at_once(node, home, capsys):
    assert main(["init"]) == 0
    run = toml.load(Path("run.toml"))
    reached(home.run(run.run_id) / "checkpoints", 199)
    assert main(["start", "run.toml"]) == 0
    assert len(node.calls) == 1, "one round is left"
    capsys.readouterr()
    reached(home.run(run.run_id) / "checkpoints", 200)
    done = subprocess.run(
        [*(sys.executable, "-X", "importtime", "-m", "noloco_node"), *("start", "run.toml", "--home", str(home.root))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    assert f"{run.label} is over: 200 rounds, step 10000, held-out loss 1.500\n" in done.stdout
    assert "noloco-node export" in done.stdout
    assert str(home.run(run.run_id)) in done.stdout
    assert not {"torch", "grpc", "hivemind"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


def test_join(node, address):
    run, trust = "ab" * 32, OTHER
    assert main(["join", "--bootstrap", address, "--run", run, "--trust", trust]) == 0
    [(config, *what, _)] = node.calls
    assert what == ["trains", None]
    assert (config.bootstrap, config.run, config.trust) == ((parse(address),), run, trust)


def test_join_by_an_invitation_that_was_broken_into_lines(node, address):
    word = invitation.write(Invitation((parse(address),), 32 * "ab", OTHER))
    assert main(["join", word[:30], word[30:60], word[60:], "--bootstrap", address]) == 0
    config = node.calls[0][0]
    assert (config.bootstrap, config.run, config.trust) == ((parse(address),), 16 * "ab", OTHER)


def was_in(home, author, rounds=100, done=0, **given):
    """Leaves what a node leaves that was in this run."""
    signed = manifest.sign(toml.load(Path("run.toml")).model_copy(update={"rounds": rounds}), author)
    run_id = manifest.verify(signed).run_id
    signed_file.keep(home.run(run_id), signed)
    if done:
        reached(home.run(run_id) / "checkpoints", done)
    remembered.keep(home, given, run_id, author.peer_id)
    return signed


def test_join_alone_goes_on_with_the_run_of_last_time(node, home, address, tmp_path, capsys):
    main(["init"])
    signed = was_in(home, Identity.load_or_create(tmp_path / "author.key"), done=12, bootstrap=[address], threads="2")
    run = manifest.verify(signed)
    capsys.readouterr()
    assert main(["join", "--max-upload", "5MB"]) == 0
    [(config, *what, _)] = node.calls
    assert what == ["trains", None]
    assert (config.bootstrap, config.run, config.threads, config.max_upload) == ((parse(address),), run.run_id, 2, 5e6)
    assert capsys.readouterr().out.startswith(f"going on with {run.label}, round 12 of 100\n")


def test_a_run_in_which_nothing_was_trained_here_is_joined(node, home, address, tmp_path, capsys):
    main(["init"])
    run = manifest.verify(was_in(home, Identity.load_or_create(tmp_path / "author.key"), bootstrap=[address]))
    capsys.readouterr()
    assert main(["join"]) == 0
    assert capsys.readouterr().out.startswith(f"joining {run.label}\n")


@pytest.mark.parametrize("words", [["join", "--device", "cuda"], ["start", "run.toml", "--device", "mps"]])
def test_a_device_that_is_not_there_is_found_before_the_network(words, node, home, address, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    main(["init"])
    capsys.readouterr()
    assert main([*words, "--bootstrap", address]) == 2
    said = capsys.readouterr().err
    assert f"--device {words[-1]} cannot be used, as " in said and "use --device cpu" in said
    assert not node.calls and not home.root.exists(), "nothing is remembered"


def test_join_alone_goes_on_with_the_authors_own_run(node, home):
    main(["init"])
    signed = was_in(home, Identity.load_or_create(home.create().identity))
    assert main(["join"]) == 0
    assert node.calls[0][1:3] == ("trains", signed) and node.calls[0][0].bootstrap == ()


def test_where_no_address_is_known_those_who_were_seen_are_tried(node, home, address, tmp_path, capsys):
    main(["init"])
    was_in(home, Identity.load_or_create(tmp_path / "author.key"))
    assert main(["join"]) == 2
    assert "needs an invitation" in capsys.readouterr().err
    (home.root / "peers.json").write_text(json.dumps({OTHER: {"seen": 1, "addresses": [address]}}))
    assert main(["join"]) == 0
    assert (node.calls[0][0].bootstrap, node.calls[0][0].seen) == ((), (parse(address),))


def test_of_a_run_that_it_was_in_a_home_knows_the_author(node, home, address, tmp_path):
    """Where nobody was chosen who could say it: what was given last time is lost, or another run is named."""
    main(["init"])
    author = Identity.load_or_create(tmp_path / "author.key")
    run_id = manifest.verify(was_in(home, author)).run_id
    (home.root / "peers.json").write_text(json.dumps({OTHER: {"seen": 1, "addresses": [address]}}))
    home.remembered.unlink()
    assert main(["join"]) == main(["join", "--run", run_id]) == 0
    assert [(config.run, config.trust) for config, *_ in node.calls] == 2 * [(run_id, author.peer_id)]
    assert main(["join", "--trust", OTHER]) == 0 and node.calls[-1][0].trust == OTHER


def test_peers_seen_earlier_are_no_bootstrap_nodes(node, home, address, capsys):
    """Nobody chose them: what a bootstrap node may say of others, they may not."""
    gone = free_address()
    assert main(["join", "--bootstrap", gone]) == 10
    (home.root / "peers.json").write_text(json.dumps({OTHER: {"seen": 1, "addresses": [address]}}))
    assert main(["join", "--bootstrap", gone]) == 0
    assert (node.calls[0][0].bootstrap, node.calls[0][0].seen) == ((parse(gone),), (parse(address),))
    assert "joining through peers seen earlier" in capsys.readouterr().out
    assert main(["join", "--bootstrap", address]) == 0
    assert (node.calls[1][0].bootstrap, node.calls[1][0].seen) == ((parse(address),), ())


def test_join_says_that_a_newer_version_made_its_run(node, home, capsys):
    """As where a node is of an older version for a while."""
    author = Identity.load_or_create(home.create().identity)
    newer = manifest.sign(Manifest(name="mine"), author).manifest.replace(b'"inner":{', b'"inner":{"a_later_key":1,')
    signed = Signed(newer, author.peer_id, author.sign(b"noloco manifest v1\n" + newer))
    run_id = hashlib.sha256(newer).hexdigest()
    home.run(run_id).mkdir(parents=True)
    (home.run(run_id) / signed_file.NAME).write_text(signed_file.text(signed))
    remembered.keep(home, {}, run_id, author.peer_id)
    assert main(["join"]) == 12 and node.calls == []
    said = "the run was made by a newer version of noloco-node, which knows inner.a_later_key: update this one\n"
    assert capsys.readouterr().err == said


def test_join_of_a_run_that_is_over(node, home, address, capsys):
    main(["init"])
    was_in(home, Identity.load_or_create(home.create().identity), rounds=20, done=20)
    capsys.readouterr()
    assert main(["join"]) == 0
    said = capsys.readouterr().out
    assert "is over: 20 rounds, step 1000" in said
    assert "to take the model out: noloco-node export" in said
    assert node.calls == []
    assert main(["join", "--linger", "60"]) == 0
    assert len(node.calls) == 1, "it answers `status` for a while"


def test_a_volunteer_whose_run_is_over_asks_whether_it_goes_on(node, home, address, tmp_path, capsys):
    """Its author may have given it more rounds."""
    main(["init"])
    author = Identity.load_or_create(tmp_path / "author.key")
    was_in(home, author, rounds=20, done=20)
    assert main(["join"]) == 0 and node.calls == [], "it knows nobody to ask"
    was_in(home, author, rounds=20, bootstrap=[free_address()])
    assert main(["join"]) == 0 and node.calls == [], "nobody is there"
    was_in(home, author, rounds=20, bootstrap=[address])
    capsys.readouterr()
    assert main(["join"]) == 0
    assert "asking the others whether its author has given it more rounds" in capsys.readouterr().out
    assert len(node.calls) == 1
    node.result = SwarmUnreachable("nobody is there")
    assert main(["join"]) == 0, "nobody to ask"


def test_a_run_that_turns_out_to_go_on_is_not_over_for_want_of_a_donor(node, home, address, tmp_path, monkeypatch):
    """Its service manager is to try again."""
    main(["init"])
    author = Identity.load_or_create(tmp_path / "author.key")
    signed = was_in(home, author, rounds=20, done=20, bootstrap=[address])
    run_id = manifest.verify(signed).run_id

    async def learns_of_it(*_):
        amendment.write(home.run(run_id), amendment.sign(Amendment(run=run_id, version=1, rounds=400), author))
        raise SwarmUnreachable("no peer sent its state")

    monkeypatch.setattr(node, "train", learns_of_it)
    assert main(["join"]) == 10


def test_a_terminal_that_is_gone_ends_no_node():
    script = "from noloco_node.cli.terminal_lines import report\nreport('x')\nreport('y')\nraise SystemExit(7)"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 7


@pytest.mark.parametrize("words", ["paths", "--help", "status --help", "--version"])
def test_an_output_that_the_disk_has_no_room_for_is_an_error(words):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "noloco_node", *words.split()]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[2]
        )
    assert done.returncode == 20 and done.stderr.startswith("the disk is full: the output is not whole")


def test_the_node_knows_the_port_of_last_time(node, home):
    """It is taken again if it is free: see tests/transport/test_libp2p.py."""
    main(["init"])
    signed = was_in(home, Identity.load_or_create(home.create().identity))
    remembered.keep(home, {}, manifest.verify(signed).run_id, signed.author, 40123)
    for flag in (0, parse(free_address()).port):
        assert main(["join", "--listen", f"/ip4/127.0.0.1/tcp/{flag}"]) == 0
        settings = node.calls[-1][0]
        assert (settings.listen.port, settings.last_port) == (flag, 40123)


def test_runs_lists_and_removes(home, capsys):
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == f"no run in {home.root} yet: join one with its invitation\n"
    main(["init"])
    run = manifest.verify(was_in(home, Identity.load_or_create(home.create().identity), rounds=20, done=20))
    capsys.readouterr()
    assert main(["runs"]) == 0
    line = capsys.readouterr().out
    assert all(word in line for word in (run.label, "round 20 of 20", "s ago", "finished"))
    with home.lock():
        assert main(["runs", "--remove", run.run_id[:6]]) == 4
        assert "stop it with `noloco-node leave`" in capsys.readouterr().err
    assert main(["runs", "--remove", run.run_id[:6], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "runs": [], "removed": [run.run_id]}
    assert not home.run(run.run_id).exists()


def test_config_shows_what_join_alone_would_use(home, address, monkeypatch, capsys):
    remembered.keep(home.create(), {"bootstrap": [address], "max_upload": "5MB", "compile": True}, 32 * "ab", OTHER)
    (home.root / "node.toml").write_text('sinks = ["tensorboard", "wandb"]\n')
    monkeypatch.setenv("NOLOCO_THREADS", "2")
    assert main(["config"]) == 0
    rows = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split(maxsplit=2))}
    assert rows["max_upload"] == ["remembered", "5MB"] and rows["bootstrap"] == ["remembered", address]
    assert rows["compile"] == ["remembered", "true"] and rows["sinks"] == ["node.toml", "tensorboard, wandb"]
    assert rows["threads"] == ["environment", "2"] and rows["hours"] == ["default", "-"]
    assert main(["config", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert {"name": "max_upload", "value": "5MB", "origin": "remembered"} in settings


@pytest.mark.parametrize("verb", ["config", "paths", "runs"])
def test_a_home_that_does_not_exist_is_named(verb, tmp_path, capsys):
    there, mistyped = tmp_path / "there", tmp_path / "their"
    there.mkdir()
    for home, said in ((there, ""), (mistyped, f"{mistyped} does not exist: this is what a new home there has\n")):
        assert main([verb, "--home", str(home), "--json"]) == 0
        printed = capsys.readouterr()
        assert printed.err == said and json.loads(printed.out)
    assert not mistyped.exists()


def test_one_address_that_answers_is_enough(node, address, monkeypatch):
    monkeypatch.setenv("NOLOCO_BOOTSTRAP", f"{free_address()},{address}")
    assert main(["join"]) == 0
    assert len(node.calls[0][0].bootstrap) == 2


def test_bootstrap(node):
    assert main(["bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0"]) == 0
    [(config, *what, _)] = node.calls
    assert what == ["rendezvous", None]
    assert str(config.listen) == "/ip4/127.0.0.1/tcp/0"


def test_nobody_listens(node, capsys):
    assert main(["join", "--bootstrap", free_address()]) == 10
    shown = capsys.readouterr().err
    assert "cannot reach the swarm" in shown
    assert "refuses the connection" in shown
    assert main(["join", "--bootstrap", free_address(), "--bootstrap", free_address()]) == 10
    assert "none of the 2 bootstrap addresses answers" in capsys.readouterr().err
    assert node.calls == []


def test_a_node_runs_here_already(running, node, capsys):
    assert main(["bootstrap"]) == 4
    assert "pid" in capsys.readouterr().err
    assert node.calls == []


def test_a_wrong_manifest_is_found_first(running, node, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(toml.template().replace("steps = 25", "steps = 'many'"))
    assert main(["start", "run.toml"]) == 2
    assert capsys.readouterr().err == "run.toml: inner.steps must be a whole number from 1 to 100000, not 'many'\n"


def test_the_nodes_errors_and_exit_codes_pass_through(node, home, capsys):
    node.result = Diverged("the loss is not finite: start again from a checkpoint")
    assert main(["bootstrap"]) == 22
    assert capsys.readouterr().err == "the loss is not finite: start again from a checkpoint\n"
    assert "ended with exit code 22: the loss is not finite: start again from a checkpoint\n" in home.log.read_text()
    node.result = 130
    assert main(["bootstrap"]) == 130
    node.result = KeyError("a bug")
    assert main(["bootstrap"]) == 1
    assert "Traceback" in home.log.read_text()
    assert home.holder() is None


def test_log_lines(node, home, capsys):

    async def rendezvous(_config, _report):
        logging.getLogger("noloco_node.rounds.service").info("round %d of %d", 4, 8)
        logging.getLogger("noloco_node.rounds.service").warning("odd")
        logging.getLogger("noloco_node.rounds.service").debug("detail")
        logging.getLogger("elsewhere").warning("noise")
        return 0

    node.rendezvous = rendezvous
    assert main(["bootstrap", "--log-level", "debug"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["round 4 of 8", "warning: odd"]
    written = home.log.read_text()
    assert all(word in written for word in ("round 4 of 8", "odd", "detail", "noise"))
    assert logging.getLogger("noloco_node").level == logging.NOTSET
    assert home.log.stat().st_mode & 0o077 == 0 or home.root.stat().st_mode & 0o077 == 0


def test_log_lines_for_programs(node, home, capsys):
    async def rendezvous(_config, _report):
        logging.getLogger("noloco_node.rounds.service").info("round %d of %d", 4, 8)
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("noloco_node.rounds.service").exception("odd: \u00e9")
        return 0

    node.rendezvous = rendezvous
    assert main(["bootstrap", "--log-format", "json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    written = [json.loads(line) for line in home.log.read_text().splitlines()]
    assert shown == written
    assert [(line["level"], line["logger"], line["message"]) for line in shown] == [
        ("info", "noloco_node.rounds.service", "round 4 of 8"),
        ("error", "noloco_node.rounds.service", "odd: \u00e9"),
    ]
    assert shown[0]["time"].endswith("+00:00")
    assert "ValueError" in shown[1]["traceback"]
    assert main(["bootstrap", "--log-format", "xml"]) == 2
    assert "--log-format must be text or json, not 'xml'" in capsys.readouterr().err
