"""What a node stores of others' records: only so many, for only so long, and never in place of another's."""

import math
import sys
import time
import tracemalloc
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from moved_clock import MovedClock
from records import OTHER_RUN, RUN, record

from noloco_node.errors import PeerRefused
from noloco_node.host.traffic import PLACE_BYTES_S, SAVED_S, Traffic
from noloco_node.peers import dht_messages
from noloco_node.peers.dht_messages import MAX_IN_BUCKET
from noloco_node.peers.dht_storage import (
    LOOK_UPS_A_MINUTE,
    MAX_OF_SIGNER,
    OTHERS_A_MINUTE,
    PEER_A_MINUTE,
    CheckedCalls,
    DhtStorage,
    SilentPeers,
    learn_of,
    place_of_caller,
)
from noloco_node.peers.record import key_of
from noloco_node.transport.libp2p import _import_hivemind


def stored(share, signer, run_id=RUN, lifetime_s=60.0):
    """As hivemind does with a record that the validator has accepted."""
    now = time.time()
    return share.store_subkey(
        key_of(run_id, ""), signer.peer_id, record(signer, run_id=run_id, now=now), now + lifetime_s
    )


@pytest.fixture(scope="module")
def hivemind():
    return _import_hivemind()


@pytest.fixture
def clock(hivemind, monkeypatch):
    """For what is bounded in a time, or lives for so long, on a machine that may stand still."""
    return MovedClock(monkeypatch, frozen=True)


@pytest.fixture
def share(hivemind):
    return DhtStorage(ttl_s=60.0)


def test_a_signer_may_store_only_a_few(share, identity):
    runs = [number.to_bytes(32, "big").hex() for number in range(500)]
    assert sum(stored(share, identity, run_id=run) for run in runs) == MAX_OF_SIGNER
    assert len(share._buckets) == MAX_OF_SIGNER
    assert stored(share, identity, run_id=runs[0], lifetime_s=61.0), "a stored record keeps its place"
    assert not stored(share, identity, run_id=runs[0], lifetime_s=30.0), "the later expiry wins"


def test_who_did_not_answer_is_asked_again_soon_though_the_wall_clock_was_set_back(hivemind, monkeypatch):
    """hivemind's own blacklist waits until that clock is there again."""
    wall, passed = 1_800_000_000.0, 0.0
    for module in ("dht.node", "utils.timed_storage"):
        monkeypatch.setattr(sys.modules[f"hivemind.{module}"], "get_dht_time", lambda: wall)
    theirs, ours = sys.modules["hivemind.dht.node"].Blacklist(5.0, 1.0), SilentPeers(lambda: passed)
    for each in (theirs, ours):
        each.register_failure("peer")
        assert "peer" in each and "other" not in each
    wall, passed = wall - 7200 + 6, 6.0
    assert "peer" in theirs and "peer" not in ours
    ours.register_failure("peer")
    passed = 8.0
    ours.register_failure("peer")
    passed = 11.5
    assert "peer" not in ours, "from the first failure on, as with hivemind"
    ours.register_failure("peer")
    ours.register_success("peer")
    assert "peer" not in ours


def test_nothing_is_stored_for_longer_than_twice_the_lifetime(share, identity):
    assert not stored(share, identity, lifetime_s=3659.0)
    assert not stored(share, identity, lifetime_s=-1.0)
    assert not stored(share, identity, lifetime_s=math.inf)
    assert stored(share, identity, lifetime_s=119.0)


def test_a_flood_replaces_no_record_and_expires(clock, identity):
    share = DhtStorage(ttl_s=2.0, most=10)
    assert stored(share, identity, lifetime_s=3.6)
    key = "a bucket"

    def flood(wave):
        return sum(share.store_subkey(key, f"{wave} {n}", b"record", time.time() + 2) for n in range(50))

    assert flood("first") == 9
    assert stored(share, identity, lifetime_s=4.0), "a stored record keeps its place"
    assert flood("second") == 0
    clock.moves(1.9)
    assert not share.store_subkey(key, "a new peer", b"record", time.time() + 0.3)
    clock.moves(0.2)
    assert share.store_subkey(key, "a new peer", b"record", time.time() + 0.3)
    assert sum(share._signers.values()) == len(share._held) <= 10


def test_ten_thousand_keys_take_a_bounded_part_of_the_memory(clock, figure):
    """From 100 places, 100 signers each, a kilobyte a record, where there is room for 6,400."""
    share = DhtStorage(ttl_s=60.0, most=6400)
    tracemalloc.start()
    taken = 0
    for number in range(10_000):
        at = place_of_caller.set(f"place {number // 100}")
        taken += share.store_subkey(f"bucket {number}", f"signer {number}", bytes(1000), time.time() + 60)
        place_of_caller.reset(at)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    figure(f"{taken} of 10,000 keys are stored, {grown / 1e6:.1f} MB")
    assert len(share._buckets) == len(share._held) == 6400
    assert grown < 64 << 20


def store_as(share, place, key, signer):
    before = place_of_caller.set(place)
    try:
        return share.store_subkey(key, signer, b"record", time.time() + 60)
    finally:
        place_of_caller.reset(before)


@pytest.mark.parametrize("most", [100, 10_000])
def test_one_place_with_many_identities_keeps_nobody_out(hivemind, most):
    share, key = DhtStorage(ttl_s=60.0, most=most), "a bucket"
    assert all(store_as(share, "home", key, f"anna {n}") for n in range(24))
    for n in range(600):
        store_as(share, "rented", key, f"fake {n}")
    assert all(store_as(share, "office", key, f"bob {n}") for n in range(24))
    assert len(share._buckets[key]) == len(share._held) == sum(share._places.values()) == min(most, MAX_IN_BUCKET)
    assert sum(name.startswith(("anna", "bob")) for name in share._buckets[key]) == 48
    assert not store_as(share, "rented", key, "fake")


def test_a_bucket_is_no_larger_than_one_answer_may_be(share):
    key, expires = "a bucket", time.time() + 60
    taken = [share.store_subkey(key, f"other {n}", b"record", expires) for n in range(MAX_IN_BUCKET + 5)]
    assert taken.count(True) == MAX_IN_BUCKET
    assert share.store_subkey("another", "other", b"record", expires)


def test_renewed_records_do_not_pile_up(share, identity):
    for number in range(1000):
        assert stored(share, identity, lifetime_s=50.0 + number / 100)
    assert len(share._held) == len(share._buckets) == sum(share._signers.values()) == 1


def test_expired_records_go_while_their_bucket_is_renewed(clock, identity):
    share, key = DhtStorage(ttl_s=0.5), "a bucket"
    assert all(share.store_subkey(key, f"other {n}", b"record", time.time() + 0.2) for n in range(20))
    for expired in (False, True):
        assert share.store_subkey(key, "other", b"record", time.time() + 0.9)
        assert len(share._buckets[key]) == (1 if expired else 21)
        clock.moves(0.25)
    assert list(share.get(key).value.data) == ["other"]


def hivemind_storage():
    from hivemind.dht.storage import DHTLocalStorage

    return DHTLocalStorage()


def test_records_stored_before_the_start_are_taken_over_within_the_bounds(hivemind, share, identity):
    early = hivemind_storage()
    assert stored(early, identity, lifetime_s=59.0)
    assert stored(early, identity, run_id=OTHER_RUN, lifetime_s=3659.0)
    share.take_over(early)
    assert list(share._held) == [(key_of(RUN, ""), identity.peer_id)]


def test_a_value_without_a_signer_is_not_stored(share):
    assert not share.store("x", b"value", time.time() + 30)
    assert not share._held and "x" not in share and share.get("x") is None


class Calls:
    """Where hivemind's `P2P` keeps the handlers of the DHT."""

    def __init__(self):
        self.handlers = {}

    async def add_protobuf_handler(self, name, handler, *_, **__):
        self.handlers[name] = handler


class From:
    def __init__(self, peer):
        self.remote_id = self
        self.to_base58 = lambda: peer
        self.to_bytes = peer.encode


async def place_of(peer):
    return "here"


async def test_requests_a_minute_of_a_peer_and_of_its_place(clock):
    """Those of one kind leave room for the others."""
    from hivemind.proto import dht_pb2

    calls, made = Calls(), Counter()

    async def handler(request, context):
        made[context.to_base58()] += 1
        assert place_of_caller.get() == "here"
        return {"Ping": dht_pb2.PingResponse, "Store": dht_pb2.StoreResponse, "Find": dht_pb2.FindResponse}[kind]()

    async def refused(reply):
        with suppress(PeerRefused):
            reply = await reply
            return dht_messages.are_left_out(reply) if kind == "Find" else kind == "Store" and reply.store_ok == [False]
        return True

    own = From("one")
    store = dht_pb2.StoreRequest(
        keys=[bytes(20)],
        subkeys=[dht_messages.packed_text("one")],
        values=[b""],
        expiration_time=[1.0],
        in_cache=[False],
    )
    checked = CheckedCalls(calls, place_of, 60.0)
    for kind in ("Find", "Ping", "Store"):
        await checked.add_protobuf_handler(kind, handler, dht_pb2.PingRequest)
    for kind, request, most in (
        ("Find", dht_pb2.FindRequest(keys=[bytes(20)]), LOOK_UPS_A_MINUTE),
        ("Ping", dht_pb2.PingRequest(), OTHERS_A_MINUTE),
    ):
        made.clear()
        ask = calls.handlers[kind]
        said = [await refused(ask(request, own if n < most else From(f"{n}"))) for n in range(2 * most)]
        assert made["one"] in range(PEER_A_MINUTE, PEER_A_MINUTE + 9)
        assert made.total() in range(most, most + 9)
        assert said.count(True) == 2 * most - made.total()
    kind = "Store"
    assert await refused(calls.handlers[kind](store, own))
    checked._others.begin = lambda *_: True
    assert not await refused(calls.handlers[kind](store, own))


async def test_sixty_nodes_behind_one_address_may_ask_a_node_that_is_the_whole_dht(hivemind):
    """Each looks up every 5 s and stores at two depths every 20 s, at times at depth 0: two requests a store."""
    from hivemind.proto import dht_pb2

    calls = Calls()

    async def handler(request, context):
        return dht_pb2.PingResponse()

    await CheckedCalls(calls, place_of, 60.0).add_protobuf_handler("any", handler, dht_pb2.PingRequest)
    find = dht_pb2.FindRequest(keys=[bytes(20)])
    for request, times in ((find, 12 + 3 * 3), (dht_pb2.PingRequest(), 3 * 3)):
        for number in range(60 * times):
            reply = await calls.handlers["any"](request, From(f"{number % 60}"))
            assert reply.DESCRIPTOR.name == "PingResponse", "no refusal"


async def test_what_a_place_may_fetch_together_is_bounded_in_bytes(clock):
    """A bucket of a made-up run, full of large records, asked for again and again by many ids of one host."""
    from hivemind.proto import dht_pb2

    whole = dht_messages.written_bucket([(f"{n}", b"\xc5\x0f\xff" + bytes(4095), 1e9) for n in range(MAX_IN_BUCKET)])

    async def handler(request, context):
        kind = dht_pb2.FOUND_DICTIONARY if whole else dht_pb2.NOT_FOUND
        found = dht_pb2.FindResult(type=kind, value=whole, nearest_node_ids=[bytes(20)])
        return dht_pb2.FindResponse(results=[found])

    calls, traffic, where = Calls(), Traffic(), "one place"

    async def at(peer):
        return where

    async def ask(by):
        reply = await calls.handlers["DHTProtocol.rpc_find"](dht_pb2.FindRequest(), From(by))
        (result,) = reply.results
        assert list(result.nearest_node_ids) == [bytes(20)]
        assert dht_messages.are_left_out(reply) == (not result.value), "and says so"
        return len(result.value)

    await CheckedCalls(calls, at, 60.0, traffic).add_protobuf_handler(
        "DHTProtocol.rpc_find", handler, dht_pb2.FindRequest
    )
    fetched = [await ask(f"peer {n // 100}") for n in range(1000)]
    assert set(fetched) == {0, len(whole)}
    assert sum(fetched) < PLACE_BYTES_S * SAVED_S + len(whole)
    where = "another place"
    assert await ask("other") == len(whole)
    assert 0 <= traffic.used.sent - sum(fetched) - len(whole) < 100 * fetched.count(len(whole)), "the day counts them"
    traffic.may_answer = lambda *_: False
    whole = b""
    reply = await calls.handlers["DHTProtocol.rpc_find"](dht_pb2.FindRequest(), From("other"))
    assert dht_messages.are_left_out(reply) and reply.ByteSize() < 64, "nor the neighbours where there are no records"


def test_what_a_look_up_adds_to_an_answer_is_not_stored(share, identity):
    assert stored(share, identity)
    found = share.get(key_of(RUN, ""))
    found.value.store("another", b"record", time.time() + 1e9)
    assert set(share.get(key_of(RUN, "")).value.data) == {identity.peer_id}
    assert share.get("nothing is there") is None


async def test_nodes_that_found_their_bucket_full_are_remembered_as_few_as_it_has_places(hivemind):
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID, RoutingTable
    from hivemind.p2p import PeerID

    protocol, pinged = DHTProtocol(_initialized_with_create=True), []
    protocol.routing_table = table = RoutingTable(DHTID(0), 8, 5)

    async def ping(peer):
        pinged.append(peer)

    protocol.call_ping, update = ping, partial(learn_of, protocol)
    for number in range(3000):
        raw = f"peer {number}".encode()
        await update(DHTID.from_bytes(dht_messages.node_id(raw)), PeerID(raw))
    assert pinged and all(len(bucket.replacement_nodes) <= 8 for bucket in table.buckets)
    assert len(table.uid_to_peer_id) == len(table.peer_id_to_uid) <= 16 * len(table.buckets) < 1000
    known = next(iter(table.buckets[0].nodes_to_peer_id.items()))
    await update(None, known[1], responded=False)
    assert known[0] not in table and known[1] not in table
    await update(None, PeerID(b"of no id"), responded=True)
