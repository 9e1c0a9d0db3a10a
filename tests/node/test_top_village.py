"""`top` on a real node, in terminals of two sizes: the screens are complete, and its keys act on the node."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from village import ROOT, Village, until

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from pretend_terminal import PretendTerminal

pytestmark = pytest.mark.timeout(150)

RUN = """\
name = "paced"
rounds = 100000
model = { task = "paced", options = { step_s = 0.05 } }
inner = { seconds = 1.0, batch_tokens = 8, warmup = 0.0 }
"""
PANELS = {
    (80, 24): ["loss", "this node", "rounds", "peers", "events"],
    (200, 50): ["loss", "this node", "partners", "rounds", "peers", "events"],
}


@pytest.fixture
def village() -> Iterator[Village]:
    village = Village()
    village.environ["PYTHONPATH"] += f":{ROOT / 'tests' / 'tasks'}"
    yield village
    village.close()


def test_a_real_node_seen_and_steered(village: Village) -> None:
    path = village.root / "run.toml"
    path.write_text(RUN)
    author = village.node("author", "start", str(path))
    there = until(lambda: author.said(r"join --bootstrap (\S+) "), "the line to join with")
    other = village.node("other", "join", "--bootstrap", there)
    until(lambda: author.said(r"(round \d+ with)"), "a round together")
    name, partner = (node.ask("status")["name"] for node in (author, other))
    until(lambda: [row["state"] for row in author.ask("peers")["peers"]] == ["training"], "the other's next record")

    for columns, rows in PANELS:
        with PretendTerminal("top", "--home", str(author.home), columns=columns, rows=rows) as terminal:
            seen = terminal.until(lambda seen: "every 1 s" in seen, "a whole screen")
            complete(seen, columns, rows, name, partner)
            terminal.type("q")
            assert terminal.ended() == 0
            assert terminal.is_restored()

    with PretendTerminal("top", "--home", str(author.home)) as terminal:
        terminal.until(lambda seen: "● training" in seen, "the screen")
        terminal.type("p")
        terminal.until(lambda seen: "○ paused" in seen, "paused")
        assert author.ask("status")["state"] == "paused"
        terminal.type("r")
        terminal.until(lambda seen: "● training" in seen, "going on")
        terminal.type("l")
        terminal.until(lambda seen: "leave the run" in seen, "the question")
        terminal.type("y")
        assert terminal.ended(30) == 0
        assert "has left; what it knows is kept in" in terminal.bytes.decode()
        assert author.process.wait(10) == 0

    text = village.run("top", "--once", "--home", str(other.home)).stdout
    assert "training" in text.splitlines()[0]


def complete(seen: str, columns: int, rows: int, name: str, partner: str) -> None:
    """Every panel is filled, nothing is wider than the screen, and its last line is the last row."""
    lines = seen.split("\n")
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    for panel in PANELS[columns, rows]:
        assert any(f" {panel} ─" in line for line in lines), panel
    assert lines[0].startswith(f" {name}  ● training  round ")
    assert lines[0].endswith(re.search(r"paced-\w{12}", lines[0])[0])
    assert re.match(r" loss \d.*eval \d.*tokens/s · busy \d+% · 1 peer · up \d", lines[1])
    assert re.search("[\u2801-\u28ff]{4}", seen), "a curve"
    assert re.search(rf"▅+ {partner}", seen), "a round together on its axis"
    assert re.search(rf"^ {partner} +training", seen, re.MULTILINE), "the table of peers"
    assert re.search(rf"\d\d:\d\d:\d\d  round \d+ with {partner}: loss", seen), "the last events"
    assert "p pause   l leave   q quit   ? help" in lines[-1]
