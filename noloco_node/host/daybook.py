"""What swaps and state transfers came to today, kept over restarts in one tiny file of the home.

A kill costs the count of the last seconds. A damaged file is said and begins anew: a volunteer whose node would not
start for it would be worse off than one who gives a little more that day.
"""

import json
import logging
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.host.limits import Used

_MAX_FILE_BYTES = 1024

log = logging.getLogger(__name__)


class DayTotals:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = Used()

    def read(self) -> Used:
        try:
            with self._path.open("rb") as file:
                self._written = _checked(json.loads(file.read(_MAX_FILE_BYTES)))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s): today's traffic counts from nothing", self._path, error)
        return self._written

    def write(self, used: Used) -> None:
        """Whole or not at all; nothing where nothing has changed."""
        if used == self._written:
            return
        used_today = {"day": used.day, "sent": used.sent, "received": used.received}
        atomic_files.replace_text(self._path, json.dumps(used_today) + "\n")
        self._written = used


def _checked(found: object) -> Used:
    match found:
        case {"day": str(day), "sent": int(sent), "received": int(received)} if sent >= 0 and received >= 0:
            return Used(day, sent, received)
    raise ValueError("not a day's traffic")
