"""Places in the network: where a peer is, as coarse as whoever rents addresses gets them.

Identities cost nothing and addresses in one network little, so whoever draws peers draws a place first, and shares are
counted by place. Private and loopback addresses are handed out one by one: each is a place of its own.
"""

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from noloco_node.base.addresses import Address

_IPV4_PREFIX, _IPV6_PREFIX = 24, 48
"""The smallest networks that are routed on their own; a household or a rented server has addresses in one."""
RELAYED = "over a relay"
"""The place of all who come over a relay, as long as nobody who is trusted knows more of them. It is one for all
relays: anybody may run one, so a host with a relay is at two places and not at as many as it likes."""
GONE = "gone"
"""The place of all who ask something and are not connected any more: each would else have one of its own."""


@lru_cache(maxsize=4096)  # each look asks it of each peer, and so does each second
def place_of(host: str) -> str:
    """The network of an IP address; a DNS name is a place of its own."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower()
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if not address.is_global:
        return str(address)
    prefix = _IPV4_PREFIX if address.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_network((address, prefix), strict=False))


def claimed(peer: str, addresses: Sequence[Address]) -> str:
    """The place at which a peer says that it is; one that names no address is at a place of its own."""
    if not addresses:
        return peer
    best = min(addresses, key=lambda address: address.kind.startswith("dns"))  # names cost nothing
    return RELAYED if best.relay else place_of(best.host)


class Random(Protocol):
    """The part of `random.Random` that is used here."""

    def choice(self, options: Sequence[str], /) -> str: ...


def draw(rng: Random, peers: Mapping[str, str]) -> str:
    """One of these peers, each given with its place: a place first, then one of the peers there."""
    place = rng.choice(sorted(set(peers.values())))
    return rng.choice(sorted(peer for peer, where in peers.items() if where == place))


def in_turn(places: Mapping[str, str]) -> list[str]:
    """What is at these places in its order, but of each place one before any gives another."""
    before, turn = Counter[str](), dict[str, int]()
    for each, place in places.items():
        turn[each] = before[place]
        before[place] += 1
    return sorted(turn, key=turn.__getitem__)


def several(rng: Random, peers: Mapping[str, str], most: int) -> list[str]:
    """So many different ones, in the order in which they were drawn: from each place one before any gives another."""
    left, turn, drawn = dict(peers), dict[str, str](), list[str]()
    while left and len(drawn) < most:
        turn = turn or left
        peer = draw(rng, turn)
        drawn.append(peer)
        turn = {other: place for other, place in turn.items() if place != left[peer]}
        del left[peer]
    return drawn
