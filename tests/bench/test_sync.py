"""`bench sync` and its neighbours: what they ask for, what they check, and a quick run of each."""

import json
import os
import random
import subprocess
import sys

import pytest

from noloco_node.bench import exchange, links, sync
from noloco_node.bench.rivals import vectors
from noloco_node.bench.rows import Row, Run
from noloco_node.cli import main
from noloco_node.errors import NolocoError, UsageError

QUICK_S = 150
"""Each takes a minute on a machine that does nothing else."""


def test_who_is_averaged_with_whom_is_checked() -> None:
    before = [[0.0, 4.0], [2.0, 0.0], [5.0, 5.0], [7.0, 7.0]]
    sync.check(before, [[1.0, 2.0], [1.0, 2.0], [6.0, 6.0], [6.4, 6.0]], [[0, 1], [2, 3]])
    sync.check(before, [[3.5, 4.0]] * 4, [[0, 1, 2, 3]])
    with pytest.raises(NolocoError, match="did not average"):
        sync.check(before, before, [[0, 1], [2, 3]])
    with pytest.raises(NolocoError, match="did not average"):
        sync.check(before, [[3.5, 4.0]] * 4, [[0, 1], [2, 3]])


def test_elements_from_the_first_to_the_last_are_looked_at() -> None:
    places = vectors.probed(100_000_000)
    assert places == sorted(set(places)) and (places[0], places[-1]) == (0, 99_999_999)


def test_each_worker_is_in_one_pair() -> None:
    pairs = sync.pairs(8, random.Random(1))
    assert sorted(worker for pair in pairs for worker in pair) == list(range(8)) and {len(pair) for pair in pairs} == {
        2
    }


def test_the_limit_is_what_was_sent_over_the_rate() -> None:
    made = sync.row(sync.Setting(2, 1_000_000, 8), sync.SYSTEMS[0], [Run(2.0, 1e6, 0.1), Run(1.1, 1e6, 0.1)])
    assert made.more == {"limit_s": 1.0, "of_limit": 1.55, "bytes_per_param": 1.0}
    assert [panel.title for panel in sync.panels([made])] == ["1 M parameters, 8 Mbit/s"]


def test_a_share_of_the_raw_stream_is_of_the_same_turn() -> None:
    runs = {system: [Run(2.0, 1, 1.0), Run(4.0, 1, 1.0)] for system in exchange.SYSTEMS}
    runs[exchange.RAW] = [Run(1.0, 1, 1.0), Run(2.0, 1, 1.0)]
    found = {row.system: row for row in exchange.rows(runs, 2)}
    assert found["exchange"].more["of_raw"] == 0.5 and found[exchange.RAW].more["of_raw"] == 1
    assert found["exchange"].more["mb_s"] == pytest.approx(2 * exchange.PAYLOAD_BYTES / 1e6 / 3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sync --n 2,3", "--n takes even numbers, since nodes swap in pairs, not 3"),
        ("sync --systems gloo", "--systems takes some of noloco lattice:3, "),
        ("exchange --mib 0", "--mib must be a whole number from 1 to 99999, not '0'"),
        ("exchange --mib 1,2", "--mib must be a whole number from 1 to 99999, not '1,2'"),
        ("exchange --repeats 3,4", "--repeats must be a whole number"),
        ("sync --seed 1,2", "--seed must be a whole number"),
    ],
)
def test_a_wrong_word_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_without_root_sync_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["bench", "sync", "--quick"]) == 1
    assert capsys.readouterr().err.endswith("needs root, to make network namespaces. Run it as root on Linux.\n")


@pytest.mark.parametrize(
    ("words", "settings"),
    [("", ["2 1000000 50 1"]), ("--n 4,8", ["4 1000000 50 1", "8 1000000 50 1"]), ("--repeats 3", ["2 1000000 50 3"])],
)
def test_what_is_given_counts_beside_quick(words: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def run(wanted: list[sync.Setting], _: object, repeats: int, *__: object) -> list[Row]:
        measured.extend(f"{each.n} {each.params} {each.mbit} {repeats}" for each in wanted)
        raise UsageError("not now")

    monkeypatch.setattr(links, "require", lambda: None)
    monkeypatch.setattr(sync, "run", run)
    assert main(["bench", "sync", "--quick", *words.split()]) == 2
    assert measured == settings


def rows_of(*words: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "noloco_node", "bench", *words, "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=QUICK_S)
    assert done.returncode == 0, done.stderr
    return {row["system"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(QUICK_S + 30)
def test_a_quick_sync() -> None:
    if why := links.why_not("tc"):
        pytest.skip(why)
    rows = rows_of("sync")
    wanted = {system.name for system in sync.SYSTEMS if not system.missing}
    assert rows.keys() == wanted
    assert rows["noloco lattice:4"]["bytes_per_node"] < rows["two fp32 vectors"]["bytes_per_node"] / 12
    assert all(row["of_limit"] > 0.9 for row in rows.values())


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(QUICK_S + 30)
def test_a_quick_exchange() -> None:
    rows = rows_of("exchange")
    assert rows.keys() == set(exchange.SYSTEMS)
    assert all(row["mb_s"] > 0 and row["cpu_s_per_gb"] > 0 for row in rows.values())
