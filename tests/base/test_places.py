"""Where a peer is: one network prefix, one place."""

import pytest

from noloco_node.base.places import place_of


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("8.8.8.8", "8.8.8.0/24"),
        ("8.8.8.77", "8.8.8.0/24"),
        ("::ffff:8.8.8.8", "8.8.8.0/24"),
        ("2a00:1450:4001:82f::200e", "2a00:1450:4001::/48"),
        ("10.1.2.3", "10.1.2.3"),
        ("127.0.0.2", "127.0.0.2"),
        ("fe80::1%eth0", "fe80::1"),
        ("Example.Org", "example.org"),
    ],
)
def test_addresses_of_one_network_are_one_place(host: str, place: str) -> None:
    assert place_of(host) == place
