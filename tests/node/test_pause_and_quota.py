"""Pause, resume, and a day's quota of bytes that is counted over a restart, with real processes."""

import pytest
from real_nodes import RealNodes, until

pytestmark = pytest.mark.timeout(400)


def test_pause_resume_and_a_quota_that_outlives_a_restart(real_nodes: RealNodes) -> None:
    # It learns slowly: else a swap with who was away for 20 rounds is taken back, and the next one a minute later.
    author = real_nodes.node("author", "start", str(real_nodes.paced(outputs=1600, seconds=0.5, learning_rate=0.0002)))
    there = author.address()
    other = real_nodes.node("other", "join", "--bootstrap", there, "--daily-upload", "40MB")
    until(lambda: other.committed() >= 1, "a round together")

    other.command("pause")
    paused = other.ask("status")
    assert (paused["state"], paused["waiting_for"]) == ("paused", "`noloco-node resume`")
    until(lambda: [row["state"] for row in author.ask("peers")["peers"]] == ["paused"], "it stands there as paused", 20)
    at_rest, alone = other.ask("status")["step"], author.round() + 2
    until(lambda: author.round() >= alone, "the author's rounds go on")
    assert other.ask("status")["step"] == at_rest
    other.command("resume")
    committed = paused["rounds"]["committed"]
    until(lambda: other.committed() > committed, "it goes on by itself", 40)

    before = other.ask("status")
    sent = before["today"]["sent"]
    other.leave()
    assert other.printed(rf"left {before['run']} at round \d+ of \d+: (\d+) rounds \(\d+ together, \d+ solo\) in ")
    assert other.printed(r"its checkpoint of round \d+ \(.*\): (\S+/checkpoints)\n") in map(
        str, other.home.glob("runs/*/checkpoints")
    )
    assert other.printed("to go on: (noloco-node join --home .*)") == f"noloco-node join --home {other.home}"
    again = real_nodes.node("other", "join", "--bootstrap", there, "--daily-upload", f"{sent + 1_000_000}")
    today = until(lambda: again.ask("status").get("today"), "the day's count")
    assert today["sent"] >= sent, "counted over the restart, before anything is sent again"
    solo = until(lambda: again.ask("status").get("rounds", {}).get("by_reason", {}).get("quota"), "its quota's end")
    status = again.ask("status")
    assert solo >= 1
    assert status["state"] == "training"
    assert status["tokens"] > before["tokens"], "these, too"
    assert "--daily-upload" in status["health"][0]["remedy"]
