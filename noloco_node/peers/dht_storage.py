"""What this node stores for others as a node of the DHT: which records it accepts, and how many.

hivemind keeps every record that comes, and of two the one that expires later: without these checks, anybody could
overwrite anybody's record for a billion seconds, and fill our memory. `CheckedCalls` lets through what
peers/dht_messages.py allows; `RecordValidator` accepts a record only if its own peer signed it, at a key it belongs to,
with the expiry that follows from the signed time; `DhtStorage` bounds how many are stored; `learn_of` bounds how many
nodes are known; `SilentPeers` are left out for a moment. All take hivemind's place for its `DHTNode`, and import it
late: that takes seconds.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from noloco_node.base.latest import remember
from noloco_node.errors import PeerRefused
from noloco_node.host.traffic import Traffic
from noloco_node.peers import dht_messages
from noloco_node.peers.dht_messages import LEFT_OUT, MAX_IN_BUCKET
from noloco_node.peers.record import bucket_of, key_of, read
from noloco_node.peers.size_estimate import MAX_DEPTH
from noloco_node.transport.call_limits import CallLimits

# A record of a real node takes 1.1 kB of memory with its overhead.
MAX_RECORDS = 1 << 14
"""8,000 peers at two depths, even where one rendezvous node is the whole DHT: 18 MB; 80 MB if every record were as
large as allowed."""
MAX_OF_SIGNER = 16
"""At two depths and at depth 0, and those of the last two minutes, in which a run may grow a hundredfold."""
PEER_A_MINUTE, LOOK_UPS_A_MINUTE, OTHERS_A_MINUTE = 300, 1600, 800
"""Requests of a peer, look-ups of a place, and its other requests. A node makes a few dozen, of a node that is the
whole DHT about 25. So 90 nodes behind one address can use one rendezvous. Of 150 a third of the look-ups have no
records, but nearly all their own are stored; with one limit for both, a quarter of the nodes had none there
(simulated). A request costs 1 to 2 ms, with that of p2pd."""
SILENT_S, MAX_SILENT = 5.0, 1024
"""How long a node without an answer is not asked: one that was away for an hour as long as any other."""
MARGIN_S = 60.0
"""An answer's records may live so much longer than this node would store them: two clocks are up to 30 s wrong each."""


place_of_caller: ContextVar[str] = ContextVar("place_of_caller", default="")
"""Where who asks this node to store is (base/places.py); empty: this node itself asks."""
answers: ContextVar[Counter[str]] = ContextVar("answers")
"""What this task's calls came to, by the kind of the answer; `left_out`: a look-up's, without records, as this node's
place asks too much; `refused`: none, for the same reason; `stored`: a record was. A call that nobody answers is not
counted."""
_BUSY = "busy"


class CheckedCalls:
    """hivemind's `P2P`, which limits callers, checks what comes from other nodes, and notes where a caller is before
    the DHT stores: each call has a task, and so a context.

    Who has fetched too much, or looks up too often, gets an answer that says that it has no records because of that,
    not a refusal: for that it would ask this node nothing for a while, and four other nodes hold the same records. Who
    stores too often gets one that says that nothing was stored.
    """

    def __init__(
        self, p2p: Any, place_of: Callable[[str], Awaitable[str]], ttl_s: float, traffic: Traffic | None = None
    ) -> None:
        self._p2p = p2p
        self._place_of = place_of
        self._traffic = traffic or Traffic()
        self._longest_s = 2 * ttl_s + MARGIN_S
        self._look_ups = CallLimits(PEER_A_MINUTE, LOOK_UPS_A_MINUTE)
        self._others = CallLimits(PEER_A_MINUTE, OTHERS_A_MINUTE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def add_protobuf_handler(self, name: str, handler: Any, kind: Any, **options: Any) -> None:
        from hivemind.proto import dht_pb2

        async def handle(request: Any, context: Any) -> Any:
            asked, peer = request.DESCRIPTOR.name, context.remote_id.to_base58()
            place, limits = await self._place_of(peer), self._look_ups if asked == "FindRequest" else self._others
            if not limits.begin(peer, place, False, time.monotonic()):
                match asked:
                    case "FindRequest":
                        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(expiration_time=LEFT_OUT)])
                    case "StoreRequest":
                        return dht_pb2.StoreResponse(store_ok=[False])
                    case _:
                        raise PeerRefused(_BUSY)
            try:
                dht_messages.check_request(request, context.remote_id)
                place_of_caller.set(place)
                reply = dht_messages.corrected(await handler(request, context))
                if not self._traffic.may_answer(reply.ByteSize(), place) and asked == "FindRequest":
                    dht_messages.leave_out_records(reply)
                return reply
            finally:
                limits.end(peer, place, False)

        bounded = dht_messages.Bounded(kind, dht_messages.MAX_REQUEST_BYTES)
        await self._p2p.add_protobuf_handler(name, handle, bounded, **options)

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, kind: Any) -> Any:
        from hivemind.p2p import P2PHandlerError

        came, bounded = answers.get(Counter()), dht_messages.Bounded(kind, dht_messages.MAX_REPLY_BYTES)
        try:
            reply = await self._p2p.call_protobuf_handler(peer, name, request, bounded)
        except P2PHandlerError as error:
            came["refused"] += _BUSY in str(error)
            raise
        answer = reply.DESCRIPTOR.name
        came["left_out" if dht_messages.are_left_out(reply) else answer] += 1
        came["stored"] += answer == "StoreResponse" and any(reply.store_ok)
        dht_messages.check_reply(reply, peer, self._longest_s)
        return reply


class RecordValidator:
    """Which records are accepted; its methods are those of hivemind's `RecordValidatorBase`.

    Called for every record that others store here, and for every record in an answer: one bad record discards the whole
    answer of a node, so nothing here depends on two clocks agreeing. `DhtStorage` decides how long a record is stored.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s

    def validate(self, record: Any) -> bool:
        from hivemind.dht.routing import DHTID

        peer_id = record.subkey[2:].decode("ascii", errors="replace")
        body = dht_messages.packed_body(record.value)
        if body is None or record.subkey != dht_messages.packed_text(peer_id):
            return False
        presence = read(peer_id, body)
        if presence is None:
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
        self._longest_s = 2 * ttl_s
        self._most = most
        self._buckets: dict[Any, dict[str, Any]] = {}
        """The records, by key and signer, as hivemind has them."""
        self._held: OrderedDict[tuple[Any, str], _Held] = OrderedDict()
        """What is known of each, in the order in which they were stored."""
        self._signers: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        """Records of each."""

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        from hivemind.utils.timed_storage import ValueWithExpiration

        now = time.time()
        self._drop_expired(now)
        if not now < expiration_time <= now + self._longest_s:
            return False
        before, place = self._held.get((key, subkey)), place_of_caller.get()
        if not (before.expires < expiration_time if before else self._make_room(key, subkey, place)):
            return False
        self._forget(key, subkey)
        self._buckets.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        self._held[key, subkey] = _Held(expiration_time, place)
        self._signers[subkey] += 1
        self._places[place] += 1
        return True

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        """A value without a signer is refused: no record of ours is one."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def take_over(self, early: Any) -> None:
        """Store what others sent while this node was joining them, when hivemind had its own storage: as of one place,
        because nobody noted whose."""
        before = place_of_caller.set("before the start")
        for key, (bucket, _) in early.items():
            for signer, (value, expires) in bucket.items():
                self.store_subkey(key, signer, value, expires)
        place_of_caller.reset(before)

    def get(self, key: Any) -> Any:
        """A copy: hivemind's look-ups add to it what others answer. A few records may have expired (`_drop_expired`):
        readers leave them out."""
        from hivemind.dht.storage import DictionaryDHTValue
        from hivemind.utils.timed_storage import ValueWithExpiration

        now = time.time()
        self._drop_expired(now)
        if key not in self._buckets:
            return None
        copy = DictionaryDHTValue()
        copy.data, copy.latest_expiration_time = dict(self._buckets[key]), now + self._longest_s
        return ValueWithExpiration(copy, copy.latest_expiration_time)

    def __contains__(self, key: object) -> bool:
        return key in self._buckets

    def _make_room(self, key: Any, signer: str, place: str) -> bool:
        """For a record that is not stored yet; False where there is none."""
        if self._signers[signer] >= MAX_OF_SIGNER:
            return False
        if len(bucket := self._buckets.get(key, {})) >= MAX_IN_BUCKET:
            there = {(key, each): self._held[key, each] for each in bucket}
            largest = _gives_up(Counter(held.place for held in there.values()), place)
        elif len(self._held) >= self._most:
            there, largest = self._held, _gives_up(self._places, place)
        else:
            return True
        oldest = next((each for each, held in there.items() if held.place == largest), None)
        if oldest is not None:
            self._forget(*oldest)
        return oldest is not None

    def _drop_expired(self, now: float) -> None:
        """In the order of storing: one that lives long holds up the shorter ones behind it, for a minute at most."""
        while self._held and next(iter(self._held.values())).expires <= now:
            self._forget(*next(iter(self._held)))

    def _forget(self, key: Any, signer: str) -> None:
        held = self._held.pop((key, signer), None)
        if held is not None:
            del self._buckets[key][signer]
            if not self._buckets[key]:
                del self._buckets[key]
            _take_off(self._signers, signer)
            _take_off(self._places, held.place)


class _Held(NamedTuple):
    """What is known of a stored record."""

    expires: float
    place: str
    """Where its caller was."""


class SilentPeers:
    """Whom hivemind asks nothing for a moment, as they did not answer: in its `Blacklist`'s place, which goes by the
    wall clock. Where that was set back by two hours, it asked them nothing for as long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Any, float] = {}

    def register_failure(self, peer: Any) -> None:
        if peer not in self:
            remember(self._until, peer, self._clock() + SILENT_S, MAX_SILENT)

    def register_success(self, peer: Any) -> None:
        self._until.pop(peer, None)

    def __contains__(self, peer: object) -> bool:
        return self._until.get(peer, 0.0) > self._clock()


async def learn_of(protocol: Any, node_id: Any, peer_id: Any, responded: bool = True) -> None:
    """How hivemind's `DHTProtocol` learns of nodes, in its own method's place. That one also gives a node that is new
    copies of our records, which their signers store there themselves within 20 s; and it remembers any number of nodes
    that found their bucket full."""
    table = protocol.routing_table
    node_id = table.get(peer_id=peer_id) if node_id is None else node_id
    if node_id is None:
        return
    if not responded:
        if node_id in table:
            del table[node_id]
        return
    longest_silent = table.add_or_update_node(node_id, peer_id)
    _few_replacements(table, node_id)
    if longest_silent is not None:  # its bucket is full
        await protocol.call_ping(longest_silent[1])


def _few_replacements(table: Any, node_id: Any) -> None:
    bucket = table.buckets[table.get_bucket_index(node_id)]
    for oldest in list(bucket.replacement_nodes)[: -bucket.size]:
        del bucket.replacement_nodes[oldest]
        table.peer_id_to_uid.pop(table.uid_to_peer_id.pop(oldest, None), None)


def _take_off(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _gives_up(shares: Counter[str], place: str) -> str | None:
    """Which place has most, if it has so much more than this one that it would still not have less."""
    largest, count = max(shares.items(), key=lambda share: share[1], default=("", 0))
    return largest if count > shares[place] + 1 else None
