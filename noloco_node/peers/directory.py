"""Who is there: presence records in a DHT (hivemind's), written for this node and read of the others.

The DHT is no trust store. Two kinds of check make a record harmless:
- `Directory.peers` gives only records that hold up (peers/record.py);
- as a node of the DHT, we keep for others only records that their own peer signed, at a key they belong to, with the
  expiry that belongs to the signed time (`_RecordValidator`), and of these only so many (`DhtStorage`). hivemind lets
  the later expiry win and keeps whatever comes: without this, anybody could overwrite anybody's record for a billion
  seconds, and fill our memory.
Which buckets to stand in and to read is peers/size_estimate.py's arithmetic. Nothing here knows of rounds or partners.
Only this module and transport/libp2p.py import hivemind.
"""

import asyncio
import random
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from noloco_node.base.identity import Identity
from noloco_node.base.states import NodeState
from noloco_node.errors import SwarmUnreachable
from noloco_node.peers.record import (
    MAX_ADDRESSES,
    PeerRecord,
    Presence,
    accept,
    bucket_of,
    is_address,
    key_of,
    read,
    signed_record,
)
from noloco_node.peers.size_estimate import MAX_DEPTH, SizeEstimate

_DHT_S = 10.0  # for one look-up or store: a few rounds of calls, each given up after 3 s
_GOODBYE_S = 2.0  # leaving is quick even if nobody answers any more
_CALL_S = 3.0
_MEET = 64  # peers that a node asks when it knows nobody any more
_SIGHTS = 64  # runs that are looked at from outside: as many as a rendezvous keeps

# What we keep of others' records. One of a real node takes 1.1 kB of memory with all that is around it.
MAX_RECORDS = 1 << 14
"""8,000 peers at two depths, even where one rendezvous node is all the directory there is: 18 MB. Were every record as
large as it may be, 80 MB."""
MAX_IN_BUCKET = 512
"""20 times as many as stand in one by peers/size_estimate.py: an answer of 200 kB, of 2 MB at the worst."""
MAX_OF_SIGNER = 16
"""Two depths and the doorstep, and those of the last two minutes, in which a run may grow a hundredfold."""


class Directory:
    """This node's part in the DHT, and what it reads and writes there.

    `p2p` is hivemind's, joined to this node's p2pd. A rendezvous has no identity in a run: it carries others' records.
    """

    def __init__(  # noqa: PLR0913
        self,
        p2p: Any,
        bootstrap: Sequence[str],
        identity: Identity | None = None,
        run_id: str = "",
        *,
        boot: bytes | None = None,
        carries: bool = True,
        ttl_s: float = 60.0,
        refresh_s: float = 20.0,
    ) -> None:
        self.ttl_s = ttl_s
        """How long a record lives. The same for every node of a DHT: `_RecordValidator` takes a record's
        expiry from it."""
        self.refresh_s = refresh_s
        """How often to `publish`: three times in a record's life."""
        self._p2p = p2p
        self._bootstrap = [address for address in bootstrap if not address.endswith(p2p.peer_id.to_base58())]
        self._identity = identity
        self._run_id = run_id
        self._carries = carries
        """Whether records of others stand with this node: not where nobody can call it to ask for them."""
        self._boot = boot or secrets.token_bytes(16)
        self._started = time.time()
        self._last: Presence | None = None
        self._crowd = SizeEstimate(random.Random())
        self._known: dict[str, PeerRecord] = {}
        self._stood: dict[int, float] = {}
        """The depths of the records that may still live, and when each was written."""
        self._sights: dict[str, _RunSeen] = {}
        self._met: dict[str, None] = {}
        """Peers that were there, the latest last; the values say nothing."""
        self._node: Any = None

    async def start(self) -> None:
        await self._join(self._bootstrap)

    async def rejoin(self, p2p: Any) -> None:
        """Go on over another p2pd, after the death of the former one; nobody need answer yet."""
        before, self._node, self._p2p = self._node, None, p2p
        if before is not None and before.cache_refresh_task is not None:
            before.cache_refresh_task.cancel()  # more cannot be ended: the handlers died with their p2pd
        await self._join((), before.node_id if before else None)
        if before is not None:
            self._met.update((peer.to_base58(), None) for peer in before.protocol.routing_table.peer_id_to_uid)
        await self._meet_again()

    async def _join(self, peers: Sequence[str], own_id: Any = None) -> None:
        """`own_id`: by which others know this node in the directory; with another it would hear of itself, and ask."""
        from hivemind.dht.node import DHTNode

        try:
            async with asyncio.timeout(_DHT_S):
                self._node = await DHTNode.create(
                    p2p=self._p2p,
                    node_id=own_id,
                    initial_peers=peers,
                    client_mode=not self._carries,
                    record_validator=_RecordValidator(self.ttl_s),
                    strict=False,  # a clock that is 3 s off is no reason to stay out
                    backoff_rate=1.0,  # a peer that was away for an hour is asked again as soon as any other
                    cache_locally=False,  # presence is worth only what is fresh in it
                    cache_nearest=0,
                    cache_on_store=False,
                )
                protocol = self._node.protocol
                early, protocol.storage = protocol.storage, DhtStorage(self.ttl_s)
                protocol.storage.take_over(early)
                protocol.cache = DhtStorage(self.ttl_s, most=0)  # nothing of ours uses it
        except (RuntimeError, TimeoutError) as error:
            raise SwarmUnreachable(
                "cannot reach the swarm: no bootstrap node answers in its directory of peers. "
                "Does it run a compatible version of noloco-node?"
            ) from error

    async def publish(self, standing: Presence) -> None:
        """Say how this node is doing. The word is kept for `ttl_s`."""
        identity = self._member()
        tellable = [address for address in standing.addresses if is_address(address, identity.peer_id)]
        self._last = standing = replace(standing, addresses=tuple(tellable[:MAX_ADDRESSES]))
        now = time.time()
        await self._meet_again()
        if not self._crowd.known:
            await self.peers()
        record = signed_record(
            identity,
            standing,
            run_id=self._run_id,
            boot=self._boot,
            started=self._started,
            now=now,
            peers=self._crowd.peers,
        )
        async with asyncio.timeout(_DHT_S):
            await asyncio.gather(*(self._stand(identity.peer_id, depth, record, now) for depth in self._places(now)))

    async def goodbye(self) -> None:
        """Others should stop calling: say so, if anybody still hears it."""
        if self._last is not None:
            with suppress(SwarmUnreachable, OSError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self.publish(replace(self._last, state=NodeState.LEAVING))

    async def peers(self) -> dict[str, PeerRecord]:
        """The others of this run whose records hold up, of the buckets that were read in a record's life: everybody in
        a small run, in a large one as good as a uniform sample. Reads one bucket more."""
        identity = self._member()
        self._known = await self._read(self._run_id, self._crowd, self._known, identity.peer_id)
        return dict(self._known)

    async def onlook(self, run_id: str) -> dict[str, PeerRecord]:
        """As `peers`, of a run that this node is no member of."""
        if run_id not in self._sights and len(self._sights) >= _SIGHTS:
            del self._sights[next(iter(self._sights))]
        sight = self._sights.setdefault(run_id, _RunSeen())
        sight.known = await self._read(run_id, sight.crowd, sight.known)
        return dict(sight.known)

    async def _read(
        self, run_id: str, crowd: SizeEstimate, known: Mapping[str, PeerRecord], own: str | None = None
    ) -> dict[str, PeerRecord]:
        """What was known, without what has expired, and what stands in one bucket more, without our `own` record."""
        node = self._directory()
        if not node.protocol.routing_table.peer_id_to_uid:
            await self._meet_again()
        depth = crowd.looks_at()
        bucket = f"{random.getrandbits(depth):0{depth}b}" if depth else ""
        async with asyncio.timeout(_DHT_S):
            found = await node.get(key_of(run_id, bucket), latest=True)
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        there = self._accepted(run_id, ((peer, entry.value) for peer, entry in entries if peer != own))
        ours = own is not None and bucket_of(own, depth) == bucket
        crowd.found(depth, len(there) + ours, [record.peers for record in there.values() if record.peers])
        now = time.time()
        found_now = there if not (known and crowd.passes_by(depth)) else {}
        return {peer: record for peer, record in {**known, **found_now}.items() if record.expires > now}

    async def meet(self, peers: Iterable[str]) -> None:
        """Take peers of whom one has heard elsewhere into the directory, if they are there."""
        self._met = dict.fromkeys([*list(self._met)[-_MEET:], *peers])
        await self._ping(peers)

    async def close(self) -> None:
        if self._node is None:
            return
        node, self._node = self._node, None
        if node.cache_refresh_task is not None:
            node.cache_refresh_task.cancel()
        with suppress(TimeoutError):  # it waits for p2pd, which may be dead
            async with asyncio.timeout(_GOODBYE_S):
                await node.shutdown()

    def _places(self, now: float) -> set[int]:
        """The depths to stand at now. A goodbye goes wherever an older record still lives."""
        chosen = self._crowd.stands_at()
        self._stood = {depth: at for depth, at in self._stood.items() if at > now - self.ttl_s}
        leaving = self._last is not None and self._last.state == NodeState.LEAVING
        self._stood |= dict.fromkeys(chosen, now)
        return set(self._stood) if leaving else chosen

    async def _stand(self, peer_id: str, depth: int, record: bytes, now: float) -> None:
        key = key_of(self._run_id, bucket_of(peer_id, depth))
        await self._directory().store(key, record, now + self.ttl_s, subkey=peer_id)

    def _member(self) -> Identity:
        if self._identity is None:
            raise RuntimeError("only a member of a run publishes and reads")
        self._directory()
        return self._identity

    def _directory(self) -> Any:
        if self._node is None:
            raise SwarmUnreachable("the network daemon has died: wait until it is started again")
        return self._node

    def _accepted(self, run_id: str, entries: Iterable[tuple[Any, Any]]) -> dict[str, PeerRecord]:
        now = time.time()
        records = (
            accept(peer, record, run_id, now, self.ttl_s)
            for peer, record in entries
            if isinstance(peer, str) and isinstance(record, bytes)
        )
        accepted = {record.peer_id: record for record in records if record is not None}
        self._met = dict.fromkeys([*list(self._met)[-_MEET:], *accepted])
        return accepted

    async def _meet_again(self) -> None:
        """hivemind asks the bootstrap nodes only once, at the start, but they come and go; and a node that knows nobody
        any more, whose p2pd died or whose cable was pulled, asks whom it has met."""
        known = self._directory().protocol.routing_table.peer_id_to_uid
        wanted = [address.rpartition("/p2p/")[2] for address in self._bootstrap]
        if not known:
            wanted += list(self._met)[-_MEET:]
        await self._ping(wanted)

    async def _ping(self, wanted: Iterable[str]) -> None:
        from hivemind.p2p import PeerID

        protocol = self._directory().protocol
        peers = {PeerID.from_base58(peer) for peer in wanted} - set(protocol.routing_table.peer_id_to_uid)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CALL_S):
                await asyncio.gather(*(protocol.call_ping(peer) for peer in peers))


@dataclass(slots=True)
class _RunSeen:
    """What a node knows of a run that it only looks at."""

    crowd: SizeEstimate = field(default_factory=lambda: SizeEstimate(random.Random()))
    known: dict[str, PeerRecord] = field(default_factory=dict)


class _RecordValidator:
    """What we let stand in our share of the DHT; hivemind's name for it is a record validator.

    Asked of every record that others store with us, and of every record in an answer: one bad record discards the whole
    answer of a node, so nothing here depends on two clocks agreeing. How long a record is kept is `DhtStorage`'s
    affair.
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
    """Our share of the DHT: what others let us keep, in place of hivemind's storage, which is bounded by nothing.

    Who has a place keeps it, and nobody gets one where there is none left: a flood of identities keeps newcomers out
    for as long as it lasts, but hides nobody who is there. No record is kept for more than two lives: its signer's
    clock may be ahead of ours by one.
    """

    def __init__(self, ttl_s: float, most: int = MAX_RECORDS) -> None:
        from hivemind.dht.storage import DHTLocalStorage

        self._kept = DHTLocalStorage()
        self._longest_s = 2 * ttl_s
        self._most = most
        self._places: OrderedDict[tuple[Any, str], float] = OrderedDict()
        """When the record of each bucket and signer expires; what was stored last is the last."""
        self._taken: Counter[Any] = Counter()
        """Places of each bucket, and of each signer."""

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        now, place = time.time(), (key, subkey)
        self._forget(now)
        if not now < expiration_time <= now + self._longest_s or not (place in self._places or self._has_room(*place)):
            return False
        if not self._kept.store_subkey(key, subkey, value, expiration_time):
            return False
        if place not in self._places:
            self._taken.update(place)
        self._places[place] = expiration_time
        self._places.move_to_end(place)
        _tidy(self._kept)
        _tidy(self._kept.get(key).value)
        return True

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        """A value that is nobody's is refused: there is none in a directory of peers."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def take_over(self, early: Any) -> None:
        """What neighbours brought while this node was joining them: hivemind has no other storage then."""
        for key, (bucket, _) in early.items():
            for signer, (value, expires) in bucket.items():
                self.store_subkey(key, signer, value, expires)

    def get(self, key: Any) -> Any:
        return self._kept.get(key)

    def items(self) -> Any:
        return self._kept.items()

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def _has_room(self, key: Any, signer: str) -> bool:
        taken = self._taken
        return len(self._places) < self._most and taken[key] < MAX_IN_BUCKET and taken[signer] < MAX_OF_SIGNER

    def _forget(self, now: float) -> None:
        """Places whose record has expired; one that was stored early but lives long holds up others for a minute."""
        while self._places and next(iter(self._places.values())) <= now:
            place, _ = self._places.popitem(last=False)
            for of in place:
                self._taken[of] -= 1
                if not self._taken[of]:
                    del self._taken[of]


def _tidy(kept: Any) -> None:
    """hivemind forgets what has expired when its length is asked, and leaves an entry in a heap for each renewal."""
    if len(kept.expiration_heap) > 2 * len(kept) + 16:
        kept.expiration_heap = sorted(kept.key_to_heap.values())
