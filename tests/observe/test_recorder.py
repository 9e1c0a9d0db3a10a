"""What the log says of events."""

import logging
import math

import pytest

from noloco_node.base.events import Event, TakenBack, WentSolo
from noloco_node.base.peer_names import name_of
from noloco_node.observe.recorder import Recorder

PEER = "12D3KooWL3XJ9EMCyZvmmGXL2LMiVBtrVa2BuESsJiXkSj7333Jw"


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (WentSolo(3, "backing_off"), logging.INFO, "round 3 solo (waiting to call again): loss -"),
        (WentSolo(3, "partner_diverged", PEER), logging.INFO, "round 3 solo (partner says diverged): loss -"),
        (WentSolo(3, "quarantined"), logging.INFO, "round 3 solo (quarantined by a peer): loss -"),
        (
            TakenBack(38, PEER, 2.314, 1.918),
            logging.WARNING,
            f"the correction of {name_of(PEER)} in round 38 is taken back: eval loss 2.31 with it, 1.92 without",
        ),
        (
            TakenBack(38, PEER, math.inf, 1.918),
            logging.WARNING,
            f"the correction of {name_of(PEER)} in round 38 is taken back: eval loss inf with it, 1.92 without",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_lines(event: Event, level: int, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Recorder(PEER).observe(event)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]
