"""A partner that freezes, and what a volunteer allows, with real processes: training goes on, nobody waits for it."""

import os
import signal
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from village import Node, Village, until

pytestmark = pytest.mark.timeout(150)

UPLOAD_BYTES_S = 800_000
"""A swap takes ten seconds, so that who looks for its middle has time to come upon it."""
VECTOR_BYTES = 8.4e6


@pytest.fixture
def village() -> Iterator[Village]:
    """Each test has its own."""
    with Village() as village:
        yield village


def step_rates(node: Node, after: float, before: float) -> list[float]:
    phases = [e for e in node.events("PhaseDone") if after < e["at"] < before]
    return [e["tokens"] / e["seconds"] for e in phases]


def test_a_partner_that_freezes_costs_a_round_and_no_step(village: Village) -> None:
    # in phases of some seconds whatever the machine, so that a frozen swap lives within few of them
    author = village.node("author", "start", str(village.llama(seconds=4.0, codec="bf16")))
    slow = village.node("slow", "join", "--bootstrap", author.address(), "--max-upload", str(UPLOAD_BYTES_S))

    def in_the_middle() -> bool:
        status = author.ask("status")
        over = status["today"]["received"] - status["rounds"]["committed"] * VECTOR_BYTES if status else 0
        return 0.35 * VECTOR_BYTES < over < 0.55 * VECTOR_BYTES

    until(in_the_middle, "a swap that is well under way")
    os.kill(slow.process.pid, signal.SIGSTOP)
    frozen = time.time()
    try:
        broken = until(lambda: _broken(author, frozen), "the end of the swap", 30)
    finally:
        os.kill(slow.process.pid, signal.SIGCONT)
    assert broken["reason"] == "silent", author.events("WentSolo")
    assert 15 < broken["at"] - frozen < 26, "at its deadline"
    assert 1 <= broken["applied"] < 5, "what was applied stays, and counts"
    assert broken["one_sided"] <= 1
    status = author.ask("status")
    assert status["rounds"]["by_reason"]["silent"] == 1
    assert status["rounds"]["by_reason"]["swapping"] >= 3, "rounds went on"

    rates = step_rates(author, frozen + 4, broken["at"])
    usual = step_rates(author, 0, frozen)
    assert len(rates) >= 3
    assert median(rates) >= 0.9 * median(usual), "nothing in training waited"

    back = until(lambda: [e for e in author.events("RoundCommitted") if e["at"] > broken["at"]], "it is back", 40)
    assert back[0]["seconds"] >= 0.8 * VECTOR_BYTES / UPLOAD_BYTES_S, "held at its rate"


def _broken(author: Node, frozen: float) -> dict[str, Any] | None:
    solo = [e for e in author.events("WentSolo") if e["at"] > frozen and e["partner"]]
    return solo[0] if solo else None


def test_pause_resume_and_a_quota_that_outlives_a_restart(village: Village) -> None:
    author = village.node("author", "start", str(village.manifest(warmup="0.0")))
    there = author.address()
    other = village.node("other", "join", "--bootstrap", there, "--daily-upload", "40MB")
    until(lambda: other.committed() >= 1, "a round together")

    other.tell("pause")
    paused = other.ask("status")
    assert (paused["state"], paused["waiting_for"]) == ("paused", "`noloco-node resume`")
    until(lambda: [row["state"] for row in author.ask("peers")["peers"]] == ["paused"], "it stands there as paused", 20)
    at_rest, alone = other.ask("status")["step"], author.round() + 2
    until(lambda: author.round() >= alone, "the author's rounds go on")
    assert other.ask("status")["step"] == at_rest
    other.tell("resume")
    committed = paused["rounds"]["committed"]
    until(lambda: other.committed() > committed, "it goes on by itself", 40)

    sent = other.ask("status")["today"]["sent"]
    other.leave()
    again = village.node("other", "join", "--bootstrap", there, "--daily-upload", f"{sent + 1_000_000}")
    solo = until(lambda: again.ask("status").get("rounds", {}).get("by_reason", {}).get("quota"), "its quota's end")
    status = again.ask("status")
    assert solo >= 1
    assert status["state"] == "training"
    assert status["today"]["sent"] >= sent, "counted over the restart"
    assert "--daily-upload" in status["health"][0]["remedy"]
