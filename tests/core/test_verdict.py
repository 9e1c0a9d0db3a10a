"""Whether a swap did harm, by held-out losses."""

import math

import pytest

from noloco_node.core.verdict import is_harmful


@pytest.mark.parametrize(
    ("without", "with_it", "partner", "harmful"),
    [
        (2.0, 1.95, 9.0, False),  # better
        (2.0, 2.01, 9.0, False),  # as in an honest swap
        (2.0, 2.1, 2.3, True),  # what was sent is worse than the middle
        (2.0, 2.1, 2.02, False),  # the partner is as good: two halves that trained apart
        (2.0, math.nan, 2.0, True),
        (2.0, 5.5, math.nan, True),
        (math.nan, math.nan, math.nan, False),  # there was nothing to spoil
        (math.inf, 3.0, 2.0, False),
    ],
)
def test_verdicts(without: float, with_it: float, partner: float, harmful: bool) -> None:
    assert is_harmful(without, with_it, lambda: partner) is harmful


def test_the_partner_is_evaluated_only_where_it_decides() -> None:
    def never() -> float:
        raise AssertionError

    assert not is_harmful(2.0, 1.9, never)
