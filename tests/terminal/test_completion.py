"""The completion scripts, in the shells themselves; a shell that is not installed is left out."""

import shutil
import subprocess
from pathlib import Path

import pytest

from noloco_node.cli import main, parser
from noloco_node.terminal.completion import SHELLS, Option, Verb, script


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("bash", tmp_path_factory.mktemp("bash"))


def written(shell: str, folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = folder / f"noloco.{shell}"
    path.write_text(script(shell, parser.verbs()))
    return path


def completed(path: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f"""
source {path}
compopt() {{ echo "no files"; }}  # it works only while a user completes
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
_noloco_node
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.split("\n")[:-1]


def test_bash_completes_verbs(bash: Path) -> None:
    assert completed(bash, "noloco-node", "pa") == ["pause", "paths"]
    assert set(parser._VERBS) < set(completed(bash, "noloco-node", ""))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["join", "--max-"], ["--max-upload", "--max-download"]),
        (["join", "--web", "127.0.0.1:8090", "--st"], ["--start-over", "--stage"]),
        (["logs", "--f"], ["--follow"]),
        (["runs", ""], ["-h", "--help", "--remove", "--home", "--json"]),
        (["bench", "c"], ["codec"]),
        (["bench", "codec", "--par"], ["--params"]),
        (["simulate", "--rep"], ["--replicas"]),
        (["simulate", "--seed", "1", "--rep"], ["--replicas"]),
        (["start", "run"], [""]),
        (["join", "--data", "cor"], [""]),
        (["swarm", "--run", "run"], [""]),
        (["join", "--run", ""], ["no files", ""]),
        (["nonsense", "--x"], [""]),
    ],
)
def test_bash_completes_what_a_verb_takes(bash: Path, words: list[str], offered: list[str]) -> None:
    assert completed(bash, "noloco-node", *words) == offered


def test_bash_knows_every_option_that_the_parser_knows(bash: Path) -> None:
    for verb in parser.verbs():
        for option in verb.options:
            assert set(option.flags) <= set(completed(bash, "noloco-node", verb.name, "-")), verb.name


def test_zsh_and_fish_read_their_scripts(tmp_path: Path) -> None:
    for shell in ("zsh", "fish"):
        if shutil.which(shell):
            path = written(shell, tmp_path)
            done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(tmp_path: Path) -> None:
    path = written("fish", tmp_path)
    for line, first in (("noloco-node pau", "pause"), ("noloco-node join --start", "--start-over")):
        asked = f"source {path}; complete -C '{line}'"
        done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout.split("\t")[0] == first


def test_marks_of_a_shell_in_a_help_text_do_no_harm(tmp_path: Path) -> None:
    odd = "it's [so], \\ $(touch bad) `touch bad`: 'x'"
    verbs = [Verb("odd", odd, (Option(("--odd",), odd, "A:B", False),), True)]
    for shell in SHELLS:
        if shutil.which(shell):
            path = tmp_path / shell
            path.write_text(script(shell, verbs))
            skip_compdef = "compdef() { :; }; " if shell == "zsh" else ""
            done = subprocess.run(
                [shell, "-c", f"{skip_compdef}source {path}"], capture_output=True, text=True, cwd=tmp_path, check=False
            )
            assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "bad").exists()


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef noloco-node\n")
    assert main(["completion", "csh"]) == 2
    assert "there is no completion for 'csh', did you mean" in capsys.readouterr().err
