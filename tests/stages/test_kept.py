"""Whose held-out data a stage measures with: pure."""

from noloco_node.stages.kept import MOST_USES, Kept


def test_who_sends_nothing_any_more_is_forgotten_after_some_rounds() -> None:
    """It has left, or its data go to another node: this one would measure with its activations for ever."""
    kept = Kept[str]()
    kept.keep("gone", "old", 1, 8)
    for use in range(MOST_USES):
        kept.keep("here", f"new {use}", 1, 1)
        assert kept.of_each() == [["old"], [f"new {use}"]]
    assert kept.of_each() == [[f"new {MOST_USES - 1}"]]
    assert all(kept.of_each() for _ in range(MOST_USES - 2)) and not kept.of_each()
    kept.keep("gone", "back", 1, 8)
    assert kept.of_each() == [["back"]]
