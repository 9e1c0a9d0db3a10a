"""The events of a run as lines of JSON in `events.jsonl`, for people and tools that look back.

A disk that is full costs lines, never the node: the first failure is logged, later ones are silent.
"""

import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from noloco_node.events import Event, as_json

log = logging.getLogger(__name__)


class Journal:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(as_json(event, time.time())) + "\n")
        except OSError as error:
            log.warning("no more events are written to %s: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # what was lost is said already
                file.close()
