"""Numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.base import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (100_000, "100 kB"),
        (999_600, "1.0 MB"),
        (12_600_000, "12.6 MB"),
        (512_000_000, "512 MB"),
        (2.5e12, "2.5 TB"),
        (3.2e15, "3200.0 TB"),
    ],
)
def test_size(count, text):
    assert units.size(count) == text


@pytest.mark.parametrize(("per_s", "text"), [(None, "-"), (0, "0"), (850, "850"), (18_400, "18.4k"), (2.5e6, "2.5M")])
def test_rate(per_s, text):
    assert units.rate(per_s) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.0004, "0 s"),
        (0.0404, "40 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (3.14, "3.1 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (161, "2 min 41 s"),
        (11_520, "3 h 12 min"),
        (3_601, "1 h"),
        (100_000, "1 d 3 h"),
    ],
)
def test_span(seconds, text):
    assert units.span(seconds) == text


@given(st.floats(0, 1e18))
def test_every_number_is_short(number):
    assert len(units.size(number)) <= 12
    assert len(units.span(number)) <= 24
    assert units.share(min(number, 1.0)).endswith("%")
