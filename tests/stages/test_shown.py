"""How fast micro-batches pass, and for how long none has."""

from noloco_node.stages.shown import RATE_S, MicroBatchRate


def test_the_time_without_a_micro_batch_is_that_in_which_the_node_worked() -> None:
    rate = MicroBatchRate()
    assert (rate.idle_s, rate.per_s) == (0.0, None)
    for second in range(100):
        rate.note(second, min(second, 50))
    assert rate.idle_s == 49.0
    assert rate.per_s == (50 - min(50, 99 - RATE_S)) / RATE_S
    rate.note(100, 50, works=False)
    rate.note(101, 50)
    assert rate.idle_s == 1.0


def test_a_node_that_stood_still_was_not_idle() -> None:
    """Half of the stage before may have come to the end meanwhile: it would take the rest for gone."""
    rate = MicroBatchRate()
    for second in range(60):
        rate.note(float(second), 5)
    assert rate.idle_s == 59
    rate.note(8 * 3600.0, 5)
    assert rate.idle_s == 0
    rate.note(8 * 3600.0 + 2, 5)
    assert rate.idle_s == 2
