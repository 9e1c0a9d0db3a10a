"""What is remembered, and what is forgotten first."""

from noloco_node.base.latest import remember


def test_the_oldest_is_forgotten_unless_it_is_to_be_kept() -> None:
    known: dict[str, int] = {}
    for number, key in enumerate("abcd"):
        remember(known, key, number, 3, keep="ab")
    assert known == {"a": 0, "b": 1, "d": 3}
    remember(known, "a", 4, 3)
    remember(known, "e", 5, 3)
    assert known == {"d": 3, "a": 4, "e": 5}, "met again is the latest"
    remember(known, "f", 6, 3, keep="daef")
    assert known == {"a": 4, "e": 5, "f": 6}, "where all are to be kept, the oldest"
