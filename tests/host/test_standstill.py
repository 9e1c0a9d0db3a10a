import time

from noloco_node.host import standstill
from noloco_node.host.standstill import LONG_S, LOOK_S, Standstill


def test_a_standstill_is_noticed_once() -> None:
    now = 0.0
    still = Standstill(lambda: now)
    found = []
    for step_s in (LOOK_S, 10 * LOOK_S, 8 * 3600.0, LOOK_S, LONG_S + 1, LOOK_S):
        now += step_s
        found.append(still.is_over())
    assert found == [False, False, True, False, True, False]


def test_the_clock_counts_a_machines_sleep_and_nobody_sets_it() -> None:
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert abs(standstill.clock() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1.0
    before = standstill.clock()
    assert before <= standstill.clock()
