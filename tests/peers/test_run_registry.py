"""How a joining node learns which run there is, from one address."""

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from memory_network.network import MemoryNetwork, started
from rendezvous import knows
from virtual_clock import in_virtual_time, run_virtual

from noloco_node.base.identity import Identity
from noloco_node.errors import Incompatible, NotAdmitted, PeerLost, UsageError
from noloco_node.host import traffic as run_traffic
from noloco_node.host.traffic import PLACE_BYTES_S, SAVED_S, Traffic
from noloco_node.peers import run_registry
from noloco_node.peers.run_registry import KnownRun
from noloco_node.run import amendment, manifest
from noloco_node.run.manifest import Signed
from noloco_node.run.schema import Manifest
from noloco_node.run.trusted_authors import TrustedAuthors
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire.peer_pb2_grpc import RunsStub, add_RunsServicer_to_server


@pytest.fixture
def author(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "author.key")


@pytest.fixture
def other_author(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "other_author.key")


def signed(author: Identity, name: str = "tiny", seed: int = 0) -> Signed:
    return manifest.sign(Manifest(name=name, seed=seed, rounds=10), author)


def forged(genuine: Signed, author: str) -> Signed:
    return Signed(genuine.manifest, author, genuine.signature)


async def _ask(
    *announced: tuple[str, Signed], keeps: bool = True, training: Mapping[str, int] | None = None
) -> list[KnownRun]:
    """The runs that a joining node finds after these announcements. `training`: how many train, by the run's name."""
    network = MemoryNetwork(random.Random(0))
    peers = {name: network.join(name) for name in ("rendezvous", "joining", *(name for name, _ in announced))}
    named = {hashlib.sha256(one.manifest).hexdigest(): json.loads(one.manifest).get("name") for _, one in announced}
    service = run_registry.RunRegistry(
        peers["rendezvous"].caller if keeps else None, lambda run: (training or {}).get(named[run], 0)
    )
    peers["rendezvous"].serve(lambda server: add_RunsServicer_to_server(service, server))
    async with started(*peers.values()):
        for name, one in announced:
            await run_registry.announce([peers[name].channel("rendezvous")], one)
        return await run_registry.ask(peers["joining"].channel("rendezvous"))


def known(*signed: Signed, training: int = 0) -> list[KnownRun]:
    return [KnownRun(one, training) for one in signed]


def test_what_was_announced_reaches_a_joining_node(author: Identity) -> None:
    assert run_virtual(_ask(("trainer", signed(author)))) == known(signed(author))
    assert run_virtual(_ask(("trainer", signed(author)), training={"tiny": 3})) == known(signed(author), training=3)


@in_virtual_time
async def test_a_place_that_has_fetched_too_much_is_refused_for_a_while(
    author: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, traffic = MemoryNetwork(random.Random(0)), Traffic()
    rendezvous, greedy, other = (network.join(name) for name in ("rendezvous", "greedy", "other"))
    service = run_registry.RunRegistry(place=rendezvous.caller, traffic=traffic)
    there = [signed(author, seed=number) for number in range(5)]
    assert all(service.add(one, f"author {number}") for number, one in enumerate(there))
    rendezvous.serve(lambda server: add_RunsServicer_to_server(service, server))
    async with started(rendezvous, greedy, other):
        assert traffic.may_answer(2 * int(PLACE_BYTES_S * SAVED_S), "greedy")
        with pytest.raises(PeerLost, match="resource_exhausted"):
            await run_registry.ask(greedy.channel("rendezvous"))
        monkeypatch.setattr(run_traffic, "SMALL_BYTES", 0)  # as where its manifest is long
        assert await run_registry.announce([greedy.channel("rendezvous")], there[0]) == [False], "it is there"
        for after_s, who in ((0.0, other), (SAVED_S, greedy)):
            await asyncio.sleep(after_s)
            assert await run_registry.ask(who.channel("rendezvous")) == known(*there)


@in_virtual_time
async def test_strangers_with_large_manifests_keep_nobody_from_the_run_that_is_meant(
    author: Identity, other_author: Identity
) -> None:
    """300 newcomers behind one address, who name it, or only its author, or nothing at all."""
    real, copy = signed(author), signed(other_author)
    run_id, ours = manifest.verify(real).run_id, known(real, training=1)
    network = MemoryNetwork(random.Random(0))
    rendezvous, newcomer, old = (network.join(name) for name in ("rendezvous", "newcomer", "of an older version"))
    service = knows(rendezvous, copy, training=lambda _: 1)
    for number in range(run_registry.MAX_RUNS - 2):
        spam = Signed(f"{number:02}".encode() * (manifest.MAX_BYTES // 2), f"author {number}", bytes(64))
        service._runs[f"{number}", spam.author] = run_registry._Kept(spam, f"peer {number}", f"place {number}")
    assert service.add(real, "trainer")
    async with started(rendezvous, newcomer, old):
        there = newcomer.channel("rendezvous")
        for _ in range(300):
            assert await run_registry.ask(there, real) == ours
            assert await run_registry.ask(there, meant=run_id[:32], author=author.peer_id) == ours
        assert await run_registry.ask(there, author=author.peer_id) == ours
        assert await run_registry.ask(there, meant=run_id) == known(copy, real, training=1)
        assert await run_registry.ask(there, meant="0" * 32) == []
        reply = await RunsStub(old.channel("rendezvous")).List(pb.RunsRequest())
        found = [message.author for message in reply.runs]
        assert found[0] == copy.author and len(found) > 1 and reply.ByteSize() < 250_000


def test_where_a_runs_author_has_not_announced_it_anothers_copy_is_told(
    author: Identity, other_author: Identity
) -> None:
    """The newcomer then says that its author is another one, not that nobody has announced the run."""
    copy, service = signed(other_author), run_registry.RunRegistry()
    assert service.add(copy, "thief")
    reply = run_virtual(service.List(pb.RunsRequest(run=manifest.verify(copy).run_id, author=author.peer_id), None))
    assert [message.author for message in reply.runs] == [copy.author]


def test_a_forged_signature_is_not_kept(author: Identity, other_author: Identity) -> None:
    assert run_virtual(_ask(("trainer", forged(signed(author), other_author.peer_id)))) == []
    assert run_virtual(_ask(("trainer", Signed(b"{}", author.peer_id, bytes(64))))) == []


def newer(author: Identity) -> Signed:
    """With a setting that this version does not know."""
    document = json.loads(signed(author).manifest)
    document["outer"]["nesterov"] = True
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return Signed(text, author.peer_id, author.sign(b"noloco manifest v1\n" + text))


@in_virtual_time
async def test_a_run_that_this_version_cannot_read_is_not_called_unknown(author: Identity) -> None:
    run, other = newer(author), signed(author)
    network = MemoryNetwork(random.Random(0))
    rendezvous, us = network.join("rendezvous"), network.join("us")
    service = knows(rendezvous)
    there, run_id = us.channel("rendezvous"), hashlib.sha256(run.manifest).hexdigest()
    async with started(rendezvous, us):
        assert await run_registry.announce([there], run) == [True], "of an older version"
        service._runs[run_id, author.peer_id] = run_registry._Kept(run, "author", "home")  # as a newer one has it
        assert await run_registry.ask(there) == []
        for meant in ("", run_id[:32]):
            with pytest.raises(Incompatible, match="update"):
                await run_registry.ask(there, meant=meant)
        assert await run_registry.announce([there], other) == [False]
        assert await run_registry.ask(there, meant="") == known(other)
        with pytest.raises(Incompatible, match="update"):
            await run_registry.ask(there, meant=run_id[:32])


def test_a_training_node_keeps_nothing_for_others(author: Identity) -> None:
    assert run_virtual(_ask(("trainer", signed(author)), keeps=False)) == []


def test_announced_runs_are_bounded_and_the_oldest_goes(author: Identity) -> None:
    many = [signed(author, seed=k) for k in range(run_registry.MAX_RUNS + 3)]
    kept = run_virtual(_ask(*((f"peer {number}", run) for number, run in enumerate(many))))
    assert kept == known(*many[3:])


def test_a_peer_that_announces_many_runs_replaces_only_its_own(author: Identity, other_author: Identity) -> None:
    real, spam = signed(author), [signed(other_author, "spam", k) for k in range(run_registry.MAX_RUNS)]
    announced = [("trainer", real), *(("spammer", run) for run in spam)]
    assert run_virtual(_ask(*announced)) == known(real, *spam[-run_registry.MAX_OF_PEER :])
    again = [*announced, ("spammer", real), *(("spammer", run) for run in spam)]
    assert real in [run.signed for run in run_virtual(_ask(*again))], "it is not the spammer's by saying it again"


def test_a_run_is_not_taken_over_by_signing_it_anew(author: Identity, other_author: Identity) -> None:
    real, copy = signed(author), signed(other_author)
    run_id = manifest.verify(real).run_id
    assert run_virtual(_ask(("trainer", real), ("thief", copy), ("trainer", real))) == known(real, copy)
    found = run_virtual(_ask(("thief", copy), ("trainer", real)))  # the rendezvous was just started again
    assert found == known(copy, real)
    assert run_registry.choose(found, run_id, author.peer_id) is found[1].signed
    assert run_registry.choose(known(real, copy), run_id, None) is real, "the first, where no author is named"


def test_copies_of_a_run_in_which_people_train_make_room(author: Identity, tmp_path: Path) -> None:
    real, service = signed(author), run_registry.RunRegistry(training=lambda _run_id: 3)
    assert service.add(real, "trainer", place="home")
    thieves = [Identity.load_or_create(tmp_path / f"{number}") for number in range(run_registry.MAX_RUNS + 3)]
    copies = [signed(thief) for thief in thieves]
    for number, copy in enumerate(copies):
        assert service.add(copy, f"thief {number}", place="rented")
    assert service.known == [real, *copies[4:]]


def test_who_signs_a_run_anew_and_first_does_not_bring_it_to_a_crowded_place(
    author: Identity, other_author: Identity
) -> None:
    """As after a restart of the rendezvous: of each place one run is looked up before another of that place."""
    real, service = signed(author), run_registry.RunRegistry()
    for number, theirs in enumerate([signed(other_author), signed(other_author, "spam")]):
        assert service.add(theirs, f"thief {number}", place="rented")
    assert service.add(real, "trainer", place="home")
    assert list(service.places.values()) == ["home", "rented"]


def test_where_there_is_no_room_the_place_that_has_most_gives_one_up(author: Identity) -> None:
    service, idle = run_registry.RunRegistry(), signed(author, "idle")
    assert service.add(idle, "trainer", place="home")
    for number in range(2 * run_registry.MAX_RUNS):
        assert service.add(signed(author, "spam", number), f"peer {number}", place="rented")
    assert idle in service.known and len(service.known) == run_registry.MAX_RUNS


def test_a_run_in_which_somebody_trains_is_never_dropped(author: Identity, other_author: Identity) -> None:
    real = signed(author, "real")
    spam = [(f"spammer {number}", signed(other_author, "spam", number)) for number in range(2 * run_registry.MAX_RUNS)]
    kept = run_virtual(_ask(("trainer", real), *spam, training={"real": 1}))
    assert kept[0] == KnownRun(real, 1)
    assert [run.signed for run in kept[1:]] == [run for _, run in spam[1 - run_registry.MAX_RUNS :]]
    full = run_virtual(_ask(*spam[: run_registry.MAX_RUNS], ("trainer", real), training={"spam": 1}))
    assert real not in [run.signed for run in full], "where people train in each of them, there is no room"


def test_a_crowd_that_says_it_trains_in_many_runs_leaves_room_for_those_of_others(
    author: Identity, other_author: Identity
) -> None:
    service = run_registry.RunRegistry(training=lambda _: 1)
    for number in range(2 * run_registry.MAX_RUNS):
        service.add(signed(other_author, "crowd", number), f"crowd {number}", place="a host")
    honest = [signed(author, "honest", number) for number in range(3)]
    assert all(service.add(one, f"author {n}", place=f"place {n}") for n, one in enumerate(honest))
    assert not service.add(signed(other_author, "crowd", 1000), "one more of the crowd", place="a host")
    assert all(one in service.known for one in honest) and len(service.known) == run_registry.MAX_RUNS


def test_a_crowd_that_says_it_trains_in_many_runs_drops_no_new_one_of_others(
    author: Identity, other_author: Identity
) -> None:
    new = signed(author, "new")
    service = run_registry.RunRegistry(training=lambda run: int(run != manifest.verify(new).run_id))
    crowd = [signed(other_author, "crowd", number) for number in range(2 * run_registry.MAX_RUNS)]
    for number, run in enumerate(crowd[: run_registry.MAX_RUNS]):
        assert service.add(run, f"crowd {number}", place="a host")
    assert service.add(new, "author", place="home")
    for number, run in enumerate(crowd[run_registry.MAX_RUNS :]):
        assert not service.add(run, f"another of the crowd {number}", place="a host")
    assert new in service.known


@in_virtual_time
async def test_an_unreachable_rendezvous_does_not_stop_an_announcement(author: Identity) -> None:
    trainer = MemoryNetwork(random.Random(0)).join("trainer")
    await trainer.start()
    async with asyncio.timeout(60):
        assert await run_registry.announce([trainer.channel("nobody")], signed(author)) == [None]
    await trainer.close()


def test_the_only_run_is_taken_and_of_several_one_must_be_named(author: Identity) -> None:
    one, other = signed(author), signed(author, "other")
    assert run_registry.choose(known(one), None, None) is one
    for training in (0, 2):
        with pytest.raises(Incompatible, match=r"tiny-.*--run .*other-"):
            run_registry.choose(known(one, other, training=training), None, None)
    assert run_registry.choose(known(one, other), manifest.verify(other).run_id, None) is other
    with pytest.raises(Incompatible, match="--run"):
        run_registry.choose(known(one), "0" * 64, None)
    with pytest.raises(Incompatible, match="start"):
        run_registry.choose([], None, None)


def test_of_several_runs_the_one_is_meant_that_this_node_has_left(author: Identity) -> None:
    """As it is known there: else `join` would say that nobody has announced it."""
    one, other = signed(author), signed(author, "other")
    for there in (known(one, other), known(other)):
        assert run_registry.choose(there, None, None, replace(other)) is other
    with pytest.raises(Incompatible, match="name one"):
        run_registry.choose(known(one, other), None, None, signed(author, "gone"))


def test_the_run_in_which_somebody_trains_is_meant(author: Identity, other_author: Identity) -> None:
    real, spam = signed(author), [signed(other_author, "spam", seed) for seed in range(5)]
    there = [*known(*spam[:3]), KnownRun(real, 1), *known(*spam[3:])]
    assert run_registry.choose(there, None, None) is real
    assert run_registry.choose(there, manifest.verify(spam[0]).run_id, None) is spam[0], "named"
    with pytest.raises(Incompatible, match="several runs") as told:
        run_registry.choose([*there, KnownRun(signed(author, "other"), 2)], None, None)
    assert "spam" not in str(told.value)
    assert run_registry.choose([*there, KnownRun(signed(author, "other"), 2)], None, None, real) is real, "it was there"


def test_of_several_that_signed_a_run_the_first_is_shown(author: Identity, other_author: Identity) -> None:
    real, other = signed(author), signed(author, "other")
    assert run_registry.first_copies([real, signed(other_author), other, signed(other_author)]) == [real, other]


def test_only_the_named_authors_run_is_taken(author: Identity, other_author: Identity) -> None:
    one, other = signed(author), signed(other_author, "other")
    assert run_registry.choose([KnownRun(one, 0), KnownRun(other, 2)], None, author.peer_id) is one
    with pytest.raises(NotAdmitted, match="--trust"):
        run_registry.choose(known(other), None, author.peer_id)


def test_an_author_is_remembered_from_the_first_time(tmp_path: Path, author: Identity, other_author: Identity) -> None:
    authors = TrustedAuthors(tmp_path / "authors.json")
    assert authors.check(["rendezvous"], "tiny", author.peer_id, None)
    assert not authors.check(["rendezvous"], "tiny", author.peer_id, None)
    with pytest.raises(NotAdmitted, match=other_author.peer_id):
        TrustedAuthors(tmp_path / "authors.json").check(["rendezvous"], "tiny", other_author.peer_id, None)
    assert not authors.check(["rendezvous"], "tiny", *2 * [other_author.peer_id]), "named: not a silent new trust"
    (tmp_path / "authors.json").write_text("[]")
    with pytest.raises(UsageError, match=r"authors\.json"):
        authors.check(["rendezvous"], "tiny", author.peer_id, None)


def test_an_author_known_by_one_bootstrap_peer_is_known_by_all(
    tmp_path: Path, author: Identity, other_author: Identity
) -> None:
    """With the rendezvous away and an older peer answering instead, no other author becomes trusted."""
    authors = TrustedAuthors(tmp_path / "authors.json")
    assert authors.check(["rendezvous"], "tiny", author.peer_id, None)
    with pytest.raises(NotAdmitted, match=other_author.peer_id):
        authors.check(["rendezvous", "peer"], "tiny", other_author.peer_id, None)
    assert not authors.check(["rendezvous", "peer"], "tiny", author.peer_id, None)
    with pytest.raises(NotAdmitted, match=other_author.peer_id):
        authors.check(["peer"], "tiny", other_author.peer_id, None)


def test_a_rendezvous_keeps_the_newest_amendment_and_no_forged_one(author: Identity, other_author: Identity) -> None:
    run, service = signed(author), run_registry.RunRegistry()
    run_id = hashlib.sha256(run.manifest).hexdigest()

    def version(number: int, by: Identity = author) -> amendment.SignedAmendment:
        return amendment.sign(amendment.Amendment(run=run_id, version=number), by)

    for number in (2, 3, 1):
        assert service.add(run, "peer", version(number))
    with pytest.raises(NotAdmitted):
        service.add(run, "peer", version(9, other_author))
    with pytest.raises(NotAdmitted):
        service.add(signed(other_author), "peer", version(9))
    assert service.version(run_id) == 3
    document = version(9).document.replace(b"{", b'{"later":1,')
    later = amendment.SignedAmendment(document, author.sign(b"noloco amendment v1\n" + document))
    assert service.add(run, "peer", later) and service.version(run_id) == 3, "this version cannot read it"
    assert service.add(run, "peer") and service.version(run_id) == 3, "an older version of a node knows none"
