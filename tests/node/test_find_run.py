"""Which run a node goes on with where nobody tells of one."""

import os
from pathlib import Path

import pytest
from test_checkpoint import Replica

from noloco_node.base.identity import Identity
from noloco_node.checkpoints import checkpoint
from noloco_node.host.home import Home
from noloco_node.node import find_run
from noloco_node.run import manifest, signed_file
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.run.trusted_authors import TrustedAuthors

MEET = ["rendezvous"]


class Past:
    """A home with runs in it."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root / "home").create()
        self.authors = TrustedAuthors(self.home.root / "authors.json")
        self.author = Identity.load_or_create(root / "author.key")
        self._now = 1_000_000_000

    def was_in(self, name: str, round: int, ways_in: list[str] = MEET) -> Signed:
        signed = manifest.sign(Manifest(name=name, rounds=10), self.author)
        run_id = manifest.verify(signed).run_id
        folder = self.home.run(run_id)
        signed_file.keep(folder, signed)
        if round:
            checkpoint.save(folder / "checkpoints", Replica(round), run_id, bytes(32))
        self.authors.meet(ways_in, name, self.author.peer_id, None)
        self._now += 60
        os.utime(folder, (self._now, self._now))
        return signed

    def run(self, ways_in: list[str] = MEET, run_id: str | None = None) -> Signed | None:
        return find_run.run(self.home, self.authors, ways_in, run_id)


@pytest.fixture
def past(tmp_path: Path) -> Past:
    return Past(tmp_path)


def test_the_last_one_that_is_not_over(past: Past) -> None:
    assert past.run() is None
    older = past.was_in("older", round=3)
    assert past.run() == older
    begun = past.was_in("begun", round=0)
    assert past.run() == begun, "without a checkpoint, too"
    past.was_in("over", round=10)
    assert past.run() == begun


def test_the_one_that_is_named(past: Past) -> None:
    older = past.was_in("older", round=3)
    past.was_in("newer", round=3)
    assert past.run(run_id=manifest.verify(older).run_id) == older
    assert past.run(run_id=64 * "0") is None


def test_only_where_it_came_from(past: Past) -> None:
    ours = past.was_in("ours", round=3)
    past.was_in("elsewhere", round=3, ways_in=["another"])
    assert past.run() == ours
    assert past.run(["new"]) is None
    assert past.run(["new", *MEET]) == ours


def test_what_cannot_be_believed_is_none(past: Past) -> None:
    ours = past.was_in("ours", round=3)
    other = past.was_in("other", round=3)
    folder = past.home.run(manifest.verify(other).run_id)
    (folder / signed_file.NAME).write_text("{")
    assert past.run() == ours
    signed_file.keep(folder, manifest.sign(Manifest(name="moved", rounds=10), past.author))
    assert past.run() == ours
    (past.home.run(manifest.verify(ours).run_id) / "checkpoints" / "100" / "state.json").write_text("{")
    assert past.run() == ours, "from its first round, then"
