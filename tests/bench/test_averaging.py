"""`bench averaging`: its figures, what it checks, and a quick run."""

import json
import subprocess
import sys

import pytest

from noloco_node.bench import averaging, links
from noloco_node.cli import main

QUICK_S = 150


def test_the_spread_is_the_variance_between_peers() -> None:
    assert averaging.spread([[1.0, 5.0], [3.0, 5.0]]) == 0.5
    assert averaging.spread([[2.0, 5.0], [2.0, 5.0]]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--n 1", "--n must be a whole number from 2 to 64, not '1'"),
        ("--rounds 0", "--rounds must be a whole number from 1 to 1000, not '0'"),
        ("--systems hivemind", "--systems takes some of noloco lattice:3, hivemind fp16"),
    ],
)
def test_a_wrong_word_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "averaging", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(QUICK_S + 30)
def test_a_quick_run() -> None:
    if why := links.why_not("tc"):
        pytest.skip(why)
    command = [sys.executable, "-m", "noloco_node", "bench", "averaging", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=QUICK_S)
    assert done.returncode == 0, done.stderr
    rows = {row["system"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows.keys() == {system.name for system in averaging.SYSTEMS}
    assert all(row["succeeded"] > 0 and row["spread_left"] < 0.7 for row in rows.values())
    ours, theirs = rows["noloco lattice:3"], rows["hivemind fp16, 5 s"]
    assert ours["succeeded"] == 1
    assert ours["bytes_per_node"] < theirs["bytes_per_node"] / 4
