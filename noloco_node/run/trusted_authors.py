"""Whose signature a node follows: the author it was told of, else the one it met first, as ssh does with hosts.

One small JSON file in the home: for each rendezvous and run name, the author's peer id. Who is known by one way in is
known by all that are given beside it: a rendezvous that is away for a while makes no stranger an author. The file is
not secret, and a damaged one is an error rather than a silent new trust.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.errors import NotAdmitted, UsageError


class TrustedAuthors:
    def __init__(self, path: Path) -> None:
        self._path = path

    def meet(self, ways_in: Sequence[str], run_name: str, author: str, named: str | None) -> bool:
        """Whether this author is new to us and trusted from now on. Raises NotAdmitted where another is expected."""
        known = self._read()
        here = {_key(peer, run_name): author for peer in ways_in}
        met = [known[key] for key in here if key in known]
        expected = named or next((other for other in met if other != author), author)
        if expected != author:
            raise NotAdmitted(
                f"the run {run_name} there is signed by {author}, but this node knows {expected} as its author: "
                f"if that is right, say so with --trust {author}"
            )
        if known | here != known:
            self._write(known | here)
        return named is None and not met

    def know(self, ways_in: Sequence[str], run_name: str, author: str) -> bool:
        """Whether it is the author that is expected there, by one of these ways in."""
        known = self._read()
        return any(known.get(_key(peer, run_name)) == author for peer in ways_in)

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._path} cannot be read ({error}): mend or remove it to trust anew") from None
        if not isinstance(known, dict) or not all(isinstance(author, str) for author in known.values()):
            raise UsageError(f"{self._path} is not a table of authors: mend or remove it to trust anew")
        return known

    def _write(self, known: dict[str, str]) -> None:
        atomic_files.replace_text(self._path, json.dumps(known, indent=1, sort_keys=True) + "\n")


def _key(peer: str, run_name: str) -> str:
    return f"{peer}/{run_name}"
