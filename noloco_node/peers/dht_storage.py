"""What this node stores for others as a node of the DHT: which records it accepts, and how many.

hivemind keeps every record that comes, and of two the one that expires later: without these checks, anybody could
overwrite anybody's record for a billion seconds, and fill our memory. `RecordValidator` accepts a record only if
its own peer signed it, at a key it belongs to, with the expiry that follows from the signed time; `DhtStorage` bounds
how many are stored. Both take hivemind's place for its `DHTNode`, and import it late: that takes seconds. Who calls
is not told to them by hivemind: `NamesCallers` notes it.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from noloco_node.errors import PeerRefused
from noloco_node.peers.record import bucket_of, key_of, read
from noloco_node.peers.size_estimate import MAX_DEPTH
from noloco_node.transport.call_limits import CallLimits

# A record of a real node takes 1.1 kB of memory with its overhead.
MAX_RECORDS = 1 << 14
"""8,000 peers at two depths, even where one rendezvous node is the whole DHT: 18 MB; 80 MB if every record were as
large as allowed."""
MAX_IN_BUCKET = 512
"""20 times as many as peers/size_estimate.py puts into one: an answer of 200 kB, of 2 MB at the worst."""
MAX_OF_SIGNER = 16
"""At two depths and at depth 0, and those of the last two minutes, in which a run may grow a hundredfold."""
MAX_OF_OTHERS = 64
"""Records that one caller stores and has not signed: hivemind gives those of a bucket or two to a node that is new,
whose signers store them themselves within 20 s. Keys cost nothing, so who signed says little."""
MAX_KEYS = 4
"""That one request may look for: ours look for one, and each may be answered with a bucket."""
PEER_A_MINUTE, PLACE_A_MINUTE = 300, 1200
"""Requests: a node makes a few dozen."""


class Caller(NamedTuple):
    """Who asks this node to store, which libp2p has proved, and where it is (base/places.py)."""

    peer: str
    place: str


caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""None: this node itself."""


answer_size: ContextVar[list[int] | None] = ContextVar("answer_size", default=None)
"""How many records the answer or the request that is being read had so far: one number, which is counted up."""


class NamesCallers:
    """hivemind's `P2P`, which limits callers, and notes `caller` before the DHT stores: each call has a task, and so a
    context."""

    def __init__(self, p2p: Any, place_of: Callable[[str], Awaitable[str]]) -> None:
        self._p2p = p2p
        self._place_of = place_of
        self._limits = CallLimits(PEER_A_MINUTE, PLACE_A_MINUTE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def add_protobuf_handler(self, name: str, handler: Any, *args: Any, **options: Any) -> None:
        async def handle(request: Any, context: Any) -> Any:
            peer = context.remote_id.to_base58()
            by = Caller(peer, await self._place_of(peer))
            if not self._limits.begin(*by, False, time.monotonic()):
                raise PeerRefused("busy")
            try:
                caller.set(by)
                answer_size.set([0])
                if name.endswith("rpc_find"):
                    del request.keys[MAX_KEYS:]
                return await handler(request, context)
            finally:
                self._limits.end(*by, False)

        await self._p2p.add_protobuf_handler(name, handle, *args, **options)


class RecordValidator:
    """Which records are accepted; its methods are those of hivemind's `RecordValidatorBase`.

    Called for every record that others store here, and for every record in an answer: one bad record discards the whole
    answer of a node, so nothing here depends on two clocks agreeing. `DhtStorage` decides how long a record is stored.
    An answer with more records than a node stores in a bucket is made up: to check a signature takes 0.1 ms.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s

    def validate(self, record: Any) -> bool:
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        if (size := answer_size.get()) is not None:
            size[0] += 1
            if size[0] > MAX_IN_BUCKET:
                return False
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

    Records are charged to the place of the caller that stored them. When a bucket or the whole storage is full, the
    place that has most in it gives one up for a place that has less: a flood from one place, with however many
    identities, removes nobody else's record and keeps no new peer out. No record is stored for more than twice its
    lifetime: its signer's clock may be ahead of ours by one.
    """

    def __init__(self, ttl_s: float, most: int = MAX_RECORDS) -> None:
        from hivemind.dht.storage import DHTLocalStorage

        self._storage = DHTLocalStorage()
        self._longest_s = 2 * ttl_s
        self._most = most
        self._held: OrderedDict[tuple[Any, str], _Held] = OrderedDict()
        """The record of each bucket and signer, in the order in which they were stored."""
        self._counts: Counter[Any] = Counter()
        """Records of each bucket, of each signer, and of each caller that did not sign them."""
        self._places: Counter[str] = Counter()
        """Records of each place."""

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        now, by = time.time(), caller.get()
        self._drop_expired(now)
        held = self._held.get((key, subkey))
        new = _Held(expiration_time, by.peer if by and by.peer != subkey else "", by.place if by else "")
        if not now < expiration_time <= now + self._longest_s or not (held or self._make_room(key, subkey, new)):
            return False
        if not self._storage.store_subkey(key, subkey, value, expiration_time):
            return False
        if held and new.lent_by:  # who only passes a newer one on changes nothing else
            new = new._replace(lent_by=held.lent_by, place=held.place)
        self._forget(key, subkey)
        self._held[key, subkey] = new
        self._counts.update((key, subkey, *new.charged))
        self._places[new.place] += 1
        _compact(self._storage)
        _compact(self._storage.get(key).value)
        return True

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        """A value without a signer is refused: no record of ours is one."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def take_over(self, early: Any) -> None:
        """Store what others sent while this node was joining them, when hivemind had its own storage: as one caller's,
        because nobody noted whose."""
        before = caller.set(Caller("before the start", "before the start"))
        for key, (bucket, _) in early.items():
            for signer, (value, expires) in bucket.items():
                self.store_subkey(key, signer, value, expires)
        caller.reset(before)

    def get(self, key: Any) -> Any:
        return self._storage.get(key)

    def items(self) -> Any:
        return self._storage.items()

    def __contains__(self, key: object) -> bool:
        return key in self._storage

    def __len__(self) -> int:
        return len(self._storage)

    def _make_room(self, key: Any, signer: str, new: "_Held") -> bool:
        """For a record that is not stored yet; False where there is none."""
        counts = self._counts
        if counts[signer] >= MAX_OF_SIGNER or any(counts[each] >= MAX_OF_OTHERS for each in new.charged):
            return False
        if counts[key] >= MAX_IN_BUCKET:
            there = {each: held.place for each in self._in_bucket(key) if (held := self._held.get(each))}
            largest = _gives_up(Counter(there.values()), new.place)
            place = next((each for each, where in there.items() if where == largest), None)
        elif len(self._held) >= self._most:
            largest = _gives_up(self._places, new.place)
            place = next((each for each, held in self._held.items() if held.place == largest), None)
        else:
            return True
        if place is not None:
            self._forget(*place)
            if (bucket := self._storage.get(place[0])) is not None:
                del bucket.value[place[1]]
        return place is not None

    def _in_bucket(self, key: Any) -> list[tuple[Any, str]]:
        bucket = self._storage.get(key)
        return [] if bucket is None else [(key, signer) for signer in bucket.value.data]

    def _drop_expired(self, now: float) -> None:
        """In the order of storing: one that lives long holds up the shorter ones behind it, for a minute at most."""
        while self._held and next(iter(self._held.values())).expires <= now:
            self._forget(*next(iter(self._held)))

    def _forget(self, key: Any, signer: str) -> None:
        held = self._held.pop((key, signer), None)
        if held is not None:
            _take_off(self._counts, key, signer, *held.charged)
            _take_off(self._places, held.place)


class _Held(NamedTuple):
    """What is known of a stored record."""

    expires: float
    lent_by: str
    """The caller that stored it; empty where that is its signer, or this node."""
    place: str

    @property
    def charged(self) -> tuple[tuple[str, str], ...]:
        return (("caller", self.lent_by),) if self.lent_by else ()


def _take_off(counts: Counter[Any], *parts: Any) -> None:
    for part in parts:
        counts[part] -= 1
        if not counts[part]:
            del counts[part]


def _gives_up(shares: Counter[str], place: str) -> str | None:
    """Which place has most, if it has so much more than this one that it would still not have less."""
    largest, count = max(shares.items(), key=lambda share: share[1], default=("", 0))
    return largest if count > shares[place] + 1 else None


def _compact(storage: Any) -> None:
    """hivemind drops what has expired when its length is read, but leaves an entry in a heap for each renewal."""
    if len(storage.expiration_heap) > 2 * len(storage) + 16:
        storage.expiration_heap = sorted(storage.key_to_heap.values())
