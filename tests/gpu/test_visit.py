"""The visit itself, on a CPU with tiny sizes: what it runs, tells and writes, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import visit

VISIT = Path(__file__).with_name("visit.py")
ABSENT = """
import sys
from importlib.machinery import PathFinder

class Without:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""As sitecustomize.py it holds in every process that the visit starts."""
NOT_THERE = {
    *("hivemind", "grpc", "grpc_tools", "google", "uvloop", "base58", "cryptography", "rich"),
    *("pytest", "_pytest", "hypothesis", "xdist", "multiaddr", "psutil"),
}


def visited(folder: Path, *options: str, absent: set[str] | None = None) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what it printed, and its document."""
    (folder / "sitecustomize.py").write_text(ABSENT.format(absent=absent or set()))
    ended = subprocess.run(
        [sys.executable, str(VISIT), "--device", "cpu", "--quick", "--json", str(folder / "visit.json"), *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    written = folder / "visit.json"
    return ended.returncode, ended.stdout + ended.stderr, json.loads(written.read_text()) if written.exists() else {}


def test_a_part_runs_where_nothing_is_installed_that_it_does_not_need(tmp_path: Path) -> None:
    code, said, document = visited(tmp_path, "--only", "kernels", absent=NOT_THERE)
    assert code == 0, said
    assert "not here: hivemind (nodes)" in said
    assert {*document["missing"]} >= {"hivemind", "grpc", "base58"}
    assert document["finished"] and document["machine"]["torch"]
    assert [check["check"] for check in document["checks"] if check["failed"] or check["skipped"]] == []
    assert len(document["checks"]) > 4
    assert document["rows"][0]["ok"]


def test_it_says_first_what_it_cannot_do_without(tmp_path: Path) -> None:
    code, said, document = visited(tmp_path, absent={"pydantic"})
    assert code == 1
    assert said.startswith("NOT HERE, and nothing runs without: pydantic. Remedy: pip install pydantic,")
    assert document == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_of_it_ends_well(tmp_path: Path) -> None:
    code, said, document = visited(tmp_path, absent=NOT_THERE)
    assert code == 0, said
    seen = {check["part"] for check in document["checks"]}
    assert seen == {part.name for part in visit.PARTS if part.name != "swaps blocking"}
    whys = {check["skipped"] for check in document["checks"] if check["skipped"]}
    assert all("needs a GPU" in why or "pip install" in why or why == "no hivemind" for why in whys), whys


# ---- the processes of the parts, without torch -----------------------------------------------------------------------
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, hangs_at: str = "") -> list[visit.Done]:
    """What comes of a program in place of a part's. Its time is over once it has begun what it hangs at."""
    program = tmp_path / "part.py"
    program.write_text(
        "import json, os, sys, time\n"
        "into, skip = sys.argv[sys.argv.index('--into') + 1], int(sys.argv[sys.argv.index('--skip') + 1])\n"
        "def tell(**document):\n"
        "    open(into, 'a').write(json.dumps(document) + '\\n')\n"
        "tell(part='p', check='machine', facts={'checks': ['one', 'two', 'three']})\n"
        "for check in ('one', 'two', 'three')[skip:]:\n"
        "    tell(began=check)\n"
        f"    {body}\n"
        "    tell(part='p', check=check)\n"
    )
    monkeypatch.setattr(visit, "__file__", str(program))
    options = visit._options(["--device", "cpu", "--json", str(tmp_path / "visit.json")])
    process = visit._Process(visit.Part("p", 600), options, tmp_path / "p", threads=1)
    process.go(float("inf"))
    found: list[visit.Done] = []
    while not process.over():
        found += process.news()
        if hangs_at and process._under_way and process._under_way[0] == hangs_at:
            process.go(0.0)
    return [done for done in found if done.check != visit.MACHINE]


def test_a_part_that_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = part(tmp_path, monkeypatch, "pass")
    assert [(done.check, done.failed) for done in found] == [("one", None), ("two", None), ("three", None)]


def test_a_part_that_dies_goes_on_behind_what_it_died_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = part(tmp_path, monkeypatch, "if check == 'two': print('the reason', flush=True); os.kill(os.getpid(), 11)")
    assert [done.check for done in found] == ["one", "two", "three"]
    assert [bool(done.failed) for done in found] == [False, True, False]
    assert "the reason" in found[1].failed and "the process ended with SIGSEGV" in found[1].failed


def test_a_part_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = part(tmp_path, monkeypatch, "time.sleep(600 if check == 'two' else 0)", hangs_at="two")
    assert [done.check for done in found] == ["one", "two", "three"]
    assert "no time was left" in found[1].failed and found[2].skipped == "no time was left"


def test_the_table() -> None:
    rows = [visit._row("a", ">= 1", "2", True), visit._row("b", "<= 1", "2", False), visit._row("c", "-", "3", None)]
    assert visit.table(rows)[2:5] == ["| a | >= 1 | 2 | ok |", "| b | <= 1 | 2 | NO |", "| c | - | 3 | - |"]
