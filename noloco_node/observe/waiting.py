"""What a node waits for, as lines of its log: each thing once, and how far it is every few seconds."""

import logging

PROGRESS_S = 10.0

log = logging.getLogger(__name__)


class WaitingLines:
    def __init__(self) -> None:
        self._thing = ""
        self._said_at = 0.0

    def waits_for(self, what: str | None, now: float) -> None:
        """`state from calm-otter, 62% of 12.6 MB, 34 s left`: what is before the comma is the thing."""
        if what is None:
            self._thing = ""
            return
        thing, _, progress = what.partition(",")
        if thing != self._thing or (progress and now - self._said_at >= PROGRESS_S):
            self._thing, self._said_at = thing, now
            log.info("waiting for %s", what)
