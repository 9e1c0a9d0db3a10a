"""`top` on a real node, in terminals of two sizes: the screens are complete, and its keys act on the node."""

import re

import pytest
from pretend_terminal import PretendTerminal
from real_nodes import QUICK, RealNodes, until

pytestmark = pytest.mark.timeout(400)

PANELS = {
    (80, 24): ["loss", "this node", "rounds", "peers", "events"],
    (200, 50): ["loss", "this node", "partners", "rounds", "peers", "events"],
}


def test_a_real_node_seen_and_steered(real_nodes: RealNodes) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.paced(seconds=1.0, learning_rate=0.0002, outer=QUICK)))
    other = real_nodes.node("other", "join", "--bootstrap", author.address())
    until(lambda: author.printed(r"(round \d+ with)"), "a round together")
    name, partner = (node.ask("status")["name"] for node in (author, other))
    until(lambda: [row["state"] for row in author.ask("peers")["peers"]] == ["training"], "the other's next record")

    together = re.compile(rf"▅+ {partner}")  # on the axis of rounds
    for columns, rows in PANELS:
        with PretendTerminal("top", "--home", str(author.home), columns=columns, rows=rows) as terminal:
            seen = terminal.until(lambda seen: "every 1 s" in seen and together.search(seen), "a whole screen")
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
        assert "has left; its state is kept in" in terminal.bytes.decode()
        assert author.ended(60) == 0

    text = other.run("top", "--once").stdout
    assert "training" in text.splitlines()[0]


def complete(seen: str, columns: int, rows: int, name: str, partner: str) -> None:
    """Every panel is filled, nothing is wider than the screen, and its last line is the last row."""
    lines = seen.split("\n")
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    for panel in PANELS[columns, rows]:
        assert any(f" {panel} ─" in line for line in lines), panel
    assert lines[0].startswith(f" {name}  ● training  round ")
    assert lines[0].endswith(re.search(r"test-\w{12}", lines[0])[0])
    assert re.match(r" loss \d.*eval \d.* · step \d+ · lr \d.* · grad norm \d", lines[1])
    assert columns < 120 or re.search(r"tokens/s · busy \d+% · 1 peer · up \d", lines[1])
    assert re.search("[\u2801-\u28ff]{4}", seen), "a curve"
    assert re.search(rf"^ {partner} +training", seen, re.MULTILINE), "the table of peers"
    assert re.search(rf"\d\d:\d\d:\d\d  round \d+ with {partner}: step \d+", seen), "the last events"
    assert "p pause   l leave   q quit   ? help" in lines[-1]
