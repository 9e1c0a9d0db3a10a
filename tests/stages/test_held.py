"""What is here of others: micro-batches, and held-out data to measure with."""

import pytest

from noloco_node.errors import PeerRefused
from noloco_node.stages import held as held_module


def test_what_a_caller_may_take_and_what_it_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "MOST_HELD_BYTES", 100)
    monkeypatch.setattr(held_module, "MOST_BYTES_OF_CALLER", 50)
    held = held_module.Held()
    with held.call("a") as first:
        first.take(80)  # a single one may be as large as all together
        with pytest.raises(PeerRefused), held.call("a") as second:
            second.take(1)
        with held.call("b") as other:
            other.take(20)
            other.arrive()
            with pytest.raises(PeerRefused):
                first.take(1)
            assert held.callers == {"b": 1} and held.free == held_module.MOST_HELD - 1
    assert not held.calls and not held.callers and not held.bytes


def test_who_sends_nothing_any_more_is_forgotten_after_some_rounds() -> None:
    """It has left, or its data go to another node: this one would measure with its activations for ever."""
    kept = held_module.Kept[str]()
    kept.keep("gone", "old", 1, 8)
    for round_ in range(held_module.MOST_ROUNDS):
        kept.keep("here", f"new {round_}", 1, 1)
        kept.next_round()
        assert all(kept.of_each() == [["old"], [f"new {round_}"]] for _ in range(9)), "as often as wanted, in a round"
    kept.next_round()
    assert kept.of_each() == [[f"new {held_module.MOST_ROUNDS - 1}"]]
    for _ in range(held_module.MOST_ROUNDS - 2):
        kept.next_round()
    assert kept.of_each()
    kept.next_round()
    assert not kept.of_each()
    kept.keep("gone", "back", 1, 8)
    assert kept.of_each() == [["back"]]
