"""The directory of peers: this node's presence record written into a DHT (hivemind's), and those of others read.

Nothing in the DHT is trusted: `peers` returns only records that peers/record.py accepts, and peers/dht_storage.py
limits what others may store with us. peers/size_estimate.py says in which buckets to write and which to read. Nothing
here knows of rounds or partners.
"""

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.base.places import claimed, in_turn, several
from noloco_node.base.states import NodeState
from noloco_node.errors import SwarmUnreachable
from noloco_node.host.traffic import Traffic
from noloco_node.peers.answering import Answering
from noloco_node.peers.dht_messages import node_id
from noloco_node.peers.dht_storage import CheckedCalls, DhtStorage, RecordValidator, SilentPeers, answers, learn_of
from noloco_node.peers.record import (
    TTL_S,
    PeerRecord,
    Presence,
    accept,
    bucket_of,
    key_of,
    publishable,
    signed_record,
)
from noloco_node.peers.size_estimate import SizeEstimate

SILENT = "no other node answers look-ups"
REFUSED = "look-ups are refused because too many come from this address"
"""Why a look-up says nothing of who is there."""
REFUSED_S = 120.0
"""Where many nodes of one place start at once, all are let in by then."""
REFUSED_REMEDY = "start another rendezvous, and let some of the nodes here join by that one"

_DHT_S = 10.0  # for one look-up or store: a few rounds of calls, each cancelled after 3 s
_LEAVE_S = 2.0  # leaving is quick even if no peer answers any more
_CALL_S = 3.0
_AGAIN_S = 2.0  # when a node that was refused, or not heard, asks again to be let in
_SILENT_TRIES = 2  # in a row, until no bootstrap node answers: one ping, or its answer, may be lost or late
_UNMET = 2  # neighbours of an answer that are asked though we have not met them
_NEAREST = 8  # nodes that a look-up or store asks; five of them hold a record. hivemind's 20 answered with 20 copies
_FIRST_READS = 2  # before a record is written: what the first says of the run's size, the second checks
_PINGED = 64  # peers that a node pings when its routing table is empty
_MET = 256  # that it remembers for this
_OTHER_RUNS = 64  # that are read without being a member: as many as a rendezvous keeps

_MAX_KNOWN = 2048  # records remembered of a run, and peers of which it is known who told us of them
_TELLERS = 8  # of one peer, the latest


_stores: ContextVar[bool] = ContextVar("stores", default=False)
"""Whether this task stores a record: then it looks for nodes only."""


class Found(NamedTuple):
    """What a look-up says of a run."""

    peers: dict[str, PeerRecord]
    unanswered: str | None = None
    """SILENT or REFUSED, where it says nothing of who is there: `peers` are those of earlier ones."""


@dataclass(slots=True)
class _RunRead:
    """What was read of a run so far."""

    size: SizeEstimate = field(default_factory=lambda: SizeEstimate(random.Random()))
    known: dict[str, PeerRecord] = field(default_factory=dict)


async def _place_of_its_own(peer: str) -> str:
    return peer


async def _always(_peer: str) -> bool:
    return True


class Directory:
    """This node's part in the DHT, and what it reads and writes there.

    `p2p` is hivemind's, joined to this node's p2pd. A rendezvous has no identity in a run: it stores others' records.
    """

    def __init__(  # noqa: PLR0913
        self,
        p2p: Any,
        bootstrap: Sequence[Address],
        identity: Identity | None = None,
        run_id: str = "",
        *,
        stores: bool = True,
        ttl_s: float = TTL_S,
        place_of: Callable[[str], Awaitable[str]] = _place_of_its_own,
        may_answer: Callable[[str], Awaitable[bool]] = _always,
        answering: Answering | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`place_of`: where a peer that calls is (base/places.py). `may_answer`: whether a peer is worth a dial.
        `answering`: who counts as there; without it, every peer that has a record. `traffic`: how much others may fetch
        here."""
        self.ttl_s = ttl_s
        """A record's lifetime: `RecordValidator` checks expiries by it."""
        self._checked = partial(CheckedCalls, place_of=place_of, ttl_s=ttl_s, traffic=traffic)
        self._p2p = self._checked(p2p)
        self._may_answer = may_answer
        own = p2p.peer_id.to_base58()
        self._bootstrap = [address for address in bootstrap if address.peer != own]
        self._identity = identity
        self._run_id = run_id
        self._stores = stores
        """Whether this node stores records of others: not where nobody can call it to read them."""
        self._boot = secrets.token_bytes(16)
        self._last: Presence | None = None
        self._rng = random.Random()
        self._run = _RunRead()
        self._written: dict[int, float] = {}
        """The depths of our records that may not have expired yet, and when each was written."""
        self._other_runs: dict[str, _RunRead] = {}
        self._answering = answering
        self._told_by: dict[str, set[str]] = {}
        """By peer: the nodes of the DHT that gave us its record lately."""
        self._met: dict[str, str] = {}
        """Peers that were there and where, the latest last."""
        self.stored = True
        """Whether another node has stored the last record of this one, or need not, as this one joined nobody."""
        self.done: Counter[str] = Counter()
        """`look_ups` and `stores` of ours, and the `calls` to other nodes that they and the upkeep of the DHT took."""
        self._node: Any = None

    async def start(self, refused_s: float = REFUSED_S) -> None:
        """`refused_s`: how long it asks to be let in where it is refused. Raises SwarmUnreachable."""
        await self._join()
        if self._bootstrap:
            await self._meet_bootstrap(refused_s)

    async def rejoin(self, p2p: Any, *, stores: bool = True) -> None:
        """Go on over another p2pd, after the former one ended. Succeeds even where no peer answers."""
        self._stores = stores
        before, self._node, self._p2p = self._node, None, self._checked(p2p)
        if before is not None and before.cache_refresh_task is not None:
            before.cache_refresh_task.cancel()  # nothing else to end: the handlers ended with their p2pd
        await self._join()
        if before is not None:
            known = [peer.to_base58() for peer in before.protocol.routing_table.peer_id_to_uid]
            self._meet({peer: self._met.get(peer, peer) for peer in known})
        await self._ping_known()

    async def _join(self) -> None:
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID

        try:
            async with asyncio.timeout(_DHT_S):
                self._node = await DHTNode.create(
                    p2p=self._p2p,
                    node_id=DHTID.from_bytes(node_id(self._p2p.peer_id.to_bytes())),
                    client_mode=not self._stores,
                    record_validator=RecordValidator(self.ttl_s),
                    bucket_size=_NEAREST,
                    strict=False,  # a clock that is 3 s off is no reason to refuse a node
                    cache_locally=False,  # old presence is of no use
                    cache_nearest=0,
                    cache_on_store=False,
                )
                self._node.blacklist = SilentPeers()
                protocol = self._node.protocol
                early, protocol.storage = protocol.storage, DhtStorage(self.ttl_s)
                protocol.storage.take_over(early)
                protocol.update_routing_table = partial(learn_of, protocol)
                protocol.call_find = self._counted(self._noting(protocol.call_find, protocol.routing_table))
                protocol.call_store = self._counted(protocol.call_store)
                protocol.call_ping = self._counted(protocol.call_ping)
                protocol.cache = DhtStorage(self.ttl_s, most=0)  # nothing of ours uses it
        except TimeoutError:
            raise SwarmUnreachable("cannot reach the swarm: the network daemon does not answer. Try again") from None

    async def _meet_bootstrap(self, refused_s: float) -> None:
        loop, node = asyncio.get_running_loop(), self._running()
        until, silent = loop.time() + refused_s, 0
        while True:
            came = Counter[str]()
            answers.set(came)
            await self._ping_known()
            await asyncio.sleep(0)  # hivemind enters those that answered
            if node.protocol.routing_table.peer_id_to_uid:
                break
            silent = 0 if came["refused"] else silent + 1
            if silent == _SILENT_TRIES:
                raise SwarmUnreachable(
                    "cannot reach the swarm: no bootstrap node answers in its directory of peers. "
                    "Does it run a compatible version of noloco-node?"
                )
            if came["refused"] and loop.time() > until:
                raise SwarmUnreachable(f"cannot reach the swarm: {REFUSED}. {REFUSED_REMEDY}")
            await asyncio.sleep(_AGAIN_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CALL_S):
                await node.find_nearest_nodes([node.node_id])

    async def publish(self, presence: Presence) -> None:
        """Write this node's presence record, which lives for `ttl_s`."""
        try:
            await self._write(presence)
        finally:
            await self._ping_known()  # after it: one that is away may be silent for seconds

    async def _write(self, presence: Presence) -> None:
        self.stored = False
        came = Counter[str]()
        identity = self._member()
        addresses = publishable(presence.addresses, identity.peer_id)
        self._last = presence = replace(presence, addresses=addresses)
        now = time.time()
        await self._ping_if_alone()
        for _ in range(_FIRST_READS):
            if not self._run.size.known:
                await self.peers()
        record = signed_record(
            identity, presence, run_id=self._run_id, boot=self._boot, now=now, peers=self._run.size.peers
        )
        keys = [key_of(self._run_id, bucket_of(identity.peer_id, depth)) for depth in self._depths(now)]
        self.done["stores"] += len(keys)
        answers.set(came)
        try:
            async with asyncio.timeout(_DHT_S):
                await asyncio.gather(*(self._store(key, record, now + self.ttl_s, identity.peer_id) for key in keys))
        finally:  # some may have, where others do not answer
            self.stored = not self._bootstrap or came["stored"] > 0

    async def _store(self, key: str, record: bytes, expires: float, signer: str) -> None:
        """To be run as a task of its own."""
        _stores.set(True)
        await self._running().store(key, record, expires, subkey=signer)

    async def leave(self) -> None:
        """Publish that this node leaves, so that others stop calling it."""
        if self._last is not None:
            with suppress(SwarmUnreachable, OSError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._write(replace(self._last, state=NodeState.LEAVING))

    async def peers(self) -> Found:
        """Read one more bucket, and return the accepted records of this run's other peers, of all buckets that were
        read in a record's lifetime: every peer of a small run; of a large one, as good as a uniform sample."""
        return await self._read(self._run_id, self._run, self._member().peer_id)

    async def peers_of(self, run_id: str) -> Found:
        """Like `peers`, but of a run that this node is no member of."""
        if run_id not in self._other_runs and len(self._other_runs) >= _OTHER_RUNS:
            del self._other_runs[next(iter(self._other_runs))]
        return await self._read(run_id, self._other_runs.setdefault(run_id, _RunRead()))

    async def _read(self, run_id: str, run: _RunRead, own: str | None = None) -> Found:
        """The known records that have not expired, and those of one bucket more, without our `own`."""
        node, size = self._running(), run.size
        await self._ping_if_alone()
        depth = size.read_depth()
        bucket = f"{random.getrandbits(depth):0{depth}b}" if depth else ""
        key = key_of(run_id, bucket)
        self.done["look_ups"] += 1
        came = Counter[str]()
        answers.set(came)
        async with asyncio.timeout(_DHT_S):
            found = await node.get(key, latest=True)
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        there = self._accepted(run_id, ((peer, entry.value) for peer, entry in entries if peer != own))
        if self._answering is not None:
            await self._answering.ask(self._by_teller(there, key))
        answered = self._there(there)
        self._meet({peer: claimed(peer, record.addresses) for peer, record in answered.items()})
        ours = own is not None and bucket_of(own, depth) == bucket
        unanswered = None if there else self._unanswered(came)
        estimates = [record.peers for record in answered.values() if record.peers]
        size.found(depth, self._alive(there) + ours, estimates, whole=unanswered is None)
        now = time.time()
        found_now = there if not (run.known and size.is_partial(depth)) else {}
        alive = {peer: record for peer, record in {**run.known, **found_now}.items() if record.expires > now}
        run.known = alive if len(alive) <= _MAX_KNOWN else _few(self._there(alive))
        return Found(self._there(run.known), unanswered)

    def _unanswered(self, came: Counter[str]) -> str | None:
        """Of a look-up that found nobody. One that joined nobody may be all of the DHT."""
        if came["left_out"] > came["FindResponse"]:
            return REFUSED
        return None if came["FindResponse"] or not self._bootstrap else SILENT

    def _meet(self, peers: Mapping[str, str]) -> None:
        self._met = dict([*((peer, at) for peer, at in self._met.items() if peer not in peers), *peers.items()][-_MET:])

    def _there(self, records: Mapping[str, PeerRecord]) -> dict[str, PeerRecord]:
        """Those that count as there."""
        if self._answering is None:
            return dict(records)
        return {peer: record for peer, record in records.items() if self._answering.answered(peer)}

    def _alive(self, records: Mapping[str, PeerRecord]) -> int:
        """How many of them are there: of those not called yet the same share as of the others."""
        if self._answering is None:
            return len(records)
        answered, failed = len(self._there(records)), sum(map(self._answering.failed, records))
        return round(len(records) * answered / (answered + failed)) if answered + failed else len(records)

    def _by_teller(self, records: Mapping[str, PeerRecord], key: str) -> dict[str, dict[str, PeerRecord]]:
        """Records by the nodes of the DHT that gave them to us; those that this node stores by an empty name."""
        from hivemind.dht.routing import DHTID

        stored = self._running().protocol.storage.get(DHTID.generate(key))
        groups: dict[str, dict[str, PeerRecord]] = {"": {}}
        for peer, record in records.items():
            if stored is not None and peer in stored.value.data:
                groups[""][peer] = record
            for teller in self._told_by.get(peer, ()):
                groups.setdefault(teller, {})[peer] = record
        return groups

    def _counted(self, call: Any) -> Any:
        """A call of hivemind's to another node."""

        async def counted(*args: Any, **options: Any) -> Any:
            self.done["calls"] += 1
            return await call(*args, **options)

        return counted

    def _noting(self, call_find: Any, table: Any) -> Any:
        """hivemind's look-up at one node, noting which records that node gave us. Of the neighbours that it names few
        are followed that we have not met: ids near any key are free, and eight of nobody would be all that is asked.
        To store a record, a node is asked for a key beside its own, which has the same neighbours and no records: else
        each of the nodes nearest to it would answer with its whole bucket."""

        async def find(teller: Any, keys: Any) -> Any:
            asked = {type(key)(key ^ 1) if _stores.get() else key: key for key in keys}
            answers = await call_find(teller, asked)
            found = answers and {asked[key]: answer for key, answer in answers.items()}
            for value, near in (found or {}).values():
                for unmet in [each for each in near if each not in table][_UNMET:]:
                    del near[unmet]
                for peer in value.value.data if value is not None and hasattr(value.value, "data") else ():
                    self._told_by[peer] = {*list(self._told_by.pop(peer, ()))[-_TELLERS:], teller.to_base58()}
            for _ in range(len(self._told_by) - _MAX_KNOWN):
                del self._told_by[next(iter(self._told_by))]
            return found

        return find

    async def connect(self, peers: Iterable[str]) -> None:
        """Take peers that are known from elsewhere into the routing table, if they answer."""
        self._meet({peer: peer for peer in peers})
        await self._ping(peers)

    async def close(self) -> None:
        if self._answering is not None:
            self._answering.close()
        if self._node is None:
            return
        node, self._node = self._node, None
        if node.cache_refresh_task is not None:
            node.cache_refresh_task.cancel()
        with suppress(TimeoutError):  # it waits for p2pd, which may have ended
            async with asyncio.timeout(_LEAVE_S):
                await node.shutdown()

    def _depths(self, now: float) -> set[int]:
        """Where to write now. A record that this node leaves replaces every older one that has not expired."""
        chosen = self._run.size.write_depths()
        self._written = {depth: at for depth, at in self._written.items() if at > now - self.ttl_s}
        leaving = self._last is not None and self._last.state == NodeState.LEAVING
        self._written |= dict.fromkeys(chosen, now)
        return set(self._written) if leaving else chosen

    def _member(self) -> Identity:
        if self._identity is None:
            raise RuntimeError("only a member of a run publishes and reads")
        self._running()
        return self._identity

    def _running(self) -> Any:
        if self._node is None:
            raise SwarmUnreachable("the network daemon has ended: wait until it is started again")
        return self._node

    def _accepted(self, run_id: str, entries: Iterable[tuple[Any, Any]]) -> dict[str, PeerRecord]:
        now = time.time()
        records = (
            accept(peer, record, run_id, now, self.ttl_s)
            for peer, record in entries
            if isinstance(peer, str) and isinstance(record, bytes)
        )
        return {record.peer_id: record for record in records if record is not None}

    async def _ping_if_alone(self) -> None:
        if not self._running().protocol.routing_table.peer_id_to_uid:
            await self._ping_known()

    async def _ping_known(self) -> None:
        """Ping the bootstrap nodes, which hivemind does only once, at the start; and where the routing table is empty,
        because p2pd ended or a cable was pulled, the peers met before."""
        known = self._running().protocol.routing_table.peer_id_to_uid
        wanted = [address.peer for address in self._bootstrap]
        if not known:
            wanted += several(self._rng, self._met, _PINGED)
        await self._ping(wanted)

    async def _ping(self, wanted: Iterable[str]) -> None:
        from hivemind.p2p import PeerID

        protocol = self._running().protocol
        peers = {PeerID.from_base58(peer) for peer in wanted} - set(protocol.routing_table.peer_id_to_uid)

        async def ping(peer: Any) -> None:
            if await self._may_answer(peer.to_base58()):
                await protocol.call_ping(peer)

        with suppress(TimeoutError):
            async with asyncio.timeout(_CALL_S):
                await asyncio.gather(*map(ping, peers))


def _few(records: Mapping[str, PeerRecord]) -> dict[str, PeerRecord]:
    """_MAX_KNOWN of them, each place's first before any place's second."""
    places = {peer: claimed(peer, record.addresses) for peer, record in records.items()}
    return {peer: records[peer] for peer in in_turn(places)[:_MAX_KNOWN]}
