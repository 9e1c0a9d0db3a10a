"""What this node stores for others as a node of the DHT: which records it accepts, and how many.

hivemind keeps every record that comes, and of two the one that expires later: without these checks, anybody could
overwrite anybody's record for a billion seconds, and fill our memory. `RecordValidator` accepts a record only if
its own peer signed it, at a key it belongs to, with the expiry that follows from the signed time; `DhtStorage` bounds
how many are stored. Both take hivemind's place for its `DHTNode`, and import it late: that takes seconds.
"""

import time
from collections import Counter, OrderedDict
from typing import Any

from noloco_node.peers.record import bucket_of, key_of, read
from noloco_node.peers.size_estimate import MAX_DEPTH

# A record of a real node takes 1.1 kB of memory with its overhead.
MAX_RECORDS = 1 << 14
"""8,000 peers at two depths, even where one rendezvous node is the whole DHT: 18 MB; 80 MB if every record were as
large as allowed."""
MAX_IN_BUCKET = 512
"""20 times as many as peers/size_estimate.py puts into one: an answer of 200 kB, of 2 MB at the worst."""
MAX_OF_SIGNER = 16
"""At two depths and at depth 0, and those of the last two minutes, in which a run may grow a hundredfold."""


class RecordValidator:
    """Which records are accepted; its methods are those of hivemind's `RecordValidatorBase`.

    Called for every record that others store here, and for every record in an answer: one bad record discards the whole
    answer of a node, so nothing here depends on two clocks agreeing. `DhtStorage` decides how long a record is stored.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s

    def validate(self, record: Any) -> bool:
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        # msgpack's headers are cut off and put back instead of read: garbage never reaches a deserialiser.
        peer_id = record.subkey[2:].decode("ascii", errors="replace")  # str 8
        body = record.value[2 if record.value[:1] == b"\xc4" else 3 :]  # bin 8 or bin 16
        presence = read(peer_id, body)
        if presence is None or (record.subkey, record.value) != tuple(map(MSGPackSerializer.dumps, (peer_id, body))):
            return False
        run_id = presence.run_id.hex()
        keys = (key_of(run_id, bucket_of(peer_id, depth)) for depth in range(MAX_DEPTH + 1))
        belongs = any(record.key == DHTID.generate(key).to_bytes() for key in keys)
        return bool(belongs and record.expiration_time <= presence.time + self._ttl_s)

    def sign_value(self, record: Any) -> Any:
        return record.value

    def strip_value(self, record: Any) -> Any:
        return record.value


class DhtStorage:
    """The records that this node stores for others, in place of hivemind's storage, which has no bounds.

    A stored record keeps its place, and new ones are refused when all places are taken: a flood of identities keeps new
    peers out for as long as it lasts, but removes no record that is stored. No record is stored for more than twice its
    lifetime: its signer's clock may be ahead of ours by one.
    """

    def __init__(self, ttl_s: float, most: int = MAX_RECORDS) -> None:
        from hivemind.dht.storage import DHTLocalStorage

        self._storage = DHTLocalStorage()
        self._longest_s = 2 * ttl_s
        self._most = most
        self._expires: OrderedDict[tuple[Any, str], float] = OrderedDict()
        """When the record of each bucket and signer expires, in the order in which they were stored."""
        self._counts: Counter[Any] = Counter()
        """Records of each bucket, and of each signer."""

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        now, place = time.time(), (key, subkey)
        self._drop_expired(now)
        if not now < expiration_time <= now + self._longest_s or not (place in self._expires or self._has_room(*place)):
            return False
        if not self._storage.store_subkey(key, subkey, value, expiration_time):
            return False
        if place not in self._expires:
            self._counts.update(place)
        self._expires[place] = expiration_time
        self._expires.move_to_end(place)
        _compact(self._storage)
        _compact(self._storage.get(key).value)
        return True

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        """A value without a signer is refused: no record of ours is one."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def take_over(self, early: Any) -> None:
        """Store what nearby nodes sent while this node was joining them, when hivemind had its own storage."""
        for key, (bucket, _) in early.items():
            for signer, (value, expires) in bucket.items():
                self.store_subkey(key, signer, value, expires)

    def get(self, key: Any) -> Any:
        return self._storage.get(key)

    def items(self) -> Any:
        return self._storage.items()

    def __contains__(self, key: object) -> bool:
        return key in self._storage

    def __len__(self) -> int:
        return len(self._storage)

    def _has_room(self, key: Any, signer: str) -> bool:
        counts = self._counts
        return len(self._expires) < self._most and counts[key] < MAX_IN_BUCKET and counts[signer] < MAX_OF_SIGNER

    def _drop_expired(self, now: float) -> None:
        """In the order of storing: one that lives long holds up the shorter ones behind it, for a minute at most."""
        while self._expires and next(iter(self._expires.values())) <= now:
            place, _ = self._expires.popitem(last=False)
            for part in place:
                self._counts[part] -= 1
                if not self._counts[part]:
                    del self._counts[part]


def _compact(storage: Any) -> None:
    """hivemind drops what has expired when its length is read, but leaves an entry in a heap for each renewal."""
    if len(storage.expiration_heap) > 2 * len(storage) + 16:
        storage.expiration_heap = sorted(storage.key_to_heap.values())
