"""What a volunteer allows, and what `status` warns of. That a pause outlives the node: test_state_files.py."""

import asyncio
import time
from pathlib import Path

import pytest
from virtual_clock import run_virtual

from noloco_node.base.events import RoundCommitted, WentSolo
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.host.limits import PAUSED, Hours
from noloco_node.host.policy import Policy
from noloco_node.host.traffic import SAVED_S, read_day, today
from noloco_node.observe.stats import NodeStats


def allowance(home: Path, **settings: float) -> Policy:
    return Policy(NodeConfig(home=home, **settings), Home(home), lambda: None)


async def test_a_home_that_cannot_be_written_costs_the_mark_alone(tmp_path: Path) -> None:
    gone = allowance(tmp_path / "gone")
    gone.pause()
    await gone.keep_mark()
    assert gone.held_back() == PAUSED
    gone.resume()
    await gone.keep_mark()
    assert gone.held_back() is None


def test_hours_and_the_day_follow_the_machines_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    hour = time.gmtime().tm_hour
    node = allowance(tmp_path, hours=Hours.parse(f"{hour:02}:00-{(hour + 2) % 24:02}:00"))
    try:
        assert node.held_back() is None
        day = today()
        monkeypatch.setenv("TZ", "EAST-12" if hour >= 12 else "WEST12")
        assert node.held_back() == PAUSED and today() != day
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_states_leave_half_of_the_days_upload_for_swaps(tmp_path: Path) -> None:
    node = allowance(tmp_path, daily_upload=1000)
    assert node.room_to_give(500) and not node.room_to_give(450, 100)
    await node.traffic.sending(400)
    assert not node.room_to_give(200) and node.room_to_send(200)


@pytest.mark.parametrize(
    ("limits", "bytes_s"),
    [
        ({}, 2_000_000),
        ({"max_upload": 1e6}, 500_000),
        ({"daily_upload": 20_000_000_000}, 115_741),
        ({"max_upload": 1e6, "daily_upload": 10**12}, 500_000),
    ],
)
def test_answers_to_look_ups_take_half_of_the_upload_at_most(
    tmp_path: Path, limits: dict[str, float], bytes_s: float
) -> None:
    async def main() -> None:
        traffic, answered = allowance(tmp_path, **limits).traffic, 0
        for second in range(600):
            for caller in range(40):
                answered += 100_000 * traffic.may_answer(100_000, f"place {caller}")
            await asyncio.sleep(1)
            assert answered <= bytes_s * (second + SAVED_S) + 100_000
        assert answered == traffic.used.sent > 0.95 * 600 * bytes_s

    run_virtual(main())


def test_small_answers_keep_no_swap_waiting(tmp_path: Path) -> None:
    """Ten places that asked for what is nowhere had 130 kB/s of 64, and a swap waited for ten minutes."""

    async def main() -> None:
        traffic = allowance(tmp_path, max_upload=64_000.0).traffic
        for _ in range(600):
            for number in range(260):
                traffic.may_answer(500, f"place {number % 10}")
            await asyncio.sleep(1)
        assert 0.95 * 32_000 * 600 < traffic.used.sent < 1.1 * 32_000 * 600
        began = asyncio.get_running_loop().time()
        await traffic.sending(100_000)
        assert asyncio.get_running_loop().time() < began + 2

    run_virtual(main())


async def test_one_state_that_is_more_than_half_of_the_days_upload_may_be_given(tmp_path: Path) -> None:
    """Else a run of such nodes would let nobody in."""
    node = allowance(tmp_path, daily_upload=1000)
    assert node.room_to_give(700) and not node.room_to_give(700, 700)
    assert not node.room_to_give(400, 400), "one that is less than half leaves half for swaps, beside another"
    await node.traffic.sending(700)
    assert not node.room_to_give(700)


async def test_todays_traffic_is_saved(tmp_path: Path) -> None:
    node = allowance(tmp_path)
    for sent, saved in ((5, 5), (7, 12), (0, 12)):
        await node.traffic.sending(sent)
        await node.write_down()
        assert read_day(tmp_path / "traffic.json").sent == saved
    gone = allowance(tmp_path / "gone")
    await gone.traffic.sending(5)
    await gone.write_down()  # a home that cannot be written costs no more than the count


async def test_a_used_quota_stops_a_stage_and_only_the_swaps_of_a_whole_model(tmp_path: Path) -> None:
    node = allowance(tmp_path, daily_upload=1_000_000)
    await node.traffic.sending(1_000_000)
    (whole,), (stage,) = node.health(swaps_fit=True), node.health(swaps_fit=True, staged=True)
    assert whole.text.endswith("training goes on without swaps until midnight")
    assert stage.text.endswith("this stage neither trains nor answers others until midnight")


def test_swaps_that_do_not_fit_are_said_with_what_would_help(tmp_path: Path) -> None:
    ledger = NodeStats()
    for reason, fits in (("silent", True), ("too_slow", False), ("swapping", False)):
        ledger.observe(WentSolo(1, reason, None if reason == "swapping" else "b"))
        assert ledger.swaps_fit == fits
    (finding,) = allowance(tmp_path, max_upload=50_000.0).health(ledger.swaps_fit)
    assert finding.text.startswith("swaps do not fit")
    assert finding.remedy == "raise --max-upload, or ask the run's author for longer phases"
    (finding,) = allowance(tmp_path).health(swaps_fit=False)
    assert finding.remedy == "ask the run's author for longer phases"
    ledger.observe(RoundCommitted(2, "b", 1.0, 1, 1))
    assert allowance(tmp_path, max_upload=50_000.0).health(ledger.swaps_fit) == ()
