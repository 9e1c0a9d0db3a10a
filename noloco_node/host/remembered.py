"""What `start` and `join` were given last time: one small JSON file in the home, with which `join` goes on.

It holds flags as they were typed, with the run's id and author as they were found. No secret is among the settings.
What is valid is decided where all settings are read, in host/config.py; a damaged file is set aside.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.errors import DiskFull
from noloco_node.host.home import Home

log = logging.getLogger(__name__)

TAKEN_BACK = "none", ["none"]
"""The one way to take back what is remembered; it is remembered itself."""

_OF_ONE_RUN = ("run", "trust", "token", "data", "encoding", "tokenizer", "weights", "stage")
"""Not passed on to another run: its author is another one, and so may be whom these files are for. The rest is about
this machine, and what its volunteer allows: a limit holds until another one is given, whichever the run."""
_ONCE = ("rounds", "linger")
"""They are about the one time that they were given."""
_PORT = "port"
"""Not a setting: a free port, as it was found."""
_FILES = ("data", "tokenizer", "weights")
_MAX_BYTES = 64 << 10
_LOST = "what was given last time is forgotten"


def read(home: Home) -> dict[str, object]:
    """Where the file is gone or damaged, the run that this home was in last; empty where there is none."""
    if (found := _read(home)) is not None:
        return {key: value for key, value in found.items() if key != _PORT}
    from noloco_node.host import paths  # with pydantic, which `status` can do without

    return {"run": runs[0].name} if (runs := paths.runs(home)) else {}


def port(home: Home) -> int:
    """Where the node listened last, 0 where that is not known: on the same port, invitations stay valid."""
    found = (_read(home) or {}).get(_PORT)
    return found if isinstance(found, int) and 0 < found < 65536 else 0


def fitting(kept: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """What of it counts beside the settings from everywhere else. An address alone may lead to another run."""
    run = given.get("run") or ("another" if given.get("bootstrap") else "")
    other = not str(kept.get("run", "")).startswith(str(run))
    return {key: value for key, value in kept.items() if not (other and key in _OF_ONE_RUN)}


def keep(home: Home, given: Mapping[str, object], run_id: str, author: str, port: int = 0) -> None:
    """A full disk ends no start. Raises UsageError."""
    lasting = {key: _from_anywhere(key, value) for key, value in given.items() if key not in _ONCE}
    content = json.dumps({**lasting, "run": run_id, "trust": author, _PORT: port}, indent=1) + "\n"
    try:
        if _read(home) != json.loads(content):
            atomic_files.write(home.remembered, content)
    except DiskFull as error:
        log.warning("what this node was given now is forgotten at the next start: %s", error)


def _from_anywhere(key: str, value: object) -> object:
    """Files by their whole path: the next `join` may be typed in another folder; not where its name cannot be typed."""
    if key not in _FILES or value in TAKEN_BACK:
        return value
    names = value if isinstance(value, list | tuple) else [value]
    whole = [str(Path(str(name)).expanduser().absolute()) for name in names]
    if not all(map(str.isprintable, whole)):
        return value
    return whole if isinstance(value, list | tuple) else whole[0]


def _read(home: Home) -> dict[str, object] | None:
    return atomic_files.read_json_or_set_aside(home.remembered, _checked, _MAX_BYTES, _LOST)


def _checked(found: object) -> dict[str, object]:
    if not isinstance(found, dict):
        raise ValueError("it is not a table of settings")
    return found
