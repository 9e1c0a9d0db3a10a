"""The command line: help, its speed, and the sentence for each mistake."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest

from noloco_node import errors
from noloco_node.cli import main, parser
from noloco_node.cli.parser import parse
from noloco_node.host.config import NodeConfig
from noloco_node.version import PROTOCOL, VERSION

HEAVY = {"torch", "hivemind", "grpc", "pydantic", "rich", "numpy", "transformers", "uvloop"}


@pytest.fixture(autouse=True)
def _a_home_of_its_own(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("NOLOCO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NOLOCO_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["start", "--help"], ["swarm", "--help"], []])
def test_help_is_quick(args):
    """At most 0.1 s of processor time beyond Python's own start; the best of ten, since the machine may be busy."""
    code = f"""
import sys, time
began = time.process_time()
from noloco_node.cli import main
code = main({args!r})
spent = time.process_time() - began
print(spent, sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""

    def spent_s():
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        spent, heavy = run.stderr.split(maxsplit=1)
        assert heavy.strip() == "[]"
        assert run.stdout
        return float(spent)

    assert any(spent_s() < 0.1 for _ in range(10))


@pytest.mark.parametrize("verb", ["status", "id", "completion bash"])
def test_a_verb_that_looks_imports_nothing_heavy(verb):
    code = f"""
import sys
from noloco_node.cli import main
main({verb.split()!r})
print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_letter_that_the_terminal_does_not_have_ends_nothing(tmp_path):
    words = [sys.executable, "-m", "noloco_node", "id", "--home", str(tmp_path / "h\u00f6me")]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.splitlines()[-1].endswith("/h\\xf6me")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_is_closed_changes_no_exit_code(closed):
    """As a supervisor may start a node. The next file that is opened would have its number."""
    line = f"exec {sys.executable} -m noloco_node status {closed}>&-"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    code = "import os; from noloco_node import __main__ as m; m._open_streams(); [os.fstat(fd) for fd in range(3)]"
    opened = subprocess.run(["/bin/sh", "-c", f"{sys.executable} -W error -c '{code}' {closed}>&-"], check=False)
    assert opened.returncode == 0, "and no other file will get it"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"noloco-node {VERSION} (protocol {PROTOCOL})\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tokenize", ""], "FILES is empty: name one"),
        (["ping", ""], "PEER is empty: name one"),
        (["wait", "--for", ""], "--for is empty: name one"),
        (["join", ""], "INVITATION is empty: name one, or leave it out"),
        (["eval", ""], "PATH is empty: name one, or leave it out"),
        (["start", "run.toml", "--home", ""], "--home is empty: name one, or leave it out"),
        (["join", "--data="], "--data is empty: name one, or leave it out"),
    ],
)
def test_a_shells_variable_that_is_not_set_is_no_value(words, sentence, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize("words", [["ping", "h"], ["sample", "h"], ["peers", "--name", "h"], ["logs", "--home", "f"]])
def test_a_value_may_be_a_flags_letter(words):
    assert words[-1] in vars(parse(words)[1]).values()


def test_no_sinks_may_be_said():
    """Where the environment or node.toml names some."""
    assert parse(["join", "--sinks", ""])[1].sinks == ""


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torch_allocates_in_segments_that_grow_unless_the_user_says_otherwise(given, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:512")
    assert main(["--version"]) == 0
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == (
        {given: "max_split_size_mb:512"} if given else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )


@pytest.mark.parametrize(
    "verb", [*parser._VERBS, *(f"{verb.name} {second.name}" for verb in parser.verbs() for second in verb.verbs)]
)
def test_every_verb_has_help_with_an_example(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: noloco-node {verb}" in shown
    assert f"example:\n  noloco-node {verb}" in shown
    assert re.search(r"^usage: .*\[options\]\n\n[A-Z].*\.\n", shown, re.DOTALL), "one line, then what it does"
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize(
    ("verb", "groups"),
    [
        ("start", ["what to train", "how to train", "network", "limits", "output"]),
        ("join", ["what to train", "how to train", "network", "limits", "output"]),
        ("bootstrap", ["network", "output"]),
        ("export", ["which weights", "data and device", "output"]),
        ("simulate", ["what to compare", "how to train", "output"]),
    ],
)
def test_many_options_are_shown_in_groups(verb, groups, capsys):
    assert main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.removesuffix(":") in groups] == [f"{group}:" for group in groups]


@pytest.mark.parametrize("verb", ["start", "join", "bootstrap"])
def test_a_setting_has_one_name_as_flag_as_variable_and_in_node_toml(verb, capsys):
    assert main([verb, "--help"]) == 0
    flags = set(re.findall(r"^ *--([a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"help"}
    assert {"bootstrap", "web"} <= flags <= {field.name.replace("_", "-") for field in fields(NodeConfig)}


def test_help_lists_every_verb_within_80_columns(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for verb, entry in parser._VERBS.items():
        assert any(line.split()[:1] == [verb] and entry.help in line for line in lines)


DOES = {"init", "start", "join", "bootstrap", "pause", "resume", "leave", "completion", "revoke", "run"}
"""Verbs that act and print no data."""
MEASURED = ("codec", "training", "sync", "exchange")


@pytest.mark.parametrize(
    "verb", [*(verb for verb in parser._VERBS if verb not in {*DOES, "bench"}), *(f"bench {what}" for what in MEASURED)]
)
def test_what_shows_something_has_json(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["stauts"], "there is no verb 'stauts', did you mean status?"),
        (["--home", "x", "status"], "the verb comes first, before '--home'"),
        (["status", "--jsn"], "status does not know '--jsn', did you mean --json?"),
        (["status", "now"], "status does not know 'now'"),
        (["status", "--he"], "status does not know '--he', did you mean --help?"),
        (["simulate", "--foo", "3"], "simulate does not know '--foo': see `noloco-node simulate --help`"),
        (["swarm", "--hme", "x"], "swarm does not know '--hme': see `noloco-node swarm --help`"),
        (["swarm", "--home", "x"], "'--home': its nodes have homes of their own, which --keep DIR keeps"),
        (["swarm", "--nodez=4"], "swarm does not know '--nodez', did you mean --nodes?"),
        (["simulate", "--roundz", "3"], "simulate does not know '--roundz', did you mean --rounds?"),
        (["simulate", "network", "--sizez", "3"], "simulate network does not know '--sizez', did you mean --sizes?"),
        (["run", "amend", "--page"], "run amend does not know '--page': see `noloco-node run amend --help`"),
        (["simulate", "--rounds", "3", "network"], "'network' comes first, before '--rounds': see `noloco"),
        (["bench", "codex"], "bench does not know 'codex', did you mean codec?"),
        (["bench", "trai"], "bench does not know 'trai', did you mean train or training?"),
        (["stat"], "there is no verb 'stat', did you mean status?"),
        (["start", "run.toml", "--compile=no"], "--compile takes no value, not 'no': type --compile or --no-compile"),
        (["logs", "-f=yes"], "-f takes no value, not 'yes': type -f or --follow"),
        (["sample", "x", "--tokens", "many"], "--tokens must be a whole number, not 'many'"),
        (["bench", "codec", "--params", "1.5"], "--params must be a whole number, not '1.5'"),
        (["bench", "train", "--goal", "nan"], "--goal must be a number, not 'nan'"),
        (["start"], "required: run.toml"),
        (["start", "/nowhere/run.toml"], "/nowhere/run.toml does not exist: write one with `noloco-node init"),
        (["join"], "join needs an invitation"),
        (["join", "nn1abc"], "the invitation is damaged: copy it again"),
        (["join", "/ip4/203.0.113.7/tcp/4001"], "is an address, not an invitation: give it with --bootstrap"),
        (["join", "--thread", "2"], "join does not know '--thread', did you mean --threads?"),
        (["join", "--threads", "two", "--bootstrap", "x"], "--threads must be a whole number"),
        (["join", "--bootstrap", "somewhere"], "--bootstrap must be addresses like"),
        (["doctor", "--bootstrap", "somewhere"], "or an invitation, nn1…, not 'somewhere'"),
        (["start", "run.toml", "--max-upload", "-5MB"], "at least 32kB, not '-5MB'"),
        (["bootstrap", "--listen", "4001"], "--listen must be an address like"),
        (["swarm", "--nodes", "1"], "--nodes must be a whole number from 2 to 64, not '1'"),
        (["swarm", "--stages", "3"], "--stages must be 2, not '3'"),
        (["swarm", "--rounds", "none"], "--rounds must be a whole number"),
        (["swarm", "--run", "/nowhere/run.toml"], "does not exist"),
        (["id", "--home", "~nobody-by-this-name/x"], "names no user's home directory"),
        (["start", "run.toml", "--weights", "~nobody-by-this-name/x"], "--weights must be in the home directory of a"),
        (["start", "run.toml", "--data", "~nobody-by-this-name/x"], "user that is there, not '~nobody-by-this-"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_exit_2(args, sentence, capsys):
    assert main(args) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_no_bug(error, monkeypatch, capsys):
    import_module("torch")  # as a verb that allocates has done

    def allocate(*_):
        raise error

    monkeypatch.setattr("noloco_node.cli.show.status", allocate)
    assert main(["status"]) == 21
    assert capsys.readouterr().err == "memory has no room for this: end other programs, or ask for less\n"


def test_every_error_has_its_exit_code(monkeypatch, capsys):
    codes = {
        errors.UsageError: 2,
        errors.NoNodeRunning: 3,
        errors.NodeAlreadyRunning: 4,
        errors.PortInUse: 5,
        errors.NotReached: 6,
        errors.SwarmUnreachable: 10,
        errors.ClockTooFarOff: 11,
        errors.Incompatible: 12,
        errors.NotAdmitted: 13,
        errors.IdentityInUse: 14,
        errors.DiskFull: 20,
        errors.OutOfMemory: 21,
        errors.Diverged: 22,
        errors.NolocoError: 1,
    }
    for kind, code in codes.items():
        raising(monkeypatch, kind("what is wrong: what to do"))
        assert main(["id"]) == code
        assert capsys.readouterr().err == "what is wrong: what to do\n"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        *((f"{verb} --json", 3) for verb in ("status", "top --once", "peers", "peers --watch", "ping x")),
        ("wait --for training --json", 3),
        ("logs --json", 1),
        ("export --to x --json", 2),
        ("eval --json", 2),
        ("sample x --json", 2),
        ("tokenize /nowhere/x.txt --out x.tokens --json", 2),
        ("bugreport --to /nowhere/x.zip --json", 2),
        ("swarm --nodes 1 --json", 2),
        ("simulate --replicas 0 --json", 2),
        ("bench codec --params 0 --json", 2),
        ("status --jsn --json", 2),
        ("no-such-verb --json", 2),
    ],
)
def test_with_json_an_error_is_a_document_too(args, code, capsys):
    assert main(args.split()) == code
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert json.loads(shown.out) == {"schema": 1, "error": {"code": code, "sentence": shown.err.rstrip("\n")}}


def test_a_bug_is_a_document_too(monkeypatch, capsys):
    raising(monkeypatch, ZeroDivisionError("deep inside"))
    assert main(["id", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 1


def raising(monkeypatch, error):
    def verb(_options):
        raise error

    monkeypatch.setattr("noloco_node.cli.parser.parse", lambda _args: (verb, None))


def test_an_error_inside_a_task_group_is_found(monkeypatch, capsys):
    raising(monkeypatch, ExceptionGroup("tasks", [ValueError(), ExceptionGroup("", [errors.DiskFull("full")])]))
    assert main(["id"]) == 20
    assert capsys.readouterr().err == "full\n"


def test_the_reason_comes_before_what_a_node_has_reached(monkeypatch, capsys):
    error = errors.DiskFull("the disk is full")
    error.add_note("to go on: noloco-node join")
    raising(monkeypatch, error)
    assert main(["id"]) == 20
    assert capsys.readouterr().err == "the disk is full\nto go on: noloco-node join\n"


def test_ctrl_c(monkeypatch, capsys):
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["id"]) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_is_one_line_that_names_the_log(monkeypatch, capsys, tmp_path):
    raising(monkeypatch, ZeroDivisionError("deep inside"))
    assert main(["id"]) == 1
    log = tmp_path / "home" / "node.log"
    shown = capsys.readouterr().err
    assert shown == f"noloco-node failed unexpectedly (ZeroDivisionError): the details are in {log}\n"
    assert "Traceback" in log.read_text()
    assert "deep inside" in log.read_text()


def ends(command: str) -> tuple[int, str]:
    """Exit code of the first command of a pipeline, and stderr of all."""
    done = subprocess.run(
        f"{sys.executable} -m noloco_node {command}; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("verb", ["--help", "doctor"], ids=["print", "rich"])
def test_a_closed_pipe_is_no_error(verb):
    assert ends(f"{verb} | true") == (0, "")


@pytest.mark.parametrize("unread", ["2>&1 | true", "2> /dev/full", "2>&1 > /dev/full | true"])
def test_what_nobody_can_read_changes_no_exit_code(unread):
    assert ends(f"status {unread}") == (3, "")


def test_libraries_are_kept_quiet_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert main(["--version"]) == 0
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert "HF_HUB_OFFLINE" not in os.environ
