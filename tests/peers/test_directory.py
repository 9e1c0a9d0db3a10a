"""Real nodes find each other in the DHT, and hostile records change nothing."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from memory_network.network import started
from patience import PATIENCE
from records import RUN, presence, record
from transport_peers import STEP_S, until_it

from noloco_node.base.addresses import ANY_LOCAL_PORT, Address, ip_address
from noloco_node.base.identity import Identity, peer_id_of
from noloco_node.errors import SwarmUnreachable
from noloco_node.peers import directory
from noloco_node.peers.answering import Answering
from noloco_node.peers.directory import REFUSED, SILENT, Directory, Found
from noloco_node.peers.record import accept, bucket_of, key_of
from noloco_node.transport.libp2p import Libp2pTransport


class Nodes:
    def __init__(self, folder):
        self.folder = folder
        self.open = []

    async def start(self, ttl_s=60.0, member=True, asks=False, stores=True):
        """`asks`: only peers that answer count."""
        identity = Identity.load_or_create(self.folder / f"{len(self.open)}.key")
        bootstrap = self.open[0][1].addresses() if self.open else []
        transport = Libp2pTransport(identity, ANY_LOCAL_PORT, bootstrap=bootstrap)
        await transport.start()
        run_id, place_of = RUN if member else "", transport.place_seen
        answering = Answering(transport) if asks else None
        member = identity if member else None
        limits = {"stores": stores, "ttl_s": ttl_s}
        calls = {"place_of": place_of, "may_answer": transport.may_answer}
        swarm = Directory(transport.p2p, bootstrap, member, run_id, answering=answering, **calls, **limits)
        self.open.append((swarm, transport))
        await swarm.start()
        return swarm, identity

    def transport_of(self, swarm):
        return next(transport for other, transport in self.open if other is swarm)

    async def close(self):
        async with asyncio.timeout(STEP_S):
            for swarm, transport in reversed(self.open):
                await swarm.close()
                await transport.close()


@pytest.fixture
async def nodes(tmp_path):
    nodes = Nodes(tmp_path)
    yield nodes
    await nodes.close()


async def test_members_see_each_other_through_a_rendezvous_and_that_one_leaves(nodes):
    await nodes.start(member=False)
    (a, a_id), (b, b_id), (c, c_id) = [await nodes.start() for _ in range(3)]
    for swarm, identity in ((a, a_id), (b, b_id), (c, c_id)):
        await swarm.publish(presence(identity, round=7))
    for swarm, others in ((a, {b_id, c_id}), (b, {a_id, c_id}), (c, {a_id, b_id})):
        expected = {identity.peer_id for identity in others}
        await until_it(lambda swarm=swarm, expected=expected: _sees(swarm, expected))
    seen = (await b.peers()).peers[a_id.peer_id]
    assert (seen.state, seen.round) == ("training", 7)

    async def b_knows():
        await a.leave()  # again, where a busy machine had no time for it
        return (await b.peers()).peers[a_id.peer_id].state == "leaving"

    await until_it(b_knows)


async def test_that_a_node_leaves_is_heard_though_one_of_its_bootstrap_nodes_is_silent(nodes):
    rendezvous, _ = await nodes.start(member=False)
    swarm, identity = await nodes.start(stores=False)
    await swarm.publish(presence(identity))
    swarm._bootstrap.append(replace(swarm._bootstrap[0], peer=peer_id_of(bytes(32))))
    swarm._may_answer = lambda _peer: asyncio.Event().wait()

    async def is_heard():
        await swarm.leave()  # again, where a busy machine had no time for it
        return (await rendezvous.peers_of(RUN)).peers[identity.peer_id].state == "leaving"

    await until_it(is_heard)
    assert swarm.stored


async def _sees(swarm, expected):
    return set((await swarm.peers()).peers) == expected


async def test_a_record_disappears_when_it_expires(nodes):
    await nodes.start(member=False, ttl_s=2.0)
    (a, a_id), (b, _) = [await nodes.start(ttl_s=2.0) for _ in range(2)]
    began = 0.0

    async def comes():
        nonlocal began
        began = time.monotonic()
        await a.publish(presence(a_id))  # again, where a busy machine saw it too late
        return await _sees(b, {a_id.peer_id})

    await until_it(comes)
    await until_it(lambda: _sees(b, set()))
    assert time.monotonic() - began >= 1.9


async def test_an_answer_without_records_is_no_empty_bucket(nodes):
    """Else many nodes of one place, whose answers are refused now and then, would believe that they are few, all read
    and write at depth 0, where the answers are largest, and be refused all the more."""
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, b_id) = [await nodes.start(stores=False) for _ in range(2)]
    await a.publish(presence(a_id))
    await b.publish(presence(b_id))
    await until_it(lambda: _sees(b, {a_id.peer_id}))
    b._run.size._counts.clear()
    b._run.size._counts.append(2)
    rendezvous._p2p._traffic.may_answer = lambda size, _place: size < 300
    for _ in range(8):
        assert await _sees(b, {a_id.peer_id}), "until the record expires"
    assert b._run.size.peers == 2
    (c, _) = await nodes.start(stores=False)
    assert not (await c.peers()).peers and not c._run.size.known
    del rendezvous._p2p._traffic.may_answer
    assert await _sees(c, {a_id.peer_id, b_id.peer_id})
    assert c._run.size.known


async def test_what_nobody_answers_is_no_empty_bucket(nodes, monkeypatch):
    """As where the rendezvous is away for a while: a node would believe that it is alone."""
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, _) = [await nodes.start(stores=False) for _ in range(2)]
    await a.publish(presence(a_id))
    await until_it(lambda: _sees(b, {a_id.peer_id}))
    assert b._run.size.peers == 2

    async def lost(*_args, **_options):
        raise TimeoutError

    with monkeypatch.context() as away:
        away.setattr(b._p2p._p2p, "call_protobuf_handler", lost)
        b._run.known = {}
        assert await b.peers() == Found({}, SILENT)
        assert b._run.size.peers == 2
    await until_it(lambda: _sees(b, {a_id.peer_id}))
    assert await rendezvous.peers_of("0" * 64) == Found({}), "what nobody else stores, one that joined nobody knows"


@pytest.mark.slow
async def test_a_rendezvous_that_is_back_is_found_at_once(nodes, tmp_path):
    """p2pd dials 0, 5, 11, 20, 34, 55 and 85 s after the end of a connection, where it is asked to each second."""
    rendezvous, identity = await nodes.start(member=False)
    (node, _), ((_, transport), _) = await nodes.start(stores=False), nodes.open
    (address,) = transport.addresses()
    await rendezvous.close()
    await transport.close()
    ends = time.monotonic() + 12.5
    while time.monotonic() < ends:
        assert (await node.peers()).unanswered == SILENT
        with pytest.raises(OSError, match="away"):
            await nodes.transport_of(node)._dial(identity.peer_id)
        await asyncio.sleep(1)
    transport = Libp2pTransport(identity, address.without_peers())
    await transport.start()
    rendezvous = Directory(transport.p2p, [])
    nodes.open[0] = rendezvous, transport
    await rendezvous.start()
    began = time.monotonic()

    async def is_answered():
        return (await node.peers()).unanswered is None

    await until_it(is_answered)
    assert time.monotonic() - began < 4.0


async def test_who_looks_up_too_often_is_told_so_and_asks_again_at_once(nodes):
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, _) = [await nodes.start(stores=False) for _ in range(2)]
    await a.publish(presence(a_id))
    rendezvous._p2p._look_ups.begin = lambda *_: False
    assert await b.peers() == Found({}, REFUSED)
    assert not b._run.size.known
    del rendezvous._p2p._look_ups.begin
    found = await b.peers()
    assert set(found.peers) == {a_id.peer_id} and found.unanswered is None


async def test_a_node_knows_whether_another_one_has_stored_its_record(nodes, monkeypatch):
    rendezvous, _ = await nodes.start(member=False)
    a, a_id = await nodes.start(stores=False)
    with monkeypatch.context() as full:
        full.setattr(rendezvous._node.protocol.storage, "store_subkey", lambda *_: False)
        await a.publish(presence(a_id))
        assert not a.stored
    await a.publish(presence(a_id))
    assert a.stored


async def test_a_newcomer_that_is_refused_waits_to_be_let_in(nodes, monkeypatch):
    monkeypatch.setattr(directory, "_AGAIN_S", 0.2)
    rendezvous, _ = await nodes.start(member=False)
    refused = 0

    def begin(*_):
        nonlocal refused
        refused += 1
        return refused > 3

    rendezvous._p2p._others.begin = begin
    newcomer, _ = await nodes.start(stores=False)
    assert refused > 3 and await newcomer.peers() == Found({})
    rendezvous._p2p._others.begin = lambda *_: False
    visitor = Directory(nodes.transport_of(newcomer).p2p, newcomer._bootstrap, stores=False)
    with pytest.raises(SwarmUnreachable, match="too many come from this address"):
        await visitor.start(refused_s=0.0)


async def test_a_newcomer_whose_first_ping_is_lost_asks_again(nodes, monkeypatch):
    """By one alone it would end, or join by peers that nobody chose."""
    monkeypatch.setattr(directory, "_AGAIN_S", 0.2)
    rendezvous, _ = await nodes.start(member=False)
    lost, asked = 1, 0

    def begin(*_):
        nonlocal asked
        asked += 1
        if asked <= lost:
            raise OSError("lost")
        return True

    rendezvous._p2p._others.begin = begin
    newcomer, _ = await nodes.start(stores=False)
    assert asked == 2
    lost = 1000
    with pytest.raises(SwarmUnreachable, match="no bootstrap node answers"):
        await Directory(nodes.transport_of(newcomer).p2p, newcomer._bootstrap, stores=False).start()
    assert asked == 4


async def test_who_stores_a_record_fetches_none(nodes, monkeypatch):
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, b_id) = [await nodes.start() for _ in range(2)]
    await a.publish(presence(a_id))
    await until_it(lambda: _sees(b, {a_id.peer_id}))
    storage, fetched = rendezvous._node.protocol.storage, []

    def get(key, get=storage.get):
        found = get(key)
        fetched.append(found is not None)
        return found

    monkeypatch.setattr(storage, "get", get)
    await b.publish(presence(b_id))
    assert fetched and not any(fetched)
    await until_it(lambda: _sees(a, {b_id.peer_id}))
    assert any(fetched)


async def test_hostile_records_are_not_stored_and_hide_no_peer(nodes):
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, b_id), (evil, evil_id) = [await nodes.start() for _ in range(3)]
    await a.publish(presence(a_id))
    await until_it(lambda: _sees(b, {a_id.peer_id}))
    now, key = time.time(), key_of(RUN, "")
    mine = record(evil_id, now=now)
    replayed = record(a_id, now=now - 10)  # what `a` once signed
    hostile = [
        (mine, a_id.peer_id, now + 30),
        (replayed, a_id.peer_id, now + 1e9),
        (mine, evil_id.peer_id, now + 1e9),
        (bytes(1 << 20), evil_id.peer_id, now + 30),
        (bytes(100), "no peer", now + 30),
        (b"a regular value", None, now + 1e9),
    ]
    for value, subkey, expires in hostile:
        await evil._node.store(key, value, expires, subkey=subkey, exclude_self=True)
    for number in range(20):
        await evil._node.store(f"{key}x{number}", mine, now + 30, subkey=evil_id.peer_id, exclude_self=True)
    later = record(evil_id, now=now + 3599)  # as if its clock were an hour ahead
    await evil._node.store(key, later, now + 3659, subkey=evil_id.peer_id, exclude_self=True)
    for node in (rendezvous, b):
        kept = node._node.protocol.storage._held
        assert len(kept) <= 2, "the two depths at which `a` writes"
        assert {signer for _, signer in kept} <= {a_id.peer_id}
    assert await _sees(b, {a_id.peer_id})
    await a.publish(presence(a_id, round=8))  # a replay did not freeze it

    async def b_sees_the_new_round():
        return (await b.peers()).peers[a_id.peer_id].round == 8

    await until_it(b_sees_the_new_round)
    await b.publish(presence(b_id))
    assert b_id.peer_id not in (await b.peers()).peers


def open_files(transport):
    pids = os.getpid(), transport._session.process.pid
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


async def flood(swarm, directory, port, count=500):
    """Presence records with throw-away keys; half of the addresses refuse a connection, the others never answer."""
    now, by_key = time.time(), {}
    for number in range(count):
        fake = Identity(Ed25519PrivateKey.generate(), directory / "nowhere")
        host = f"127.1.{number // 250}.{number % 250 + 1}"
        address = Address("ip4", host, port if number % 2 else 1, fake.peer_id)
        signed = record(fake, now=now, addresses=(address,), peers=500)
        by_key.setdefault(key_of(RUN, bucket_of(fake.peer_id, number % 2)), {})[fake.peer_id] = signed
    stored = await asyncio.gather(
        *(
            swarm._node.store(key, signed, now + 60, subkey=peer, exclude_self=True)
            for key, peers in by_key.items()
            for peer, signed in peers.items()
        )
    )
    return sum(stored)


async def test_500_throw_away_presences_of_one_caller_hide_no_peer(nodes, tmp_path):
    silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "0.0.0.0", 0)
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, b_id) = [await nodes.start(asks=True) for _ in range(2)]
    evil, _ = await nodes.start()
    for swarm, identity in ((a, a_id), (b, b_id)):
        await swarm.publish(presence(identity, addresses=tuple(nodes.transport_of(swarm).addresses())))
    assert await flood(evil, tmp_path, silent.sockets[0].getsockname()[1]) == 0, "nobody stores what another one signed"
    assert max(len(node._node.protocol.storage._held) for node in (rendezvous, a, b)) <= 2 * 3
    began, (newcomer, newcomer_id) = time.monotonic(), await nodes.start(asks=True)
    before = open_files(nodes.transport_of(newcomer))
    await until_it(lambda: _sees(newcomer, {a_id.peer_id, b_id.peer_id}))
    assert time.monotonic() - began < 15.0 * PATIENCE
    await newcomer.publish(presence(newcomer_id, addresses=tuple(nodes.transport_of(newcomer).addresses())))
    await until_it(lambda: _sees(a, {b_id.peer_id, newcomer_id.peer_id}))
    await until_it(lambda: _expects(newcomer, 10))
    await until_it(lambda: _few(lambda: open_files(nodes.transport_of(newcomer)), before + 20))
    silent.close()


async def _expects(swarm, most):
    await swarm.peers()
    return swarm._run.size.peers <= most


async def _few(count, most):
    return count() <= most


async def test_a_bootstrap_node_may_have_a_name_that_hivemind_takes_for_none(nodes, tmp_path):
    """As Docker gives them, and as anybody's record may name, by which a node joins later."""
    await nodes.start(member=False)
    bootstrap = nodes.open[0][1].addresses()
    transport = Libp2pTransport(Identity.load_or_create(tmp_path / "another"), ANY_LOCAL_PORT, bootstrap=bootstrap)
    await transport.start()
    swarm = Directory(transport.p2p, [replace(way, kind="dns4", host="a_rendezvous") for way in bootstrap])
    nodes.open.append((swarm, transport))
    await swarm.start()
    assert swarm._node.protocol.routing_table.peer_id_to_uid


async def test_a_bootstrap_node_outside_the_dht_is_unreachable(nodes, tmp_path):
    async with started(bare := Libp2pTransport(Identity.load_or_create(tmp_path / "bare"), ANY_LOCAL_PORT)):
        own = Identity.load_or_create(tmp_path / "b")
        async with started(other := Libp2pTransport(own, ANY_LOCAL_PORT, (), bare.addresses())):
            with pytest.raises(SwarmUnreachable, match="directory"):
                await Directory(other.p2p, bare.addresses()).start()


async def test_leaving_and_closing_end_soon_when_p2pd_has_ended(nodes):
    swarm, identity = await nodes.start()
    await swarm.publish(presence(identity))
    _, transport = nodes.open[0]
    await transport._session.process.stop()
    async with asyncio.timeout(6.0 * PATIENCE):
        await swarm.leave()
        await swarm.close()


def test_of_too_many_peers_those_of_many_places_are_kept(tmp_path):
    identity = Identity.load_or_create(tmp_path / "key")
    one = accept(identity.peer_id, record(identity, now=1.0), RUN, 1.0, 60.0)
    crowd = {f"crowd {n}": replace(one, addresses=(ip_address("8.8.8.8", 1),)) for n in range(2 * directory._MAX_KNOWN)}
    others = {f"other {n}": replace(one, addresses=(ip_address(f"9.9.{n}.9", 1),)) for n in range(30)}
    kept = directory._few(crowd | others)
    assert others.keys() <= kept.keys() and len(kept) == directory._MAX_KNOWN
