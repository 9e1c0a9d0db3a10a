"""Joining a run that is over, or whose nodes are all off: it is said, and the run is not trained again unasked."""

from pathlib import Path

import psutil
import pytest
from ports import quiet_port
from real_nodes import QUICK, Node, RealNodes, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def rendezvous(real_nodes: RealNodes) -> Node:
    return real_nodes.rendezvous()


@pytest.fixture(scope="module")
def over(real_nodes: RealNodes, rendezvous: Node) -> Node:
    """The author of a run that it trained to its end, alone."""
    author = real_nodes.node("author", "start", str(short_run(real_nodes)), "--bootstrap", rendezvous.address())
    assert author.ended(120) == 0, author.log.read_text()[-2000:]
    return author


@pytest.fixture(scope="module")
def looking(real_nodes: RealNodes, over: Node) -> Node:
    """A volunteer in that run, while the tests before the one about it go on: it looks for somebody for 25 s."""
    return real_nodes.node("volunteer", *over.invitation())


def short_run(real_nodes: RealNodes, name: str = "test") -> Path:
    model = {"task": "paced", "options": {"step_s": 0.02, "outputs": 8}}
    path = real_nodes.tables(rounds=2, model=model, inner={"batch_tokens": 8, "steps": 5}, outer=QUICK)
    path.write_text(path.read_text().replace('"test"', f'"{name}"'))
    return path


@pytest.mark.usefixtures("looking")
def test_of_several_runs_that_nobody_is_in_one_must_be_named(
    real_nodes: RealNodes, rendezvous: Node, over: Node
) -> None:
    way_in = ("--bootstrap", rendezvous.address())
    other = real_nodes.node("other", "start", str(short_run(real_nodes, "other")), *way_in)
    assert other.ended(120) == 0

    def idle() -> bool:
        runs = rendezvous.ask("status")["runs"]
        return len(runs) >= 2 and not any(run["training"] for run in runs)

    until(idle, "the rendezvous sees that nobody trains any more", 120)
    undecided = real_nodes.node("undecided", "join", *way_in)
    assert undecided.ended(90) == 12
    assert undecided.printed(r"(several runs are known there, name one: \S+ \(--run [0-9a-f]{64}\), \S+ \(--run)")


def test_a_rendezvous_does_without_torch(rendezvous: Node) -> None:
    """One that has seen all this. It would take 1 s of CPU more to start, and 190 MB."""
    assert not any("libtorch" in mapped.path for mapped in psutil.Process(rendezvous.process.pid).memory_maps())


@pytest.mark.slow
def test_a_run_whose_only_node_still_reads_its_data_has_somebody(real_nodes: RealNodes, rendezvous: Node) -> None:
    """After all were restarted: the rendezvous knows the run, and its first node starts for longer than others look."""
    start = ("start", str(real_nodes.paced(step_s=0.05, steps=10)), "--bootstrap", rendezvous.address())
    author = real_nodes.node("slow", *start)
    until(author.round, "the author's training")
    invited = author.invitation()
    author.leave()
    real_nodes.environ["PACED_READY_S"] = "30"
    try:
        author = real_nodes.node("slow", *start)
    finally:
        del real_nodes.environ["PACED_READY_S"]
    volunteer = real_nodes.node("early", *invited)
    until(lambda: volunteer.process.poll() is not None or volunteer.committed(), "a round together", 150)
    assert volunteer.committed(), volunteer.log.read_text()[-2000:]
    for node in (volunteer, author):
        node.leave()


def test_coming_back_is_one_word(real_nodes: RealNodes) -> None:
    """After their nodes were all off, author and volunteer come back by `join` alone."""
    run = real_nodes.paced(step_s=0.05, steps=10, learning_rate=0.0002, outer=QUICK)
    author = real_nodes.node("one", "start", str(run), "--max-upload", "50MB", port=quiet_port())
    words = ("--max-download", "40MB", "--web", "127.0.0.1:0")
    volunteer = real_nodes.node("two", *author.invitation(), *words)
    until(volunteer.committed, "a round together")
    for node in (volunteer, author):
        node.leave()
    run.unlink()

    author = real_nodes.node("one", "join")
    until(author.round, "the author's training")
    assert author.printed(r"going on with (test-\S+), round \d+ of")
    settings = {row["name"]: row for row in author.ask("config")["settings"]}
    assert (settings["max_upload"]["value"], settings["max_upload"]["origin"]) == ("50MB", "remembered")

    volunteer = real_nodes.node("two", "join", "--max-download", "30MB")
    until(volunteer.committed, "another round together")
    assert volunteer.ask("status")["web"], "as last time"
    settings = {row["name"]: row["value"] for row in volunteer.ask("config")["settings"]}
    assert settings["max_download"] == "30MB", "a flag wins, and is kept"
    (row,) = volunteer.ask("runs")["runs"]
    assert row["running"] and row["rounds"] == 100_000
    refused = volunteer.run("runs", "--remove", row["run_id"])
    assert refused.returncode == 4 and "leave" in refused.stderr
    for node in (volunteer, author):
        node.leave()


def test_who_can_use_none_of_its_checkpoints_does_not_begin_again_unasked(real_nodes: RealNodes) -> None:
    """What it trained from the beginning would take their places. The author of the test above, which has left."""
    kept = sorted(real_nodes.root.glob("one/runs/*/checkpoints/*"))
    about = {path / "state.json": (path / "state.json").read_text() for path in kept}
    for code, there, says in (
        (12, '{"schema": 99}', "(was written by a newer version of noloco-node: update this one)"),
        (10, "{", "(none of this node's checkpoints can be used, .* with --start-over)"),
    ):
        for path in about:
            path.write_text(there)
        author = real_nodes.node("one", "join")
        assert author.ended(90) == code, author.log.read_text()[-2000:]
        assert author.printed(says), author.log.read_text()[-2000:]
        assert sorted(author.home.glob("runs/*/checkpoints/*")) == kept
    author = real_nodes.node("one", "join", "--start-over")
    until(author.round, "a round from the first weights")
    author.leave()


def test_a_run_that_nobody_holds_is_not_trained_again_unasked(real_nodes: RealNodes, over: Node, looking: Node) -> None:
    assert looking.ended(90) == 10
    assert looking.printed("(nobody is in test-[0-9a-f]{12} at this moment, .* with --start-over)")
    assert not list(looking.home.glob("runs/*")), "a start that failed leaves nothing of the run"

    asked = real_nodes.node("volunteer", *over.invitation(), "--start-over")
    assert asked.ended(120) == 0, asked.log.read_text()[-2000:]
    assert list(asked.home.glob("runs/*/checkpoints/*/state.json"))

    again = real_nodes.node("volunteer", "join")
    assert again.ended(60) == 0
    assert again.printed("(is over)")


def test_who_can_use_none_of_its_checkpoints_waits_for_the_others(real_nodes: RealNodes, rendezvous: Node) -> None:
    """After a power cut it is back before they are."""
    run = real_nodes.paced(step_s=0.04, steps=10, learning_rate=0.0002, outer=QUICK)
    author = real_nodes.node("first", "start", str(run), "--bootstrap", rendezvous.address())
    volunteer = real_nodes.node("second", *author.invitation())
    until(volunteer.committed, "a round together")
    for node in (volunteer, author):
        node.leave()
    for path in volunteer.home.glob("runs/*/checkpoints/*/outer.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    volunteer = real_nodes.node("second", "join")
    until(
        lambda: volunteer.printed(r"(checkpoint \S+ is skipped: outer\.safetensors is not what was)"), "its model", 60
    )
    author = real_nodes.node("first", "join")
    until(lambda: volunteer.process.poll() is not None or volunteer.committed(), "another round together")
    assert volunteer.printed("(received the state of)"), volunteer.log.read_text()[-2000:]
    for node in (volunteer, author):
        node.leave()
