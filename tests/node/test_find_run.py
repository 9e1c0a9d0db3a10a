"""Which run a node joins, and with which it goes on where nobody announces one."""

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_network.network import MemoryNetwork, started
from rendezvous import knows
from virtual_clock import run_virtual

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.checkpoints import checkpoint
from noloco_node.core.state import State
from noloco_node.errors import Incompatible, SwarmUnreachable
from noloco_node.host.config import NodeConfig
from noloco_node.host.home import Home
from noloco_node.node import find_run
from noloco_node.peers import run_registry
from noloco_node.peers.directory import REFUSED
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
            checkpoint.save(
                folder / "checkpoints",
                State(round, 100, {"w": torch.ones(2)}, {"phi": torch.ones(2)}, {}),
                run_id,
                bytes(32),
            )
        self.authors.check(ways_in, name, self.author.peer_id, None)
        self._now += 60
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (self._now, self._now))
        return signed

    def goes_on_in(self, signed: Signed) -> None:
        """As a node that came back: it writes to files that are there."""
        self._now += 60
        path = self.home.run(manifest.verify(signed).run_id) / signed_file.NAME
        os.utime(path, (self._now, self._now))

    def run(self, ways_in: list[str] = MEET, run_id: str | None = None) -> Signed | None:
        return find_run.unfinished(self.home, self.authors, ways_in, run_id)


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


def test_the_last_one_is_not_the_one_that_is_new_here(past: Past) -> None:
    one = past.was_in("one", round=3)
    past.was_in("two", round=3)
    past.goes_on_in(one)
    assert past.run() == one


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


def _found(announced_at: float | None, unfinished: Signed | None, run: Signed) -> tuple[Signed, float]:
    """What a joining node finds at a rendezvous that learns of a run so late, and when."""

    async def main() -> tuple[Signed, float]:
        network = MemoryNetwork(random.Random(0))
        rendezvous, us = network.join("rendezvous"), network.join("us")
        loop, known = asyncio.get_running_loop(), knows(rendezvous)
        began = loop.time()
        if announced_at is not None:
            loop.call_later(announced_at, known.add, run)
        async with started(rendezvous, us):
            signed = await find_run.ask(
                us.channel, ["rendezvous"], lambda known, _: known[0].signed, lambda _: None, unfinished
            )
            return signed, loop.time() - began

    return run_virtual(main())


def test_of_what_several_rendezvous_know_one_must_be_named(tmp_path: Path) -> None:
    """One of them knows a run in which nobody trains, and answers first; it is not picked for that."""
    author = Identity.load_or_create(tmp_path / "author.key")
    one, other = (manifest.sign(Manifest(name=name, rounds=10), author) for name in ("one", "other"))

    async def found(training: int, named: Signed | None = None) -> Signed:
        network = MemoryNetwork(random.Random(0))
        us, *ways_in = (network.join(name) for name in ("us", "first", "second"))
        for member, run, there in zip(ways_in, (one, other), (0, training), strict=True):
            knows(member, run, training=lambda _, there=there: there)
        run_id = manifest.verify(named).run_id[:32] if named else None
        async with started(us, *ways_in):
            return await find_run.ask(
                us.channel,
                ["first", "second"],
                lambda known, _: run_registry.choose(known, run_id, None),
                lambda _: None,
                run_id=run_id,
            )

    with pytest.raises(Incompatible, match=r"several runs .* one-.*--run .* other-"):
        run_virtual(found(training=0))
    assert run_virtual(found(training=2)) == other
    assert run_virtual(found(training=0, named=one)) == one
    with pytest.raises(SwarmUnreachable, match=r"no run .* is announced there"):  # it may come: a service tries again
        run_virtual(found(training=0, named=manifest.sign(Manifest(name="third", rounds=10), author)))


def test_a_run_of_a_newer_version_ends_the_search_with_the_remedy(tmp_path: Path) -> None:
    author = Identity.load_or_create(tmp_path / "author.key")
    text = manifest.sign(Manifest(name="tiny", rounds=10), author).manifest.replace(b"{", b'{"later":1,', 1)
    with pytest.raises(Incompatible, match="update"):
        run_virtual(_asked(Signed(text, author.peer_id, author.sign(b"noloco manifest v1\n" + text))))


async def _asked(run: Signed) -> Signed:
    network = MemoryNetwork(random.Random(0))
    rendezvous, us = network.join("rendezvous"), network.join("us")
    knows(rendezvous)._runs["", run.author] = run_registry._Kept(run, "author", "home")
    async with started(rendezvous, us), asyncio.timeout(find_run.RETRY_S):
        return await find_run.ask(us.channel, MEET, lambda known, _: known[0].signed, lambda _: None)


def test_who_has_no_weights_waits_a_little_for_somebody_who_has() -> None:
    run = Manifest(name="tiny")

    async def seen(at_s: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def look() -> list[str]:
            if loop.time() - began < 3:
                raise OSError("the network daemon has just died")
            return ["peer"] if loop.time() - began >= at_s else []

        await find_run.require_somebody(look, run, lambda _: None)
        return loop.time() - began

    assert run_virtual(seen(at_s=8)) == pytest.approx(8, abs=find_run.RETRY_S)
    with pytest.raises(SwarmUnreachable, match=rf"nobody is in {run.label} .* --start-over$"):
        run_virtual(seen(at_s=60))


def test_that_nobody_is_in_the_run_has_to_be_answered() -> None:
    """Where too many nodes of one place ask, some hear nothing for a while; the others may all be there."""
    run, said = Manifest(name="tiny"), list[str | None]()

    async def ends(answered: Callable[[float], bool], at_s: float = 1000.0) -> tuple[float, str]:
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def look() -> list[str]:
            if not answered(loop.time() - began):
                raise SwarmUnreachable(REFUSED)
            return ["peer"] if loop.time() - began >= at_s else []

        why = ""
        try:
            await find_run.require_somebody(look, run, said.append)
        except SwarmUnreachable as error:
            why = str(error)
        return loop.time() - began, why

    assert run_virtual(ends(lambda s: s > 60.0, at_s=60.0)) == (pytest.approx(61.0, abs=1.5), "")
    assert said[-1] == f"the records of other nodes ({REFUSED})"
    after_s, why = run_virtual(ends(lambda s: int(s) % 4 == 0))
    assert after_s > 3 * find_run.NOBODY_S and "nobody is in" in why
    after_s, why = run_virtual(ends(lambda _: False))
    assert after_s == pytest.approx(find_run.UNANSWERED_S, abs=2.5)
    assert why == f"nobody says who is in {run.label}: {REFUSED}. Try again later"


def test_where_nobody_announces_a_run_the_own_one_goes_on(tmp_path: Path) -> None:
    author = Identity.load_or_create(tmp_path / "author.key")
    ours, theirs = (manifest.sign(Manifest(name=name, rounds=10), author) for name in ("ours", "theirs"))
    found, after_s = _found(None, ours, theirs)
    assert found is ours and after_s == pytest.approx(find_run.UNANNOUNCED_S, abs=2)
    assert _found(5.0, ours, theirs)[0] == theirs, "one was announced in time"
    assert _found(30.0, None, theirs)[0] == theirs
    with pytest.raises(SwarmUnreachable, match="no run is announced"):
        _found(None, None, theirs)


def _joined(past: Past, config: NodeConfig, there: Mapping[str, Signed | None], said: list[str]) -> Signed:
    """What `join` takes where each of `there` says that five train in its run, or knows none; other peers are gone."""

    async def main() -> Signed:
        network = MemoryNetwork(random.Random(0))
        us, members = network.join("us"), [network.join(peer) for peer in there]
        for member, run in zip(members, there.values(), strict=True):
            knows(member, *filter(None, [run]), training=lambda _: 5)
        async with started(us, *members):
            ways = [address.peer for address in config.ways_in]
            return await find_run.find(config, ways, us.channel, said.append, lambda _: None)

    return run_virtual(main())


def test_another_authors_copy_of_a_run_that_this_node_was_in_is_not_gone_on_with(past: Past, tmp_path: Path) -> None:
    """The user names its author, and nobody has announced a run."""
    ours, other = past.was_in("ours", round=3), Identity.load_or_create(tmp_path / "other.key")
    door = Address("ip4", "127.0.0.1", 1, "rendezvous")
    config = NodeConfig(home=past.home.root, bootstrap=(door,), run=manifest.verify(ours).run_id)
    assert _joined(past, config, {}, []) == ours
    with pytest.raises(SwarmUnreachable, match=r"no run .* is announced there"):
        _joined(past, replace(config, trust=other.peer_id), {"rendezvous": None}, [])


def test_peers_that_nobody_chose_say_neither_which_run_nor_whose(past: Past, tmp_path: Path) -> None:
    """The rendezvous is gone, and a stranger who is still in the cache has a run of its own."""
    stranger = Identity.load_or_create(tmp_path / "stranger.key")
    theirs = manifest.sign(Manifest(name="theirs", rounds=10), stranger)
    door, seen = (Address("ip4", "127.0.0.1", 1, peer) for peer in ("rendezvous", "seen"))
    config, said = NodeConfig(home=past.home.root, bootstrap=(door,), seen=(seen,)), list[str]()
    past.was_in("elsewhere", round=3, ways_in=["another"])
    with pytest.raises(SwarmUnreachable, match=r"no bootstrap node says .* the run's invitation"):
        _joined(past, config, {"seen": theirs}, said)
    assert not past.authors.know(MEET, "theirs", stranger.peer_id)
    ours = past.was_in("ours", round=3)
    assert _joined(past, config, {"seen": theirs}, said) == ours, "where this rendezvous led before"
    with pytest.raises(SwarmUnreachable, match="no bootstrap node says"):
        _joined(past, replace(config, run=manifest.verify(theirs).run_id), {"seen": theirs}, said)
    assert not any("trusting" in line for line in said)

    named = replace(config, run=manifest.verify(theirs).run_id, trust=stranger.peer_id)
    assert _joined(past, named, {"seen": theirs}, said) == theirs, "its author is named"
