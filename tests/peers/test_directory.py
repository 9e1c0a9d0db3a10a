"""Presence: real nodes find each other in the DHT, and records that do not hold up change nothing."""

import asyncio
import math
import time

import pytest

from noloco_node.base.addresses import ANY_LOCAL_PORT, Address
from noloco_node.base.identity import Identity
from noloco_node.errors import SwarmUnreachable
from noloco_node.peers import record as module
from noloco_node.peers.dht_storage import MAX_IN_BUCKET, MAX_OF_SIGNER, DhtStorage
from noloco_node.peers.directory import Directory
from noloco_node.peers.record import Presence, accept, bucket_of, key_of, signed_record
from noloco_node.transport.libp2p import Libp2pTransport, _import_hivemind
from noloco_node.wire import peer_pb2 as pb

RUN, OTHER_RUN = "a1" * 32, "b2" * 32
STEP_S = 15.0
NOW = 1_800_000_000.0


@pytest.fixture
def identity(tmp_path):
    return Identity.load_or_create(tmp_path / "key")


def standing(identity, **changes):
    address = Address("ip4", "127.0.0.1", 4001, identity.peer_id)
    usual = {"state": "training", "round": 3, "step": 150, "progress": 0.25, "loss": 2.5, "tokens_per_s": 9e3}
    return Presence(**{**usual, "tokens": 12345, "addresses": (address,), **changes})


def record(identity, run_id=RUN, boot=b"b" * 16, started=NOW - 50, now=NOW, **changes):
    return signed_record(identity, standing(identity, **changes), run_id=run_id, boot=boot, started=started, now=now)


# ---- what a reader believes ----


def test_a_sound_record_is_read_as_it_was_written(identity):
    read = accept(identity.peer_id, record(identity), RUN, NOW + 5, ttl_s=60)
    assert read is not None
    assert (read.peer_id, read.state, read.round, read.step, read.tokens) == (
        identity.peer_id,
        "training",
        3,
        150,
        12345,
    )
    assert (read.progress, read.loss, read.tokens_per_s, read.boot) == (0.25, 2.5, 9e3, b"b" * 16)
    assert read.addresses == standing(identity).addresses
    assert read.expires == NOW + 60


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": OTHER_RUN},
        {"now": NOW - 61},
        {"now": NOW + 61},
        {"now": math.nan},
        {"boot": b"short"},
        {"state": "Training!"},
        {"state": "x" * 17},
        {"progress": 1.01},
        {"progress": math.nan},
        {"loss": math.inf},
        {"loss": -1.0},
        {"tokens_per_s": 1e300},
        {"tokens": 1 << 60},
        {"round": 1 << 60},
        {"started": math.nan},
        {"addresses": ("/ip4/127.0.0.1/tcp/4001",)},
        {"addresses": ("garbage",)},
    ],
    ids=str,
)
def test_a_record_that_is_not_sane_is_ignored(identity, changes):
    assert accept(identity.peer_id, record(identity, **changes), RUN, NOW, ttl_s=60) is None


def test_addresses_are_bounded_in_number_and_length_and_must_parse(identity):
    end = f"/p2p/{identity.peer_id}"
    good = f"/ip4/127.0.0.1/tcp/1{end}"
    for addresses in ([good] * 9, [f"/dns4/{'x' * 200}/tcp/1{end}"], [f"/ip4/1.2.3/tcp/1{end}"], [f"/nonsense/1{end}"]):
        assert accept(identity.peer_id, record(identity, addresses=tuple(addresses)), RUN, NOW, ttl_s=60) is None
    assert accept(identity.peer_id, record(identity, addresses=(good,) * 8), RUN, NOW, ttl_s=60)


def test_a_forged_or_damaged_record_is_ignored(identity, tmp_path):
    other = Identity.load_or_create(tmp_path / "other")
    sound = record(identity)
    assert accept(other.peer_id, sound, RUN, NOW, ttl_s=60) is None
    for damaged in (b"", sound[:-1], sound[1:], b"\xff" * 300, sound + bytes(module.MAX_RECORD_BYTES)):
        assert accept(identity.peer_id, damaged, RUN, NOW, ttl_s=60) is None
    forged = pb.SignedPresence.FromString(sound)
    presence = pb.Presence.FromString(forged.presence)
    presence.round = 999
    forged.presence = presence.SerializeToString()
    assert accept(identity.peer_id, forged.SerializeToString(), RUN, NOW, ttl_s=60) is None


def test_a_runs_peers_can_be_spread_over_keys(identity):
    assert key_of(RUN, bucket_of(identity.peer_id, 0)) == f"noloco/{RUN}/peers/"
    bucket = bucket_of(identity.peer_id, 5)
    assert len(bucket) == 5 and set(bucket) <= {"0", "1"}
    assert bucket_of(identity.peer_id, 6).startswith(bucket)


# ---- what is kept for others ----


def stored(share, signer, run_id=RUN, life_s=60.0):
    """As hivemind does with what others ask us to keep, after the gate has let it in."""
    now = time.time()
    return share.store_subkey(key_of(run_id, ""), signer.peer_id, record(signer, run_id=run_id, now=now), now + life_s)


@pytest.fixture(scope="module")
def hivemind():
    return _import_hivemind()


@pytest.fixture
def share(hivemind):
    return DhtStorage(ttl_s=60.0)


def test_a_signer_has_few_places(share, identity):
    runs = [number.to_bytes(32, "big").hex() for number in range(500)]
    assert sum(stored(share, identity, run_id=run) for run in runs) == MAX_OF_SIGNER
    assert len(share) == MAX_OF_SIGNER
    assert stored(share, identity, run_id=runs[0], life_s=61.0), "who has a place keeps it"
    assert not stored(share, identity, run_id=runs[0], life_s=30.0), "the later expiry wins"


def test_nothing_is_kept_for_longer_than_two_lives(share, identity):
    assert not stored(share, identity, life_s=3659.0)
    assert not stored(share, identity, life_s=-1.0)
    assert not stored(share, identity, life_s=math.inf)
    assert stored(share, identity, life_s=119.0)


def test_a_flood_takes_nobodys_place_and_goes_with_its_time(hivemind, identity):
    share = DhtStorage(ttl_s=0.5, most=10)
    assert stored(share, identity, life_s=0.9)
    key = "a bucket"

    def flood(wave):
        return sum(share.store_subkey(key, f"{wave} {n}", b"record", time.time() + 0.5) for n in range(50))

    assert flood("first") == 9
    assert stored(share, identity, life_s=1.0), "who has a place keeps it"
    assert flood("second") == 0
    deadline = time.monotonic() + STEP_S
    while not share.store_subkey(key, "a newcomer", b"record", time.time() + 0.3):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert sum(share._counts.values()) == 2 * len(share._expires) <= 20


def test_a_bucket_holds_what_one_answer_can_carry(share):
    key, expires = "a bucket", time.time() + 60
    taken = [share.store_subkey(key, f"stranger {n}", b"record", expires) for n in range(MAX_IN_BUCKET + 5)]
    assert taken.count(True) == MAX_IN_BUCKET
    assert share.store_subkey("another", "stranger", b"record", expires)


def test_records_that_are_renewed_for_ever_do_not_pile_up(share, identity):
    for number in range(1000):
        assert stored(share, identity, life_s=50.0 + number / 100)
    (bucket,) = (value for _, (value, _) in share.items())
    assert len(share._storage.expiration_heap) < 50 and len(bucket.expiration_heap) < 50
    assert len(bucket) == len(share) == 1


def test_what_has_expired_goes_though_its_bucket_is_kept_alive(hivemind, identity):
    share, key = DhtStorage(ttl_s=0.5), "a bucket"
    assert all(share.store_subkey(key, f"stranger {n}", b"record", time.time() + 0.2) for n in range(20))
    deadline = time.monotonic() + STEP_S
    while share._counts[key] > 1:
        assert share.store_subkey(key, "stranger", b"record", time.time() + 0.9)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ((_, (bucket, _)),) = share.items()
    assert list(bucket.data) == ["stranger"]


def test_what_came_before_it_was_there_is_taken_over_within_its_bounds(hivemind, share, identity):
    early = DhtStorage(ttl_s=3600.0)
    assert stored(early, identity, life_s=59.0)
    assert stored(early, identity, run_id=OTHER_RUN, life_s=3659.0)
    share.take_over(early._storage)
    ((key, (bucket, _)),) = share.items()
    assert key == key_of(RUN, "") and list(bucket.data) == [identity.peer_id]


def test_a_value_that_is_nobodys_is_not_kept(share):
    assert not share.store("x", b"value", time.time() + 30)
    assert len(share) == 0 and share.get("x") is None


# ---- real nodes ----


class Nodes:
    def __init__(self, directory):
        self.directory = directory
        self.open = []

    async def start(self, ttl_s=60.0, member=True):
        identity = Identity.load_or_create(self.directory / f"{len(self.open)}.key")
        bootstrap = self.open[0][1].addresses() if self.open else []
        transport = Libp2pTransport(identity, ANY_LOCAL_PORT, bootstrap=bootstrap)
        await transport.start()
        swarm = Directory(transport.p2p, bootstrap, identity if member else None, RUN if member else "", ttl_s=ttl_s)
        self.open.append((swarm, transport))
        await swarm.start()
        return swarm, identity

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


async def until(condition):
    async with asyncio.timeout(STEP_S):
        while not await condition():  # noqa: ASYNC110 - the DHT tells nobody when a record has arrived
            await asyncio.sleep(0.1)


async def test_members_see_each_other_through_a_rendezvous_and_hear_a_goodbye(nodes):
    await nodes.start(member=False)
    (a, a_id), (b, b_id), (c, c_id) = [await nodes.start() for _ in range(3)]
    for swarm, identity in ((a, a_id), (b, b_id), (c, c_id)):
        await swarm.publish(standing(identity, round=7))
    for swarm, others in ((a, {b_id, c_id}), (b, {a_id, c_id}), (c, {a_id, b_id})):
        expected = {identity.peer_id for identity in others}
        await until(lambda swarm=swarm, expected=expected: _sees(swarm, expected))
    seen = (await b.peers())[a_id.peer_id]
    assert (seen.state, seen.round) == ("training", 7)
    await a.leave()

    async def b_knows():
        return (await b.peers())[a_id.peer_id].state == "leaving"

    await until(b_knows)


async def _sees(swarm, expected):
    return set(await swarm.peers()) == expected


async def test_a_record_disappears_after_its_time(nodes):
    await nodes.start(member=False, ttl_s=2.0)
    (a, a_id), (b, _) = [await nodes.start(ttl_s=2.0) for _ in range(2)]
    began = time.monotonic()
    await a.publish(standing(a_id))
    await until(lambda: _sees(b, {a_id.peer_id}))
    await until(lambda: _sees(b, set()))
    assert time.monotonic() - began >= 1.9


async def test_hostile_records_are_not_kept_and_hide_nobody(nodes):
    rendezvous, _ = await nodes.start(member=False)
    (a, a_id), (b, b_id), (evil, evil_id) = [await nodes.start() for _ in range(3)]
    await a.publish(standing(a_id))
    await until(lambda: _sees(b, {a_id.peer_id}))
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
        kept = node._node.protocol.storage
        assert len(kept) <= 2, "the two depths at which `a` stands"
        assert all(set(value.data) <= {a_id.peer_id} for _, (value, _) in kept.items())
    assert set(await b.peers()) == {a_id.peer_id}
    await a.publish(standing(a_id, round=8))  # a replay did not freeze it

    async def b_sees_the_new_round():
        return (await b.peers())[a_id.peer_id].round == 8

    await until(b_sees_the_new_round)
    await b.publish(standing(b_id))
    assert b_id.peer_id not in await b.peers()


async def test_a_bootstrap_node_that_is_no_directory_is_unreachable(nodes, tmp_path):
    transport = Libp2pTransport(Identity.load_or_create(tmp_path / "bare"), ANY_LOCAL_PORT)
    await transport.start()
    try:
        other = Libp2pTransport(Identity.load_or_create(tmp_path / "b"), ANY_LOCAL_PORT, (), transport.addresses())
        await other.start()
        try:
            with pytest.raises(SwarmUnreachable, match="directory"):
                await Directory(other.p2p, transport.addresses()).start()
        finally:
            await other.close()
    finally:
        await transport.close()


async def test_closing_and_a_goodbye_end_soon_when_p2pd_is_dead(nodes):
    swarm, identity = await nodes.start()
    await swarm.publish(standing(identity))
    _, transport = nodes.open[0]
    await transport._session.process.stop()
    async with asyncio.timeout(6.0):
        await swarm.leave()
        await swarm.close()
