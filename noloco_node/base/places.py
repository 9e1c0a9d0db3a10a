"""Places in the network: where a peer is, as coarse as whoever rents addresses gets them.

Identities cost nothing and addresses in one network little, so whoever draws peers draws a place first, and shares are
counted by place. Private and loopback addresses are handed out one by one: each is a place of its own.
"""

import ipaddress

_IPV4_PREFIX, _IPV6_PREFIX = 24, 48
"""The smallest networks that are routed on their own; a household or a rented server has addresses in one."""


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
