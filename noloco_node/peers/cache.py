"""Addresses of peers seen lately, in one small file in the home, for when no bootstrap node answers.

A bootstrap node may be gone when this node starts again, and two parts of a split swarm may find each other only by
this file. It comes from signed records, but anyone who can write the file can write anything: it is checked like what
comes from the network, and libp2p proves who answers at an address. A damaged file is logged and replaced.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from noloco_node.base import atomic_files
from noloco_node.base.addresses import Address
from noloco_node.base.identity import is_peer_id
from noloco_node.base.places import claimed, in_turn
from noloco_node.peers.record import PeerRecord, read_addresses

MAX_PEERS = 64
"""The peers seen last, of each place the same number: enough that some are still there after a week."""
MAX_FILE_BYTES = 256 << 10
"""More than a file of MAX_PEERS peers with the most and longest addresses has."""
AGAIN_S = 3600.0
"""How often it is written at least, so that who has gone is not first for ever."""
LATEST = 1 << 34
"""Seconds since 1970 that a clock may show: a peer seen in five centuries would be dropped last."""
_LOST = "peers seen before this start are forgotten"


class PeerCache:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: dict[str, tuple[float, tuple[Address, ...]]] | None = None
        self._written: object = None
        self._written_at = 0.0

    def peers(self) -> dict[str, tuple[Address, ...]]:
        """Addresses by peer id, the peer that was seen last first."""
        found = self._read()
        return {peer: found[peer][1] for peer in sorted(found, key=lambda peer: -found[peer][0])}

    def keep(self, records: Iterable[PeerRecord], met: Mapping[str, str] | None = None) -> None:
        """Add peers that are there now. `met`: in which place each was met, where that is known; others are where they
        say that they are. Raises DiskFull, UsageError."""
        now = time.time()
        there = {r.peer_id: (min(r.time, now), r.addresses) for r in records if r.addresses}
        found = {**self._read(), **there}
        latest = sorted(found, key=lambda peer: -found[peer][0])
        where = {peer: (met or {}).get(peer) or claimed(peer, found[peer][1]) for peer in latest}
        self._peers = {peer: found[peer] for peer in in_turn(where)[:MAX_PEERS]}
        content = {peer: addresses for peer, (_, addresses) in self._peers.items()}
        if content == self._written and now < self._written_at + AGAIN_S:
            return  # nothing but the times has changed
        table = {
            peer: {"seen": int(at), "addresses": list(map(str, addresses))}
            for peer, (at, addresses) in self._peers.items()
        }
        atomic_files.write(self._path, json.dumps(table, indent=1) + "\n")
        self._written, self._written_at = content, now

    def _read(self) -> dict[str, tuple[float, tuple[Address, ...]]]:
        if self._peers is None:
            found = atomic_files.read_json_or_set_aside(self._path, _checked, MAX_FILE_BYTES, _LOST)
            self._peers = found or {}
        return self._peers


def _checked(table: object) -> dict[str, tuple[float, tuple[Address, ...]]]:
    """Only entries that `keep` could have written."""
    if not isinstance(table, dict):
        raise ValueError("it is not a table of peers")
    found, now = {}, time.time()
    for peer, entry in list(table.items())[:MAX_PEERS]:
        match entry:
            case {"seen": int() | float() as seen, "addresses": list() as addresses} if (
                is_peer_id(peer)
                and 0 <= seen <= LATEST
                and all(isinstance(address, str) for address in addresses)
                and (known := read_addresses(addresses, peer))
            ):
                found[peer] = (float(seen) if seen <= now else 0.0, known)  # by a clock that was ahead
    return found
