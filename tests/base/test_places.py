"""Where a peer is: one network prefix, one place."""

from collections import Counter
from random import Random

import pytest

from noloco_node.base.addresses import parse
from noloco_node.base.places import RELAYED, claimed, draw, place_of, several

RELAY = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


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


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        ([], "anna"),
        (["/dns4/example.org/tcp/1", "/ip4/8.8.8.8/tcp/1"], "8.8.8.0/24"),
        (["/dns4/example.org/tcp/1"], "example.org"),
        ([f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit"], RELAYED),
    ],
)
def test_a_peer_says_where_it_is_by_its_best_address(texts: list[str], place: str) -> None:
    assert claimed("anna", [parse(text) for text in texts]) == place


ONE_HOST, HOMES = {f"fake {n}": "8.8.8.0/24" for n in range(1000)}, {"anna": "10.0.0.1", "bob": "10.0.0.2"}


def test_a_thousand_identities_on_one_host_are_drawn_as_one() -> None:
    rng = Random(1)
    drawn = Counter((ONE_HOST | HOMES)[draw(rng, ONE_HOST | HOMES)] for _ in range(600))
    assert drawn.keys() == {"8.8.8.0/24", "10.0.0.1", "10.0.0.2"}
    assert all(150 < count < 250 for count in drawn.values())


def test_of_several_none_comes_twice_and_each_place_gives_one_before_any_gives_another() -> None:
    rng = Random(1)
    assert several(rng, {}, 3) == []
    assert sorted(several(rng, HOMES, 3)) == ["anna", "bob"]
    for _ in range(20):
        first, drawn = several(rng, ONE_HOST | HOMES, 3), several(rng, ONE_HOST | HOMES, 6)
        assert {"anna", "bob"} < set(first) and {"anna", "bob"} < set(drawn[:3])
        assert len(set(drawn)) == 6
