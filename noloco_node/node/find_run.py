"""The run that a node was in and that is not over: what it goes on with where nobody tells of one.

After a power cut that took everybody, or a restart of the rendezvous while all were away, nobody announces the run any
more, and nobody would train it again before its author comes back. Who was in it announces it instead. It counts for
the ways in by which the node came to it: a new rendezvous is not told of an old run.
"""

from collections.abc import Sequence
from contextlib import suppress

from noloco_node.checkpoints import checkpoint
from noloco_node.errors import UsageError
from noloco_node.host import paths
from noloco_node.host.home import Home
from noloco_node.run import signed_file
from noloco_node.run.manifest import Signed
from noloco_node.run.trusted_authors import TrustedAuthors


def run(home: Home, authors: TrustedAuthors, ways_in: Sequence[str], run_id: str | None) -> Signed | None:
    """The one named, else the one that this node was in last."""
    for folder in paths.runs(home):
        with suppress(UsageError):  # nothing there that can be believed
            file = signed_file.read(folder)
            is_meant = run_id in (None, file.run.run_id) and folder.name == file.run.run_id
            is_over = checkpoint.last_round(folder / "checkpoints") >= file.run.rounds
            if is_meant and not is_over and authors.know(ways_in, file.run.name, file.signed.author):
                return file.signed
    return None
