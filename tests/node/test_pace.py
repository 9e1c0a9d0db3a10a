"""Real nodes whose task is paced: a slow box costs the others nothing, what the network side costs, and long pauses.

The paced task's steps take a fixed time and hardly any CPU, so that the cores are no bottleneck on a small machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from real_nodes import Node, RealNodes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SPAN = 8
"""Phases that a step rate is measured over."""
ROUNDS = 6


@pytest.fixture
def real_nodes() -> Iterator[RealNodes]:
    """Each test has its own."""
    with RealNodes() as real_nodes:
        yield real_nodes


def committed(node: Node) -> int:
    return len(node.events("RoundCommitted"))


def step_rate(node: Node, phases: int) -> float:
    """Over so many phases from now on, wall-clock."""
    before = len(node.events("PhaseDone"))
    done = until(lambda: (e := node.events("PhaseDone"))[before + phases :] and e, f"{phases} phases")
    first, last = done[before], done[before + phases]
    return (last["steps"] - first["steps"]) / (last["at"] - first["at"])


def test_a_slow_box_holds_nobody_back(real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.paced(step_s=0.1, seconds=2.0)))
    there = author.address()
    other = real_nodes.node("other", "join", "--bootstrap", there)
    until(lambda: other.said(r"(round \d+ with)"), "a round of the two")
    usual = [step_rate(node, SPAN) for node in (author, other)]
    real_nodes.environ["PACED_SLOWER"] = "4"
    slow = real_nodes.node("slow", "join", "--bootstrap", there)
    until(lambda: slow.said(r"(round \d+ with)"), "the slow one's first round with somebody")
    before = committed(slow)
    beside = [step_rate(node, SPAN) for node in (author, other)]
    own = step_rate(slow, 1)
    assert committed(slow) > before, "it took part meanwhile"
    with capsys.disabled():
        print(  # noqa: T201
            f"\n  steps a second: {usual[0]:.2f} and {usual[1]:.2f}, beside a slow box ({own:.2f}) {beside[0]:.2f} and "
            f"{beside[1]:.2f}; busy {author.ask('status')['busy_fraction_minute']:.3f}"
        )
    assert own < 0.4 * usual[0]
    assert all(with_it >= 0.95 * without for with_it, without in zip(beside, usual, strict=True))


@dataclass
class Cpu:
    """CPU seconds of a node so far."""

    network: float
    training: float
    daemon: float

    @classmethod
    def of(cls, node: Node) -> "Cpu":
        """The training thread is the one that has worked most: the model is trained all the time."""
        me = psutil.Process(node.process.pid)
        threads = sorted(t.user_time + t.system_time for t in me.threads())
        daemons = [sum(c.cpu_times()[:2]) for c in me.children(recursive=True) if c.name() == "p2pd"]
        return cls(sum(threads[:-1]), threads[-1], sum(daemons))

    def since(self, before: "Cpu") -> float:
        return self.network - before.network + self.daemon - before.daemon


def test_what_the_network_side_costs(real_nodes: RealNodes, capsys: pytest.CaptureFixture[str]) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.llama(seconds=3.0)))
    there = author.address()
    until(lambda: author.events("PhaseDone"), "training alone")
    alone, since = Cpu.of(author), len(author.events("PhaseDone"))
    until(lambda: len(author.events("PhaseDone")) >= since + 3, "three phases alone")
    idle = Cpu.of(author).since(alone) / 3
    other = real_nodes.node("other", "join", "--bootstrap", there)
    until(lambda: author.said(r"(round \d+ with)"), "a round together")
    began, phases, rounds = Cpu.of(author), len(author.events("PhaseDone")), committed(author)
    until(lambda: committed(author) >= rounds + ROUNDS, "more of them", 120)
    spent = Cpu.of(author)
    rounds, phases = committed(author) - rounds, len(author.events("PhaseDone")) - phases
    parameters = author.ask("status")["parameters"]
    per_round = (spent.since(began) - idle * phases) / rounds
    with capsys.disabled():
        print(  # noqa: T201
            f"\n  network side: {per_round:.3f} CPU s a round of {parameters / 1e6:.1f} M parameters beyond the "
            f"{idle:.3f} s that it takes a phase anyway, {per_round * 1e8 / parameters:.2f} s per 100 M; of all "
            f"{(spent.daemon - began.daemon) / spent.since(began):.0%} in p2pd"
        )
    assert spent.training > 2 * spent.network, "it was the training thread that was left out"
    assert 0 < per_round * 1e8 / parameters < 20
    other.kill()


def test_a_pause_outlives_a_restart_and_who_returns_takes_a_state_worth_more(real_nodes: RealNodes) -> None:
    author = real_nodes.node("author", "start", str(real_nodes.paced(step_s=0.1, seconds=0.5)))
    other = real_nodes.node("other", "join", "--bootstrap", author.address())
    until(lambda: other.said(r"(round \d+ with)"), "a round together")
    (there,) = other.ask("status")["addresses"]
    author.tell("pause")
    paused = author.ask("status")
    assert (paused["state"], paused["waiting_for"]) == ("paused", "`noloco-node resume`")
    author.leave()

    again = real_nodes.node("author", "join", "--bootstrap", there)
    until(lambda: again.ask("status").get("state") == "paused", "it is paused as before")
    asleep = again.ask("status")
    assert asleep["waiting_for"] == "`noloco-node resume` (paused before this start)"
    assert asleep["round"] - paused["round"] in (0, 1)

    def seen() -> list[tuple[int, str]]:
        return [(row["round"], row["state"]) for row in again.ask("peers").get("peers", ())]

    until(lambda: any(round > asleep["round"] + 12 for round, _ in seen()), "the other is far ahead")
    other.tell("pause")
    until(lambda: [state for _, state in seen()] == ["paused"], "which pauses, too", 60)
    again.tell("resume")
    taken = again.took(within_s=30)
    assert taken > asleep["round"] + 12, "the state of one that pauses"
    back = until(lambda: [e for e in again.events("PhaseDone") if e["round"] == taken + 1], "it trains on")
    assert back[0]["tokens"] <= 2 * 8 * 5, "a phase of its own"
    assert not (again.home / "paused").exists()
