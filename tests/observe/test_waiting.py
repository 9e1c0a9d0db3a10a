"""A node that waits says for what: each thing once, and how far it is from time to time."""

import logging

import pytest

from noloco_node.observe.waiting import PROGRESS_S, WaitingLines


def test_each_thing_once_and_its_progress_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = WaitingLines()
    for now, what in (
        (0.0, "data and model to be ready"),
        (1.0, "state from calm-otter"),
        (2.0, "state from calm-otter, which copies it"),
        (3.0, "state from calm-otter, 1% of 3.2 GB"),
        (1.0 + PROGRESS_S, "state from calm-otter, 12% of 3.2 GB, 1 min 10 s left"),
        (2.0 + PROGRESS_S, "state from calm-otter, 13% of 3.2 GB, 1 min 9 s left"),
        (3.0 + PROGRESS_S, None),
        (4.0 + PROGRESS_S, "state from calm-otter"),
    ):
        lines.waits_for(what, now)
    assert caplog.messages == [
        "waiting for data and model to be ready",
        "waiting for state from calm-otter",
        "waiting for state from calm-otter, 12% of 3.2 GB, 1 min 10 s left",
        "waiting for state from calm-otter",
    ]
