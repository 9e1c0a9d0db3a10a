"""Figures of a status in words: the progress of the inner phase."""

import pytest

from noloco_node.terminal.figures import left
from noloco_node.views.status import Phase


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (None, ""),
        (Phase(0.0), ""),
        (Phase(0.46, 70.0), "46%, 1 min 10 s left"),
        (Phase(0.99, 0.5), "99%, 500 ms left"),
        (Phase(0.5, 4.0), ""),
        (Phase(1.0, 0.0), "100%, 0 s left"),
    ],
)
def test_left(phase, text):
    assert left(phase) == text
