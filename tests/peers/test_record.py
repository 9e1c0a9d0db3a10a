"""A presence record is accepted as it was written, and one that does not pass every check is ignored."""

import math

import pytest
from records import NOW, OTHER_RUN, RUN, presence, record

from noloco_node.base.addresses import Address, parse
from noloco_node.base.identity import Identity
from noloco_node.peers import record as module
from noloco_node.peers.record import accept, bucket_of, is_publishable, key_of, publishable
from noloco_node.wire import peer_pb2 as pb

RELAY = "/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo/p2p-circuit"


def test_a_correct_record_is_read_as_it_was_written(identity):
    read = accept(identity.peer_id, record(identity), RUN, NOW + 5, ttl_s=60)
    assert read is not None
    assert (read.peer_id, read.state, read.round, read.step) == (identity.peer_id, "training", 3, 150)
    assert (read.loss, read.tokens_per_s, read.boot) == (2.5, 9e3, b"b" * 16)
    assert read.addresses == presence(identity).addresses
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
        {"loss": math.inf},
        {"loss": -1e300},
        {"tokens_per_s": 1e300},
        {"round": 1 << 60},
        {"addresses": ("/ip4/127.0.0.1/tcp/4001",)},
        {"addresses": ("garbage",)},
    ],
    ids=str,
)
def test_a_record_that_is_not_sane_is_ignored(identity, changes):
    assert accept(identity.peer_id, record(identity, **changes), RUN, NOW, ttl_s=60) is None


def test_the_loss_of_a_task_may_be_below_zero(identity):
    found = accept(identity.peer_id, record(identity, loss=-3.5), RUN, NOW, ttl_s=60)
    assert found and found.loss == -3.5


def test_addresses_are_bounded_in_number_and_length_and_must_parse(identity):
    end = f"/p2p/{identity.peer_id}"
    good, long = f"/ip4/127.0.0.1/tcp/1{end}", f"/dns4/{'x.' * 100}/tcp/1{end}"
    for addresses in ([good] * 9, [long], [f"/ip4/1.2.3/tcp/1{end}"], [f"/nonsense/1{end}"]):
        assert accept(identity.peer_id, record(identity, addresses=tuple(addresses)), RUN, NOW, ttl_s=60) is None
    assert accept(identity.peer_id, record(identity, addresses=(good,) * 8), RUN, NOW, ttl_s=60)


def test_addresses_of_udp_are_left_out(identity):
    ways = [f"/ip4/9.9.9.9/{way}/p2p/{identity.peer_id}" for way in ("udp/1/quic-v1", "tcp/1", "udp/2")]
    read = accept(identity.peer_id, record(identity, addresses=tuple(ways)), RUN, NOW, ttl_s=60)
    assert read is not None and [str(address) for address in read.addresses] == [ways[1]]


def test_a_forged_or_damaged_record_is_ignored(identity, tmp_path):
    other = Identity.load_or_create(tmp_path / "other")
    correct = record(identity)
    assert accept(other.peer_id, correct, RUN, NOW, ttl_s=60) is None
    for damaged in (b"", correct[:-1], correct[1:], b"\xff" * 300, correct + bytes(module.MAX_RECORD_BYTES)):
        assert accept(identity.peer_id, damaged, RUN, NOW, ttl_s=60) is None
    forged = pb.SignedPresence.FromString(correct)
    body = pb.Presence.FromString(forged.presence)
    body.round = 999
    forged.presence = body.SerializeToString()
    assert accept(identity.peer_id, forged.SerializeToString(), RUN, NOW, ttl_s=60) is None


def test_a_runs_peers_can_be_spread_over_keys(identity):
    assert key_of(RUN, bucket_of(identity.peer_id, 0)) == f"noloco/{RUN}/peers/"
    bucket = bucket_of(identity.peer_id, 5)
    assert len(bucket) == 5 and set(bucket) <= {"0", "1"}
    assert bucket_of(identity.peer_id, 6).startswith(bucket)


def test_an_address_for_which_others_would_drop_the_record_is_not_published(identity):
    end = f"/tcp/1/p2p/{identity.peer_id}"
    for name in ("my-host.example", "train_node"):
        assert is_publishable(parse(f"/dns4/{name}{end}"), identity.peer_id)
    for text in (f"/dns4/{'x.' * 100}{end}", "/ip4/192.0.2.1/tcp/1"):
        assert not is_publishable(parse(text), identity.peer_id)
    assert not is_publishable(Address("ip6", "fe80::1%eth0", 1, identity.peer_id), identity.peer_id)


def test_of_too_many_addresses_those_are_published_by_which_others_reach_this_node(identity):
    end = f"/p2p/{identity.peer_id}"
    over, named = f"/ip4/9.9.9.9/tcp/1{RELAY}{end}", f"/dns4/a.example/tcp/1{end}"
    mine = [f"/ip4/{host}/tcp/1{end}" for host in ("192.168.1.5", "8.8.8.8")]
    bridges = [f"/ip4/172.{17 + number}.0.1/tcp/1{end}" for number in range(8)]
    relays = [f"/ip4/9.9.9.{number}/tcp/1{RELAY}{end}" for number in range(9)]

    def shown(*texts):
        return list(map(str, publishable(list(map(parse, texts)), identity.peer_id)))

    assert shown(*bridges, over) == [*bridges[:7], over]
    assert shown(*bridges, *mine, named) == [*bridges[:6], mine[1], named]
    assert shown(*mine, *relays) == [*mine, *relays[:6]]
    assert shown(*bridges, *relays) == [*bridges[:4], *relays[:4]]
    assert shown(*mine, "/ip4/8.8.8.8/tcp/1") == mine
