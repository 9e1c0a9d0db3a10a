"""A node's figures from its events: shares of time without pauses, losses, traffic by partner."""

import pytest

from noloco_node.base.events import PeerFaulted, PhaseDone, RolledBack, RoundCommitted, Sampled, TakenBack, WentSolo
from noloco_node.observe.stats import MINUTE_S, PEERS, SHORTENED_SWAPS, NodeStats
from noloco_node.training.time_accounts import ACCOUNTS, Spent, StepTimer, TimeAccounts
from noloco_node.views.peers import PeerRow
from noloco_node.views.status import LastTakenBack, Phase, SampleView, StatusView


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_goes_to_one_account() -> None:
    clock = Clock()
    times = TimeAccounts(clock)

    def passes(seconds: float) -> None:
        clock.now += seconds

    with times.on("evaluate"):
        passes(7)
    assert not any(times.so_far().accounts.values()), "not begun"
    times.start()
    with times.on("waiting"):
        passes(2)
        with times.on("apply"):
            passes(0.5)
        passes(1)
    passes(0.25)
    with pytest.raises(ZeroDivisionError), times.on("step"):
        passes(4)
        raise ZeroDivisionError
    assert times.stall_s() == 0.5
    times.stop()
    passes(50)
    expected = dict.fromkeys(ACCOUNTS, 0.0) | {"waiting": 3.0, "apply": 0.5, "other": 0.25, "step": 4.0}
    assert times.so_far() == Spent(expected)


class Gpu:
    """A card that works through its queue by the same clock as the host's."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.done_at = clock, 0.0

    def work(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.clock.now) + seconds

    def mark(self) -> "Mark":
        return Mark(self)


class Mark:
    """As torch.cuda.Event, recorded."""

    def __init__(self, gpu: Gpu) -> None:
        self.at, self.clock = max(gpu.done_at, gpu.clock.now), gpu.clock

    def query(self) -> bool:
        return self.clock.now >= self.at

    def elapsed_time(self, end: "Mark") -> float:
        assert end.query(), "torch raises for an event that is still to come"
        return 1e3 * (end.at - self.at)


def test_a_gpu_counts_as_busy_with_steps_by_its_own_clock() -> None:
    """The host hands over a step of 3 s in 1 s and goes on; what the card does between two steps is not training."""
    clock = Clock()
    gpu = Gpu(clock)
    timer = StepTimer(gpu.mark, clock)

    def step() -> None:
        with timer.step():
            gpu.work(3)
            clock.now += 1

    step()
    assert timer.seconds() == 1.0, "the host's time, until the card has done it"
    clock.now += 1
    gpu.work(0.5)  # a correction, behind the step
    step()
    clock.now += 0.5
    assert timer.seconds() == 3.0 + 1.0
    clock.now += 100
    assert timer.seconds() == 6.0, "it waited for the host since"
    with pytest.raises(ZeroDivisionError), timer.step():
        gpu.work(2)
        raise ZeroDivisionError
    clock.now += 2
    assert timer.seconds() == 8.0


def shown(stats: NodeStats, state: str = "training") -> StatusView:
    return stats.fill(StatusView(peer_id="me", name="brisk-heron", version="0", state=state))


def busy(stats: NodeStats) -> tuple[float | None, float | None]:
    return shown(stats).busy_fraction, shown(stats).busy_fraction_minute


def row(stats: NodeStats, peer: str) -> tuple[int, int, int]:
    row = stats.fill_row(PeerRow(peer_id=peer, name=peer, state="training", round=0, lag=0))
    return row.exchanges, row.sent, row.received


def test_busy_since_the_start_and_over_the_last_minute() -> None:
    stats = NodeStats()
    assert busy(stats) == (None, None)
    for second in range(1, 301):
        stats.spend(Spent({"step": float(min(second, 200)), "waiting": float(max(0, second - 200)), "paused": 0.0}))
        assert len(stats._minute) <= MINUTE_S + 1
    assert busy(stats) == (pytest.approx(2 / 3), 0.0)
    for second in range(301, 331):
        stats.spend(Spent({"step": 200.0 + second - 300, "waiting": 100.0, "paused": 0.0}))
    assert busy(stats)[1] == pytest.approx(0.5)


def test_the_first_minute_counts_from_the_start() -> None:
    stats = NodeStats()
    for second in range(1, 91):
        stats.spend(
            Spent({"step": min(second, 2.0) + max(0.0, second - 30), "evaluate": min(max(0.0, second - 2), 28.0)})
        )
        share, minute = busy(stats)
        assert second > MINUTE_S or share == minute
    assert (share, minute) == (pytest.approx(62 / 90), 1.0)


def test_a_pause_is_not_idling() -> None:
    stats = NodeStats()
    stats.spend(Spent({"step": 90.0, "other": 10.0, "paused": 0.0}))
    for second in range(1, 101):
        stats.spend(Spent({"step": 90.0, "other": 10.0, "paused": float(second)}))
    assert busy(stats) == (0.9, None), "nobody knows how busy it would have been"
    assert shown(stats).time_s["paused"] == 100


def test_the_last_minute_is_that_of_now() -> None:
    stats = NodeStats()
    stats.spend(Spent({"step": 0.75 * MINUTE_S, "other": 0.25 * MINUTE_S}))
    stats.observe(PhaseDone(1, 50, 5.0, 1000, 10.0, mfu=0.4))
    for state, minute in (("training", 0.75), ("paused", None), ("finished", None), ("leaving", None)):
        view = shown(stats, state)
        assert view.busy_fraction_minute == minute, state
        assert (view.tokens_per_s, view.mfu, view.loss, view.busy_fraction) == (100.0, 0.4, 5.0, 0.75)


def test_busy_is_a_gpus_own_time_where_there_is_one() -> None:
    stats = NodeStats()
    stats.spend(Spent({"step": 50.0, "other": 50.0}, 80.0))
    assert busy(stats) == (0.8, None)
    stats.spend(Spent({"step": 60.0, "other": 50.0}, 91.0))
    assert busy(stats) == (pytest.approx(91 / 110), 1.0), "a second of that was begun before"


def test_the_latest_sample_text() -> None:
    stats = NodeStats()
    assert shown(stats).sample is None
    for round_ in (10, 20):
        stats.observe(Sampled(round_, "the", " cat"))
    assert shown(stats).sample == SampleView(20, "the", " cat")


def test_the_stall_of_the_last_round() -> None:
    stats = NodeStats()
    stats.observe(PhaseDone(1, 50, 5.0, 1000, 10.0, stall_ms=3.5))
    assert shown(stats).stall_ms == 3.5


def test_within_a_phase_the_step_goes_on_and_other_figures_are_of_the_last_phase():
    stats = NodeStats()
    stats.progress(23, Phase(0.46, 60.0, 5.5, 90.0))
    assert (shown(stats).step, shown(stats).loss, stats.step) == (23, None, 0)
    stats.observe(PhaseDone(1, 50, 5.0, 1000, 10.0))
    assert (shown(stats).step, shown(stats).phase) == (50, None)
    stats.progress(51, Phase(0.02, 60.0, 4.9, 90.0))
    assert (shown(stats).step, shown(stats).loss) == (51, 5.0)


@pytest.mark.parametrize(("steps_a_round", "step"), [(50, 3000), (None, 700)])
def test_a_start_and_a_peers_state_move_the_step(steps_a_round: int | None, step: int) -> None:
    stats = NodeStats(steps_a_round=steps_a_round)
    stats.move_to(40, 700)
    assert (shown(stats).round, shown(stats).step, stats.step) == (40, 700, 700)
    stats.move_to(60)
    assert (shown(stats).round, shown(stats).step, stats.step) == (60, step, step)


def test_the_time_left_follows_the_pace_of_the_last_rounds() -> None:
    """With what comes between two phases, without pauses; before the first round is over, at the first phase's pace."""
    stats = NodeStats()
    assert shown(stats).left_s is None
    stats.rounds_target, stats.steps_a_round = 10, 50
    assert (shown(stats).left_s, shown(stats).steps_target) == (None, 500)
    stats.progress(25, Phase(0.5, 6.0))
    assert shown(stats).left_s == pytest.approx(9.5 * 12.0)
    clock = {"step": 0.0, "evaluate": 0.0, "paused": 0.0}
    for round in range(1, 5):
        clock = {"step": 10.0 * round, "evaluate": 5.0 * round, "paused": 1000.0 * round}
        stats.spend(Spent(clock))
        stats.observe(PhaseDone(round, 50 * round, 5.0, 1000, 10.0))
    stats.phase_s = 12.0
    assert shown(stats).left_s == pytest.approx(6 * 15.0)
    assert shown(stats, "paused").left_s is None, "nothing comes closer"
    stats.progress(225, Phase(0.5, 5.0))
    assert shown(stats).left_s == pytest.approx(5.5 * 15.0)
    stats.observe(PhaseDone(8, 400, 5.0, 1000, 12.0))
    assert shown(stats).left_s == pytest.approx(2 * 12.0), "a peer's state: the rounds between were not its own"
    stats.observe(PhaseDone(10, 500, 5.0, 1000, 12.0))
    assert shown(stats).left_s == 0.0


def test_in_the_first_phase_by_time_a_round_takes_what_the_run_says() -> None:
    """The steps that are left of it are whole ones: with one of 29 s a phase of 60 s once seemed to take 870 s."""
    stats = NodeStats(rounds_target=100, seconds_a_round=60.0)
    stats.progress(2, Phase(58 / 60, 29.0))
    assert shown(stats).left_s == pytest.approx(100 * 60 - 58)
    for round, ended in ((1, 87.0), (2, 145.0)):
        stats.spend(Spent({"step": ended}))
        stats.observe(PhaseDone(round, 2 * round, 5.0, 1000, 58.0))
    assert shown(stats).left_s == pytest.approx(98 * 58.0), "at the pace of the last rounds"


def test_of_a_phase_that_was_resumed_at_its_end_the_time_left_is_by_a_whole_one() -> None:
    stats = NodeStats(rounds_target=10, phase_s=20.0)
    stats.observe(PhaseDone(7, 350, 5.0, tokens=100, seconds=2.0))
    assert shown(stats).left_s == 3 * 20.0


def test_a_phase_without_a_step_shows_no_rate_and_no_time_left() -> None:
    """As the first one of a node that comes back with a checkpoint of a phase's end."""
    stats = NodeStats(rounds_target=10)
    stats.observe(PhaseDone(7, 350, 5.0, tokens=0, seconds=0.002))
    assert shown(stats).loss == 5.0
    assert shown(stats).tokens_per_s is shown(stats).left_s is None


def test_with_phases_by_time_no_step_is_the_last() -> None:
    stats = NodeStats(rounds_target=10)
    assert shown(stats).steps_target is None


def test_bytes_of_broken_swaps_count_too() -> None:
    stats = NodeStats()
    assert stats.per_param_round(1000, 700) is None, "no round yet"
    stats.observe(RoundCommitted(1, "p", 1.0, 500, 500))
    stats.observe(RoundCommitted(1, "q", 1.0, 500, 500, swap=2))
    stats.observe(WentSolo(2, "silent", "p", applied=1))
    stats.observe(RoundCommitted(3, "q", 1.0, 500, 500))
    assert stats.per_param_round(1000, 1500 + 300) == 0.9, "two rounds; a further swap, and one that broke"
    assert row(stats, "q") == (2, 1000, 1000)


def test_a_node_whose_own_bounds_shorten_most_corrections_is_told_until_they_do_not() -> None:
    """As a machine that is much slower than the others finds with phases by time: it would never learn why its loss
    stays above theirs."""
    stats = NodeStats()

    def swaps(count: int, allowed: float) -> float | None:
        for _ in range(count):
            stats.observe(RoundCommitted(1, "p", 1.0, 10, 10, allowed=allowed))
        return stats.shortened_to

    assert swaps(SHORTENED_SWAPS - 1, 0.05) is None, "too few to judge by"
    assert swaps(1, 0.05) == 0.05
    assert swaps(3, 1.0) == 0.05, "still most"
    assert swaps(1, 1.0) is None
    assert swaps(2 * SHORTENED_SWAPS, 0.4) is None, "as beside machines five times as fast"


def test_faults_are_counted() -> None:
    stats = NodeStats()
    for event in (PeerFaulted("p", "bad_digest"), RolledBack(3, None, "nan"), PeerFaulted("q", "bad_digest")):
        stats.observe(event)
    assert (shown(stats).faults, shown(stats).rolled_back) == ({"bad_digest": 2}, 1)


def test_corrections_that_were_taken_back_are_counted() -> None:
    stats = NodeStats()
    assert (shown(stats).taken_back, shown(stats).last_taken_back) == (0, None)
    for event in (TakenBack(3, "p", 9.0, 2.0), TakenBack(8, "q", 4.0, 1.5)):
        stats.observe(event)
    assert (shown(stats).taken_back, shown(stats).last_taken_back) == (2, LastTakenBack("q", 8, 4.0, 1.5))


def test_only_the_latest_partners_are_kept() -> None:
    stats = NodeStats()
    for number in range(2 * PEERS):
        for partner in (f"peer {number}", "a friend"):
            stats.observe(RoundCommitted(number, partner, 1.0, 10, 20))
    partners = shown(stats).partners
    assert len(partners) == PEERS
    assert partners["a friend"] == 2 * PEERS
    assert list(partners)[-2:] == [f"peer {2 * PEERS - 1}", "a friend"]
    assert row(stats, "peer 0") == (0, 0, 0)
