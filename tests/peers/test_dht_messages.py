"""What another node of the DHT may send: what ours send passes, everything else is refused or taken out."""

import math
import time

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from records import record

from noloco_node.base.identity import Identity
from noloco_node.errors import PeerMisbehaved
from noloco_node.peers import dht_messages
from noloco_node.peers.dht_messages import MAX_IN_BUCKET, Bounded, check_reply, check_request, node_id, read_bucket
from noloco_node.transport.libp2p import _import_hivemind

LONGEST_S = 180.0
BUCKET, NOT_FOUND = 2, 0


@pytest.fixture(scope="module", autouse=True)
def hivemind():
    return _import_hivemind()


@pytest.fixture(scope="module")
def pb():
    from hivemind.proto import dht_pb2

    return dht_pb2


@pytest.fixture
def identities(tmp_path):
    return [Identity(Ed25519PrivateKey.generate(), tmp_path / "nowhere") for _ in range(3)]


def peer(identity):
    from hivemind.p2p import PeerID

    return PeerID.from_base58(identity.peer_id)


def own_id(identity):
    return node_id(peer(identity).to_bytes())


def packed(identity, now=None):
    from hivemind.utils.serializer import MSGPackSerializer

    return MSGPackSerializer.dumps(record(identity, now=now or time.time()))


def written(*entries):
    """As hivemind writes a bucket."""
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer

    bucket = DictionaryDHTValue()
    for entry in entries:
        bucket.store(*entry)
    return MSGPackSerializer.dumps(bucket)


def loads(raw):
    from hivemind.utils.serializer import MSGPackSerializer

    return MSGPackSerializer.loads(raw)


def found(pb, value, kind=BUCKET, **more):
    return pb.FindResponse(results=[pb.FindResult(type=kind, value=value, expiration_time=1e300, **more)])


def nested(levels, code=0x40):
    data = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(code, data))
    return data


def raw_bucket(body):
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(body)))


# ---- answers ----
def test_a_bucket_of_ours_comes_through_and_says_nothing_but_its_records(pb, identities):
    expires = time.time() + 59
    entries = [(identity.peer_id, packed(identity), expires + n) for n, identity in enumerate(identities)]
    reply = found(pb, written(*entries))
    check_reply(reply, peer(identities[0]), LONGEST_S)
    bucket = loads(reply.results[0].value)
    assert [(key, value.value, value.expiration_time) for key, value in bucket.items()] == entries
    assert bucket.latest_expiration_time == reply.results[0].expiration_time == expires + 2


def test_what_lives_too_long_is_taken_out_and_an_empty_bucket_is_none(pb, identities):
    now = time.time()
    reply = found(
        pb, written(*((i.peer_id, packed(i), now + s) for i, s in zip(identities, (59, 1e9, 59), strict=True)))
    )
    check_reply(reply, peer(identities[0]), LONGEST_S)
    assert set(loads(reply.results[0].value).data) == {identities[0].peer_id, identities[2].peer_id}
    for empty in (written(), written((identities[0].peer_id, packed(identities[0]), now + 1e9))):
        reply = found(pb, empty)
        check_reply(reply, peer(identities[0]), LONGEST_S)
        assert (reply.results[0].type, reply.results[0].value) == (NOT_FOUND, b"")


def test_a_value_without_a_signer_is_no_answer(pb, identities):
    reply = found(pb, b"anything", kind=1)
    check_reply(reply, peer(identities[0]), LONGEST_S)
    assert (reply.results[0].type, reply.results[0].value) == (NOT_FOUND, b"")


RECORD = ["signer", b"\xc4\x01x", 1.0]


@pytest.mark.parametrize(
    "value",
    [
        nested(250),
        nested(50_000),
        raw_bucket(["x", 1.0, []])[:-1],
        raw_bucket([math.inf, 1.0, [["signer", b"\xc4\x01x", 1.0, 2]]]),
        raw_bucket([math.inf, 1.0, [["signer", b"not packed", 1.0]]]),
        raw_bucket([math.inf, 1.0, [["signer", b"\xc4\x01x", math.nan]]]),
        raw_bucket([math.inf, 1.0, [["signer", b"\xc4\x01x", 1]]]),
        raw_bucket([math.inf, 1.0, [[b"signer", b"\xc4\x01x", 1.0]]]),
        raw_bucket([math.inf, 1.0, [["signer" * 100, b"\xc4\x01x", 1.0]]]),
        raw_bucket([math.inf, 1.0, [["signer", b"\xc5\x10\x05" + bytes(4101), 1.0]]]),
        raw_bucket([math.inf, 1.0, [RECORD] * (MAX_IN_BUCKET + 1)]),
        raw_bucket([math.inf, 1.0, [["signer", msgpack.ExtType(0x40, nested(250)), 1.0]]]),
        raw_bucket([math.inf, 1.0, {"a": 1}]),
        raw_bucket("text"),
        msgpack.packb(msgpack.ExtType(0x50, b"\x93\xc0\xc0" + b"\x91" * 60_000)),
        msgpack.packb([1, 2, 3]),
        msgpack.packb(None),
        b"",
        b"\xc1",
    ],
    ids=lambda value: value[:12].hex(),
)
def test_a_made_up_bucket_is_refused(pb, identities, value):
    began = time.process_time()
    with pytest.raises(PeerMisbehaved):
        check_reply(found(pb, value), peer(identities[0]), LONGEST_S)
    assert time.process_time() - began < 0.5


def test_what_a_bucket_says_beside_its_records_does_not_count(pb, identities):
    value = raw_bucket(["x", "y", [[identities[0].peer_id, packed(identities[0]), time.time() + 59]]])
    reply = found(pb, value)
    check_reply(reply, peer(identities[0]), LONGEST_S)
    assert loads(reply.results[0].value).maxsize == math.inf


def test_of_neighbours_those_stay_whose_id_is_theirs(pb, identities):
    one, two, three = identities
    ids = [own_id(one), own_id(one), own_id(two), bytes(20), b"", node_id(bytes(120_000))]
    peers = [*(peer(each).to_bytes() for each in (one, two, two, three, three)), bytes(120_000)]
    reply = found(pb, b"", kind=NOT_FOUND, nearest_node_ids=ids * 100, nearest_peer_ids=peers)
    began = time.process_time()
    check_reply(reply, peer(one), LONGEST_S)
    assert time.process_time() - began < 0.5
    (result,) = reply.results
    assert list(result.nearest_peer_ids) == [peer(one).to_bytes(), peer(two).to_bytes()]
    assert list(result.nearest_node_ids) == [own_id(one), own_id(two)]


def test_an_answer_is_no_larger_than_an_honest_one_may_be(pb, identities):
    answer = Bounded(pb.FindResponse, dht_messages.MAX_REPLY_BYTES)
    whole = [(each.peer_id, b"\xc5\x0f\xff" + bytes(4095), 1e9) for each in identities[:1] * MAX_IN_BUCKET]
    honest = found(pb, dht_messages.written_bucket(whole), nearest_peer_ids=[bytes(38)] * dht_messages.MAX_NEIGHBOURS)
    assert answer.FromString(honest.SerializeToString()) == honest
    with pytest.raises(PeerMisbehaved):
        answer.FromString(found(pb, bytes(2 << 20)).SerializeToString())
    many = pb.FindResponse(results=[pb.FindResult(type=NOT_FOUND)] * 1000)
    check_reply(many, peer(identities[0]), LONGEST_S)
    assert len(many.results) == dht_messages.MAX_KEYS


# ---- requests ----
def test_who_names_another_id_than_its_own_is_no_part_of_the_dht(pb, identities):
    one, two, _ = identities
    for message in (pb.PingRequest, pb.FindRequest):
        named = message(peer=pb.NodeInfo(node_id=own_id(one)))
        check_request(named, peer(one))
        assert named.peer.node_id == own_id(one)
        check_request(named, peer(two))
        assert named.peer.node_id == b""
    answer = pb.PingResponse(peer=pb.NodeInfo(node_id=own_id(one)))
    check_reply(answer, peer(two), LONGEST_S)
    assert answer.peer.node_id == b""


def store(pb, identity, **changes):
    fields = {
        "keys": [bytes(20)],
        "subkeys": [dht_messages.packed_text(identity.peer_id)],
        "values": [packed(identity)],
        "expiration_time": [time.time() + 59],
        "in_cache": [False],
    }
    return pb.StoreRequest(**{**fields, **changes})


def test_a_peer_stores_its_own_records_one_at_a_time(pb, identities):
    one, two, _ = identities
    check_request(store(pb, one), peer(one))
    for by, changes in (
        (two, {}),
        (one, {"subkeys": [b""]}),
        (one, {"subkeys": [b"\xc0"]}),
        (one, {"subkeys": []}),
        (one, {"keys": [bytes(21)]}),
        (one, {"keys": []}),
        (one, {"expiration_time": [math.nan]}),
        (one, {"keys": [bytes(20)] * 2}),
    ):
        with pytest.raises(PeerMisbehaved):
            check_request(store(pb, one, **changes), peer(by))
    large = store(pb, one, values=[bytes(1 << 17)]).SerializeToString()
    with pytest.raises(PeerMisbehaved):
        Bounded(pb.StoreRequest, dht_messages.MAX_REQUEST_BYTES).FromString(large)


def test_a_request_looks_for_few_keys(pb, identities):
    request = pb.FindRequest(keys=[bytes(20)] * 1000)
    check_request(request, peer(identities[0]))
    assert len(request.keys) == dht_messages.MAX_KEYS
    with pytest.raises(PeerMisbehaved):
        check_request(pb.FindRequest(keys=[b"short"]), peer(identities[0]))


# ---- whatever comes ----
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | inner.map(lambda value: msgpack.ExtType(0x50, msgpack.packb(value)))
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values.map(msgpack.packb) | st.binary(max_size=200) | values.map(raw_bucket))
def test_any_bytes_are_a_bucket_or_are_refused(raw):
    try:
        records = read_bucket(raw)
    except PeerMisbehaved:
        return
    assert len(records) <= MAX_IN_BUCKET
    assert all(tuple(map(type, each)) == (str, bytes, float) for each in records)
    if records:
        assert read_bucket(dht_messages.written_bucket(records)) == records


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_what_protobuf_reads_is_checked_or_refused(raw):
    from google.protobuf.message import DecodeError
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    for kind in (dht_pb2.PingRequest, dht_pb2.StoreRequest, dht_pb2.FindRequest, dht_pb2.FindResponse):
        try:
            message = kind.FromString(raw)
            if kind is dht_pb2.FindResponse:
                check_reply(message, PeerID(bytes(38)), LONGEST_S)
            else:
                check_request(message, PeerID(bytes(38)))
        except (DecodeError, PeerMisbehaved):
            pass
