"""How an amendment goes from its author's node through a swarm, over the in-memory network and in virtual time."""

import asyncio
import logging
import random
from collections.abc import Collection
from pathlib import Path

import pytest
from admissions import AUTHOR, GUEST, STRANGER
from memory_network.network import MemoryNetwork, started
from virtual_clock import in_virtual_time

from noloco_node.errors import Incompatible, NotAdmitted
from noloco_node.peers.membership import LOOK_S
from noloco_node.peers.run_registry import RunRegistry
from noloco_node.peers.run_rules import ASK_AGAIN_S, BAD, RunRules
from noloco_node.run import amendment, manifest
from noloco_node.run.amendment import Amendment, SignedAmendment
from noloco_node.run.schema import Manifest
from noloco_node.wire.peer_pb2_grpc import add_RunsServicer_to_server

RUN = Manifest(name="tiny", rounds=100)
SIGNED = manifest.sign(RUN, AUTHOR)
PRESENCE_S = 20.0
"""peers/directory.py: how often a node publishes its record."""
NODES = 8


def version(number: int, author=AUTHOR, **changes: object) -> SignedAmendment:
    return amendment.sign(Amendment(run=RUN.run_id, version=number, **changes), author)


class Member:
    """What of a node spreads an amendment: it states its version, and looks at what `others` state."""

    def __init__(self, network: MemoryNetwork, home: Path, name: str) -> None:
        self.name, self.stated, self.blamed = name, 0, list[tuple[str, str]]()
        self.others: Collection[Member] = ()
        self.followed_at: float | None = None
        self.transport, self.known = network.join(name), RunRegistry()
        (home / name).mkdir(exist_ok=True)
        self.rules = RunRules(home / name, SIGNED)
        self.state()
        self.transport.serve(lambda server: add_RunsServicer_to_server(self.known, server))

    def state(self) -> None:
        self.known.add(SIGNED, amended=self.rules.amended)
        self.stated = self.rules.version

    async def look(self) -> bool:
        newer = {m.name: m.stated for m in self.others if m.stated > self.rules.version}
        channel, blame = self.transport.channel, lambda peer, code: self.blamed.append((peer, code))
        if came := await self.rules.learn(channel, newer, lambda due: sorted(due)[:4], blame):
            self.state()
            self.followed_at = asyncio.get_running_loop().time()
        return came


class Liar(Member):
    """States a version, and answers with this."""

    def lie(self, stated: int, shown: SignedAmendment | None) -> None:
        self.stated = stated
        (kept,) = self.known._runs.values()
        kept.version, kept.amended = (stated, shown) if shown else (0, None)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(0), delay_s=0.05)


@in_virtual_time
async def test_it_reaches_eight_nodes_within_two_presence_intervals(network: MemoryNetwork, tmp_path: Path) -> None:
    """Each sees its two neighbours only; its author's command has written a file, as `run amend` does."""
    members = [Member(network, tmp_path, f"n{k}") for k in range(NODES)]
    for k, member in enumerate(members):
        member.others = [members[k - 1], members[(k + 1) % NODES]]
    amendment.write(tmp_path / "n0", version(1, rounds=200))
    assert members[0].rules.reread() and not members[0].rules.reread()
    members[0].state()
    async with started(*(member.transport for member in members)):
        while asyncio.get_running_loop().time() < 2 * PRESENCE_S:
            await asyncio.gather(*(member.look() for member in members))
            await asyncio.sleep(LOOK_S)
    assert [member.rules.run.rounds for member in members] == [200] * NODES
    last = max(member.followed_at or 0.0 for member in members)
    print(f"\nthe last of {NODES} follows it after {last:.1f} s")  # noqa: T201
    assert not any(member.blamed for member in members)


@in_virtual_time
async def test_who_was_offline_learns_it_on_return_and_after_a_restart_knows_it(
    network: MemoryNetwork, tmp_path: Path
) -> None:
    author, away = Member(network, tmp_path, "author"), Member(network, tmp_path, "away")
    away.others = [author]
    assert author.rules.take(version(2, ended=True))
    author.state()
    async with started(author.transport, away.transport):
        assert await away.look() and away.rules.ended
    again = RunRules(tmp_path / "away", SIGNED)
    assert again.version == 2 and again.ended


LIES = {
    "forged": (5, version(5, STRANGER, ended=True)),
    "older": (5, version(1, ended=True)),
    "changed": (5, SignedAmendment(version(5).document.replace(b"5", b"6"), version(5).signature)),
    "another run's": (5, amendment.sign(Amendment(run="ab" * 32, version=5), STRANGER)),
    "the author's other run's": (5, amendment.sign(Amendment(run="ab" * 32, version=5, ended=True), AUTHOR)),
    "none": (5, None),
}


@pytest.mark.parametrize("lie", LIES)
@in_virtual_time
async def test_a_forged_and_an_older_one_change_nothing_and_count_against_their_sender(
    network: MemoryNetwork, tmp_path: Path, lie: str
) -> None:
    honest, liar = Member(network, tmp_path, "honest"), Liar(network, tmp_path, "liar")
    honest.others = [liar]
    assert honest.rules.take(version(3, rounds=150))
    liar.lie(*LIES[lie])
    async with started(honest.transport, liar.transport):
        for _ in range(3):
            assert not await honest.look()
        assert honest.blamed == [("liar", BAD)], "it is not asked again at once"
        await asyncio.sleep(ASK_AGAIN_S)
        await honest.look()
        assert honest.blamed == [("liar", BAD)] * 2
    assert honest.rules.version == 3 and honest.rules.run.rounds == 150 and not honest.rules.ended
    assert honest.rules.health() == ()
    assert RunRules(tmp_path / "honest", SIGNED).version == 3


@in_virtual_time
async def test_who_has_just_been_started_again_or_is_gone_is_not_blamed(network: MemoryNetwork, tmp_path: Path) -> None:
    honest, starting = Member(network, tmp_path, "honest"), Member(network, tmp_path, "starting")
    honest.others = [starting]
    starting.known, starting.stated = RunRegistry(), 2
    starting.transport.serve(lambda server: add_RunsServicer_to_server(starting.known, server))
    async with started(honest.transport, starting.transport):
        await honest.look()
        await asyncio.sleep(ASK_AGAIN_S)
        await honest.look()
        asked = honest.rules._asked["starting"]
        assert asked - asyncio.get_running_loop().time() > 1.5 * ASK_AGAIN_S, "less and less often"
        network.vanish("starting")
        await asyncio.sleep(2 * ASK_AGAIN_S)
        await honest.look()
    assert honest.blamed == [] and honest.rules.version == 0


@in_virtual_time
async def test_what_this_version_cannot_read_is_no_peers_fault(
    network: MemoryNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = version(4).document.replace(b"{", b'{"later":1,')
    signed = SignedAmendment(document, AUTHOR.sign(b"noloco amendment v1\n" + document))
    honest, peer = Member(network, tmp_path, "honest"), Liar(network, tmp_path, "peer")
    honest.others = [peer]
    peer.lie(4, signed)
    caplog.set_level(logging.WARNING)
    async with started(honest.transport, peer.transport):
        while asyncio.get_running_loop().time() < 100 * ASK_AGAIN_S:
            await honest.look()
            await asyncio.sleep(LOOK_S)
        assert "cannot read: update" in str(honest.rules.unreadable)
        peer.lie(5, version(5, rounds=200))
        honest.rules._asked.clear()
        assert await honest.look() and honest.rules.unreadable is None
    assert honest.blamed == [] and honest.rules.version == 5
    assert caplog.text.count("cannot read: update") == 1
    with pytest.raises(Incompatible):
        honest.rules.take(signed)


def test_one_of_a_newer_version_is_said_and_stays_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = version(4).document.replace(b"{", b'{"later":1,')
    amendment.write(tmp_path, SignedAmendment(document, AUTHOR.sign(b"noloco amendment v1\n" + document)))
    before = (tmp_path / amendment.NAME).read_bytes()
    rules = RunRules(tmp_path, SIGNED)
    assert rules.version == 0 and not rules.reread()
    assert "cannot read: update" in caplog.text and "cannot read: update" in rules.health()[0].text
    assert rules.take(version(3, rounds=200)) and rules.run.rounds == 200, "of a peer that is as old"
    assert (tmp_path / amendment.NAME).read_bytes() == before
    amendment.write(tmp_path, version(5, rounds=300))
    assert rules.reread() and rules.take(version(6)), "by another program"
    assert RunRules(tmp_path, SIGNED).version == 6


def test_two_of_one_number_are_said_and_the_next_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Typed in two homes of the author's, as in a restored one."""
    rules = RunRules(tmp_path, SIGNED)
    assert rules.take(version(1, ended=True)) and not rules.take(version(1, ended=True))
    assert not caplog.text
    assert not rules.take(version(1, rounds=200)) and rules.ended
    assert "in two homes; others follow the other one, amended (1): 200 rounds" in caplog.text
    assert rules.take(version(2, rounds=200)) and not rules.ended


def test_who_is_taken_out_is_refused_from_then_on(tmp_path: Path) -> None:
    rules = RunRules(tmp_path, SIGNED)
    rules.require(GUEST.peer_id, b"")
    assert rules.refuses(GUEST.peer_id, b"") is None
    assert rules.take(version(1, revoked=(GUEST.peer_id,)))
    assert rules.refuses(GUEST.peer_id, b"") == "revoked"
    with pytest.raises(NotAdmitted, match="taken this node"):
        rules.require(GUEST.peer_id, b"")
    assert rules.take(version(2)) and rules.refuses(GUEST.peer_id, b"") is None
    assert not rules.take(version(1, revoked=(GUEST.peer_id,)))


def test_a_crowd_that_is_refused_fills_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rules = RunRules(tmp_path, manifest.sign(Manifest(name="tiny", membership="invite"), AUTHOR))
    assert {rules.refuses(f"peer {number}", b"") for number in range(100)} == {"not_admitted"}
    assert caplog.text.count("may not take part") == 20
