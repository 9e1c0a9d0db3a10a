"""How a newcomer learns which run there is, from one address."""

import asyncio
import random
from pathlib import Path

import pytest

from noloco_node import manifest, runs
from noloco_node.acquaintance import Acquaintances
from noloco_node.errors import Incompatible, NotAdmitted, UsageError
from noloco_node.identity import Identity
from noloco_node.manifest import Manifest, Signed
from noloco_node.transport.clock import run_virtual
from noloco_node.transport.memory import MemoryNetwork
from noloco_node.wire.peer_pb2_grpc import add_RunsServicer_to_server


@pytest.fixture
def author(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "author.key")


@pytest.fixture
def stranger(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "stranger.key")


def signed(author: Identity, name: str = "tiny", seed: int = 0) -> Signed:
    return manifest.sign(Manifest(name=name, seed=seed, rounds=10), author)


def forged(genuine: Signed, author: str) -> Signed:
    return Signed(genuine.manifest, author, genuine.signature)


async def _ask(*announced: Signed, keeps: bool = True) -> list[Signed]:
    network = MemoryNetwork(random.Random(0))
    rendezvous, trainer, newcomer = (network.join(name) for name in ("rendezvous", "trainer", "newcomer"))
    service = runs.Runs(keeps_announced=keeps)
    rendezvous.serve(lambda server: add_RunsServicer_to_server(service, server))
    for transport in (rendezvous, trainer, newcomer):
        await transport.start()
    for one in announced:
        await runs.announce([trainer.channel("rendezvous")], one)
    try:
        return await runs.ask(newcomer.channel("rendezvous"))
    finally:
        for transport in (newcomer, trainer, rendezvous):
            await transport.close()


def test_what_was_announced_reaches_a_newcomer(author: Identity) -> None:
    assert run_virtual(_ask(signed(author))) == [signed(author)]


def test_a_forged_signature_is_not_kept(author: Identity, stranger: Identity) -> None:
    assert run_virtual(_ask(forged(signed(author), stranger.peer_id))) == []
    assert run_virtual(_ask(Signed(b"{}", author.peer_id, bytes(64)))) == []


def test_a_training_node_keeps_nothing_for_others(author: Identity) -> None:
    assert run_virtual(_ask(signed(author), keeps=False)) == []


def test_announced_runs_are_bounded_and_the_oldest_goes(author: Identity) -> None:
    many = [signed(author, seed=k) for k in range(runs.MAX_RUNS + 3)]
    kept = run_virtual(_ask(*many))
    assert kept == many[3:]


def test_an_unreachable_rendezvous_does_not_stop_an_announcement(author: Identity) -> None:
    async def main() -> None:
        trainer = MemoryNetwork(random.Random(0)).join("trainer")
        await trainer.start()
        async with asyncio.timeout(60):
            await runs.announce([trainer.channel("nobody")], signed(author))
        await trainer.close()

    run_virtual(main())


def test_the_only_run_is_taken_and_of_several_one_must_be_named(author: Identity) -> None:
    one, other = signed(author), signed(author, "other")
    assert runs.choose([one], None, None) is one
    with pytest.raises(Incompatible, match=r"tiny-.*--run .*other-"):
        runs.choose([one, other], None, None)
    assert runs.choose([one, other], manifest.verify(other).run_id, None) is other
    with pytest.raises(Incompatible, match="--run"):
        runs.choose([one], "0" * 64, None)
    with pytest.raises(Incompatible, match="start"):
        runs.choose([], None, None)


def test_only_the_named_authors_run_is_taken(author: Identity, stranger: Identity) -> None:
    one, other = signed(author), signed(stranger, "other")
    assert runs.choose([one, other], None, author.peer_id) is one
    with pytest.raises(NotAdmitted, match="--trust"):
        runs.choose([other], None, author.peer_id)


def test_an_author_is_remembered_from_the_first_meeting(tmp_path: Path, author: Identity, stranger: Identity) -> None:
    known = Acquaintances(tmp_path / "authors.json")
    assert known.meet("rendezvous", "tiny", author.peer_id, None)
    assert not known.meet("rendezvous", "tiny", author.peer_id, None)
    with pytest.raises(NotAdmitted, match=stranger.peer_id):
        Acquaintances(tmp_path / "authors.json").meet("rendezvous", "tiny", stranger.peer_id, None)
    assert not known.meet("rendezvous", "tiny", stranger.peer_id, stranger.peer_id), "named: not a silent new trust"
    (tmp_path / "authors.json").write_text("[]")
    with pytest.raises(UsageError, match=r"authors\.json"):
        known.meet("rendezvous", "tiny", author.peer_id, None)
