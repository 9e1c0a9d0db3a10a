"""What tests measured, kept in a JSON file: by test, its outcome, its seconds and the texts that it gave to `figure`.

A test with parameters is one entry: the worst outcome, all seconds, all texts. A later run replaces the entries of the
tests that ran in it and leaves the others.
"""

import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

OUTCOMES = ("passed", "xfailed", "skipped", "failed")
"""The last one counts."""


@dataclass
class Entry:
    outcome: str
    seconds: float
    on: str
    """The day."""
    figures: list[str] = field(default_factory=list)


def read(file: Path) -> dict[str, Entry]:
    """By the test's file and name."""
    return {test: Entry(**entry) for test, entry in json.loads(file.read_text()).items()} if file.exists() else {}


def write(file: Path, entries: dict[str, Entry]) -> None:
    lines = (f"{json.dumps(test)}: {_plain(entry)}" for test, entry in sorted(entries.items()))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _plain(entry: Entry) -> str:
    return json.dumps(asdict(entry), sort_keys=True, ensure_ascii=False)


class FiguresFile:
    """A plugin of pytest."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: dict[str, Entry] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        test = report.nodeid.partition("[")[0]
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        before = self._seen.get(test, Entry(outcome, 0.0, datetime.datetime.now(datetime.UTC).date().isoformat()))
        before.outcome = max(before.outcome, outcome, key=OUTCOMES.index)
        before.seconds = round(before.seconds + report.duration, 2)
        if report.when == "call":
            before.figures += [text for name, text in report.user_properties if name == "figure"]
        self._seen[test] = before

    def pytest_sessionfinish(self) -> None:
        seen = {test: entry for test, entry in self._seen.items() if entry.outcome != "skipped"}
        write(self._file, {**read(self._file), **seen})
