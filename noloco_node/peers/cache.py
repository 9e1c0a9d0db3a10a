"""Where peers could be reached that were there lately: one small file in the home, for when nobody else shows the way.

A bootstrap node may be gone when this node starts again, and two islands may know each other by nothing but this. What
stands here came from signed records, but whoever can write the file can write anything: it is checked like what comes
from the network, and who really answers at an address is proved by libp2p. A damaged file is said, and begun anew.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from noloco_node.base import atomic_files
from noloco_node.base.identity import is_peer_id
from noloco_node.peers.record import MAX_ADDRESSES, is_address

MAX_PEERS = 64
"""The latest: enough that some of them are still there after a week, however many come and go."""
MAX_FILE_BYTES = 256 << 10
"""As many peers as that, with all the addresses they may have, at the length that those may have, are less."""
LATEST = 1 << 34
"""Seconds since 1970 that a clock may show: who was seen in five centuries would be the last to be forgotten."""
_LOST = "peers seen before this start are forgotten"


class Seen(Protocol):
    """What is needed of a PeerRecord."""

    @property
    def peer_id(self) -> str: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def time(self) -> float: ...


class PeerCache:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: dict[str, tuple[float, tuple[str, ...]]] | None = None
        self._written: object = None

    def peers(self) -> dict[str, tuple[str, ...]]:
        """Addresses by peer id, who was seen last first."""
        found = self._read()
        return {peer: found[peer][1] for peer in sorted(found, key=lambda peer: -found[peer][0])}

    def keep(self, records: Iterable[Seen]) -> None:
        """Write those down that were there. Raises DiskFull, UsageError."""
        there = {r.peer_id: (r.time, r.addresses) for r in records if r.addresses}
        found = {**self._read(), **there}
        latest = sorted(found, key=lambda peer: -found[peer][0])[:MAX_PEERS]
        self._peers = {peer: found[peer] for peer in latest}
        if (content := {peer: addresses for peer, (_, addresses) in self._peers.items()}) == self._written:
            return  # nothing but the times has changed
        table = {peer: {"seen": round(at), "addresses": addresses} for peer, (at, addresses) in self._peers.items()}
        atomic_files.write(self._path, json.dumps(table, indent=1) + "\n")
        self._written = content

    def _read(self) -> dict[str, tuple[float, tuple[str, ...]]]:
        if self._peers is None:
            found = atomic_files.read_json_or_set_aside(self._path, _checked, MAX_FILE_BYTES, _LOST)
            self._peers = found or {}
        return self._peers


def _checked(table: object) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Only what could have been written here."""
    if not isinstance(table, dict):
        raise ValueError("it is not a table of peers")
    found = {}
    for peer, entry in list(table.items())[:MAX_PEERS]:
        match entry:
            case {"seen": int() | float() as seen, "addresses": list() as addresses} if (
                is_peer_id(peer)
                and 0 <= seen <= LATEST
                and 0 < len(addresses) <= MAX_ADDRESSES
                and all(isinstance(address, str) and is_address(address, peer) for address in addresses)
            ):
                found[peer] = (float(seen), tuple(addresses))
    return found
