"""Which authors' signatures this node trusts: the named author, else the first one it saw, as ssh does with hosts.

One small JSON file in the home: for each rendezvous and run name, the author's peer id. An author known by one address
is known by all addresses that are given beside it, so a rendezvous that is away for a while does not make an
unknown peer the author. The file is not secret. A damaged one ends the start: trust is never forgotten silently.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.identity import is_peer_id
from noloco_node.errors import NotAdmitted

_MAX_BYTES = 4 << 20
_REMEDY = "restore it from a copy, or delete it, and the next author that signs a run is trusted unasked"


class TrustedAuthors:
    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, ways_in: Sequence[str], run_name: str, author: str, named: str | None) -> bool:
        """Whether this author is new to us and trusted from now on. `named`: its peer id, or the first letters of it.
        Raises NotAdmitted where another is expected, UsageError and DiskFull where the file cannot be read or written.
        """
        known = self._read()
        here = {_key(peer, run_name): author for peer in ways_in}
        met = [known[key] for key in here if key in known]
        expected = named or next((other for other in met if other != author), author)
        if not author.startswith(expected):
            raise NotAdmitted(
                f"the run {run_name} there is signed by {author}, but this node knows {expected} as its author: "
                f"if that is right, say so with --trust {author}"
            )
        if known | here != known:
            atomic_files.write(self._path, json.dumps(known | here, indent=1, sort_keys=True) + "\n")
        return named is None and not met

    def know(self, ways_in: Sequence[str], run_name: str, author: str) -> bool:
        """Whether one of these peers is known to lead to this author's run."""
        known = self._read()
        return any(known.get(_key(peer, run_name)) == author for peer in ways_in)

    def _read(self) -> dict[str, str]:
        return atomic_files.read_json(self._path, _checked, _MAX_BYTES, _REMEDY) or {}


def _checked(known: object) -> dict[str, str]:
    if not isinstance(known, dict) or not all(isinstance(who, str) and is_peer_id(who) for who in known.values()):
        raise ValueError("it is not a table of authors")
    return known


def _key(peer: str, run_name: str) -> str:
    return f"{peer}/{run_name}"
