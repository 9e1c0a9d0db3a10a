"""Addresses: one grammar for every place that text comes from, and one canonical text."""

import socket
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.base.addresses import ANY_PORT, EXAMPLE, Address, for_others, parse, seen_outside
from noloco_node.errors import UsageError

PEER = EXAMPLE.rpartition("/")[2]
RELAY = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"

labels = st.text(string.ascii_letters + "0123456789_-", min_size=1, max_size=63)
hosts = st.one_of(
    st.tuples(st.just("ip4"), st.ip_addresses(v=4).map(str)),
    st.tuples(st.just("ip6"), st.ip_addresses(v=6).map(str)),
    st.tuples(st.sampled_from(["dns", "dns4", "dns6"]), st.lists(labels, min_size=1, max_size=3).map(".".join)),
)
addresses = st.builds(
    lambda host, port, peer, relay, transport: Address(*host, port, peer, relay, transport),
    hosts,
    st.integers(0, 65535),
    st.sampled_from(["", PEER]),
    st.sampled_from(["", RELAY]),
    st.sampled_from(["tcp", "tcp/ws", "tcp/wss", "udp", "udp/quic-v1"]),
)


@given(addresses)
def test_the_text_of_an_address_is_read_back_as_the_same(address):
    assert parse(str(address)) == address


@given(
    st.one_of(
        st.text(), st.lists(st.sampled_from([*EXAMPLE.split("/"), PEER, "::1", "p2p-circuit", "x"])).map("/".join)
    )
)
def test_any_other_text_is_a_mistake_of_the_user(text):
    try:
        assert str(parse(text)) == text
    except UsageError as error:
        assert EXAMPLE in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:4001",
        f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/٣/p2p/{PEER}",
        f"/ip4/127.0.0.256/tcp/4001/p2p/{PEER}",
        f"/ip4/::1/tcp/4001/p2p/{PEER}",
        f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER}",
        f"/dns4/two words/tcp/4001/p2p/{PEER}",
        f"/dns4/a:b/tcp/4001/p2p/{PEER}",
        f"/dns4/example..org/tcp/4001/p2p/{PEER}",
        f"/dns4/.example.org/tcp/4001/p2p/{PEER}",
        f"/dns4/./tcp/4001/p2p/{PEER}",
        f"/dns4/{'x' * 64}.org/tcp/4001/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER[:-1]}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}/",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}\n",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/4001/p2p-circuit/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{RELAY[:-1]}/p2p-circuit/p2p/{PEER}",
        f" /ip4/127.0.0.1/tcp/4001/p2p/{PEER}",
    ],
)
def test_a_malformed_address_is_answered_with_an_example(text):
    with pytest.raises(UsageError, match="12D3KooW"):
        parse(text)


def test_what_a_multiaddr_says():
    assert parse("/ip6/::1/tcp/4001").host_and_port == "[::1]:4001"
    assert parse("/ip4/0.0.0.0/tcp/0") == ANY_PORT
    assert parse(EXAMPLE) == Address("ip4", "203.0.113.7", 4001, PEER)
    assert parse(f"/dns/example.org/tcp/4001/p2p/{PEER}").family == socket.AF_UNSPEC
    assert parse("/dns4/example.org./tcp/1").host == "example.org."
    assert parse(EXAMPLE).family == socket.AF_INET
    through = parse(f"/ip4/192.0.2.9/udp/1/quic-v1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}")
    assert (through.relay, through.peer, through.transport) == (RELAY, PEER, "udp/quic-v1")
    assert str(through.without_peers()) == "/ip4/192.0.2.9/udp/1/quic-v1"


def test_only_addresses_that_others_can_use_are_published():
    everywhere = [
        Address("ip4", "0.0.0.0", 1),
        Address("ip4", "127.0.0.1", 1),
        Address("ip4", "192.0.2.1", 1),
        Address("ip6", "::1", 1),
        Address("ip6", "fe80::1", 1),
    ]
    assert for_others(everywhere) == [Address("ip4", "192.0.2.1", 1)]
    assert for_others(everywhere[:2]) == [Address("ip4", "127.0.0.1", 1)]
    relayed, named = parse(f"/ip4/192.0.2.9/tcp/1/p2p/{RELAY}/p2p-circuit"), Address("dns4", "example.org", 1)
    assert for_others([relayed, named]) == [relayed, named]
    assert seen_outside([*everywhere, relayed]) == [("192.0.2.1", 1)]
    assert seen_outside(everywhere[:2]) == []
