"""Who is there: presence records in a DHT (hivemind's), written for this node and read of the others.

A record says how a peer is doing and is signed by that peer. It is a hint for whom to call, never proof: the DHT is no
trust store, and what matters is asked of the peer itself. Two kinds of check make a record harmless:
- `Swarm.peers` gives only records that are signed by their peer, of this run, fresh, small, and with sane numbers;
- as a node of the DHT, we keep for others only records that their own peer signed, at the key they belong to, with the
  expiry that belongs to the signed time (`_Gate`). hivemind lets the later expiry win: without this, anybody could
  overwrite anybody's record for a billion seconds.

Nothing here knows of rounds or partners. Only this module and transport/libp2p.py import hivemind.
"""

import asyncio
import hashlib
import math
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

from google.protobuf.message import DecodeError

from noloco_node.errors import SwarmUnreachable
from noloco_node.identity import Identity, is_peer_id, verify
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.wire import peer_pb2 as pb

MAX_RECORD_BYTES = 4096 - 1
MAX_ADDRESSES = 8  # one interface, one relay and one announced address, over two protocols, and some to spare
MAX_ADDRESS_LETTERS = 256
MAX_WHOLE = 1 << 53
"""Rounds, steps and tokens: whole numbers up to here survive JSON and doubles."""
MAX_REAL = 1e15
MAX_SKEW_S = 3600.0
"""How far ahead of ours a peer's clock may be for its record to be kept. Readers are stricter: the time to live."""

_ADDRESS = re.compile(
    r"/(?P<kind>ip[46]|dns[46]?)/(?P<host>[0-9A-Za-z.:-]+)/(tcp|udp)/\d{1,5}(/quic-v1|/ws|/wss)?"
    r"(/p2p/(?P<relay>\w+)/p2p-circuit)?/p2p/(?P<peer>\w+)"
)
_SIGNED = b"noloco presence v1\n"
_DHT_S = 10.0  # for one look-up or store: a few rounds of calls, each given up after 3 s
_GOODBYE_S = 2.0  # leaving is quick even if nobody answers any more
_CALL_S = 3.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node says of itself."""

    state: str
    """joining, training, paused, leaving, or another word in small letters."""
    round: int
    step: int
    progress: float
    """0 to 1."""
    loss: float
    tokens_per_s: float
    tokens: int
    addresses: tuple[str, ...]
    """Multiaddrs that end in /p2p/<peer id>."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What another node says of itself, as far as it can be believed at all."""

    peer_id: str
    boot: bytes
    """Drawn anew at each start of that node."""
    state: str
    round: int
    step: int
    progress: float
    loss: float
    tokens_per_s: float
    tokens: int
    addresses: tuple[str, ...]
    started: float
    """Its wall clock, as are `time` and, but capped by ours, `expires`."""
    time: float
    version: str
    expires: float


def key_of(run_id: str, peer_id: str, bits: int = 0) -> str:
    """Where a peer's record stands: the run's peers are spread over 2^bits keys by a hash of their ids."""
    prefix = f"{int.from_bytes(hashlib.sha256(peer_id.encode()).digest()):0256b}"[:bits]
    return f"noloco/{run_id}/peers/{prefix}"


def signed_record(  # noqa: PLR0913
    identity: Identity, standing: Standing, *, run_id: str, boot: bytes, started: float, now: float
) -> bytes:
    presence = pb.Presence(
        protocol=PROTOCOL,
        run_id=bytes.fromhex(run_id),
        boot=boot,
        state=standing.state,
        round=standing.round,
        step=standing.step,
        progress=standing.progress,
        loss=standing.loss,
        tokens_per_s=standing.tokens_per_s,
        tokens=standing.tokens,
        addresses=standing.addresses,
        started=started,
        time=now,
        version=VERSION,
    ).SerializeToString()
    return pb.SignedPresence(presence=presence, signature=identity.sign(_SIGNED + presence)).SerializeToString()


@lru_cache(maxsize=2048)  # the same record comes back from several nodes, and a signature takes 0.1 ms to check
def _read(peer_id: str, record: bytes) -> pb.Presence | None:
    """The presence inside a record that `peer_id` really signed."""
    if len(record) > MAX_RECORD_BYTES or not is_peer_id(peer_id):
        return None
    try:
        signed = pb.SignedPresence.FromString(record)
        if not verify(peer_id, _SIGNED + signed.presence, signed.signature):
            return None
        return pb.Presence.FromString(signed.presence)
    except DecodeError:
        return None


def accept(peer_id: str, record: bytes, run_id: str, now: float, ttl_s: float) -> PeerRecord | None:
    """A record as read from the DHT, or nothing if it is forged, stale, of another run, or not sane."""
    presence = _read(peer_id, record)
    if presence is None or presence.run_id.hex() != run_id or not abs(now - presence.time) <= ttl_s:
        return None
    if not _is_sane(presence, peer_id):
        return None
    return PeerRecord(
        peer_id=peer_id,
        boot=presence.boot,
        state=presence.state,
        round=presence.round,
        step=presence.step,
        progress=presence.progress,
        loss=presence.loss,
        tokens_per_s=presence.tokens_per_s,
        tokens=presence.tokens,
        addresses=tuple(presence.addresses),
        started=presence.started,
        time=presence.time,
        version=presence.version,
        expires=min(presence.time, now) + ttl_s,
    )


def _is_sane(presence: pb.Presence, peer_id: str) -> bool:
    reals = (presence.loss, presence.tokens_per_s, presence.started)
    return (
        len(presence.boot) == 16
        and re.fullmatch("[a-z]{1,16}", presence.state) is not None
        and re.fullmatch("[0-9A-Za-z.+-]{1,32}", presence.version) is not None
        and all(whole <= MAX_WHOLE for whole in (presence.round, presence.step, presence.tokens))
        and all(math.isfinite(real) and 0 <= real <= MAX_REAL for real in reals)
        and 0 <= presence.progress <= 1
        and len(presence.addresses) <= MAX_ADDRESSES
        and all(_is_address(address, peer_id) for address in presence.addresses)
    )


def _is_address(text: str, peer_id: str) -> bool:
    form = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS_LETTERS else None
    if form is None or form["peer"] != peer_id or not (form["relay"] is None or is_peer_id(form["relay"])):
        return False
    if form["kind"].startswith("dns"):
        return True
    try:
        return ip_address(form["host"]).version == int(form["kind"][-1])
    except ValueError:
        return False


class Swarm:
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
        ttl_s: float = 60.0,
        refresh_s: float = 20.0,
    ) -> None:
        self.ttl_s = ttl_s
        """How long a record lives. The same for every node of a DHT: `_Gate` derives a record's expiry from it."""
        self.refresh_s = refresh_s
        """How often to `publish`: three times in a record's life."""
        self._p2p = p2p
        self._bootstrap = [address for address in bootstrap if not address.endswith(p2p.peer_id.to_base58())]
        self._identity = identity
        self._run_id = run_id
        self._boot = boot or secrets.token_bytes(16)
        self._started = time.time()
        self._last: Standing | None = None
        self._node: Any = None

    async def start(self) -> None:
        from hivemind.dht.node import DHTNode

        try:
            async with asyncio.timeout(_DHT_S):
                self._node = await DHTNode.create(
                    p2p=self._p2p,
                    initial_peers=self._bootstrap,
                    record_validator=_Gate(self.ttl_s),
                    strict=False,  # a clock that is 3 s off is no reason to stay out
                    backoff_rate=1.0,  # a peer that was away for an hour is asked again as soon as any other
                    cache_locally=False,  # presence is worth only what is fresh in it
                    cache_nearest=0,
                    cache_on_store=False,
                )
        except (RuntimeError, TimeoutError) as error:
            raise SwarmUnreachable(
                "cannot reach the swarm: no bootstrap node answers in its directory of peers. "
                "Does it run a compatible version of noloco-node?"
            ) from error

    async def publish(self, standing: Standing) -> None:
        """Say how this node is doing. The word is kept for `ttl_s`."""
        identity = self._member()
        tellable = [address for address in standing.addresses if _is_address(address, identity.peer_id)]
        self._last = standing = replace(standing, addresses=tuple(tellable[:MAX_ADDRESSES]))
        now = time.time()
        record = signed_record(identity, standing, run_id=self._run_id, boot=self._boot, started=self._started, now=now)
        await self._meet_again()
        async with asyncio.timeout(_DHT_S):
            key = key_of(self._run_id, identity.peer_id)
            await self._node.store(key, record, now + self.ttl_s, subkey=identity.peer_id)

    async def goodbye(self) -> None:
        """Others should stop calling: say so, if anybody still hears it."""
        if self._last is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self.publish(replace(self._last, state="leaving"))

    async def peers(self) -> dict[str, PeerRecord]:
        """The others of this run whose records hold up."""
        identity = self._member()
        await self._meet_again()
        async with asyncio.timeout(_DHT_S):
            found = await self._node.get(key_of(self._run_id, identity.peer_id), latest=True)
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        return self._accepted((peer, entry.value) for peer, entry in entries if peer != identity.peer_id)

    async def close(self) -> None:
        if self._node is None:
            return
        node, self._node = self._node, None
        if node.cache_refresh_task is not None:
            node.cache_refresh_task.cancel()
        with suppress(TimeoutError):  # it waits for p2pd, which may be dead
            async with asyncio.timeout(_GOODBYE_S):
                await node.shutdown()

    def _member(self) -> Identity:
        if self._identity is None or self._node is None:
            raise RuntimeError("only a started member of a run publishes and reads")
        return self._identity

    def _accepted(self, entries: Iterable[tuple[Any, Any]]) -> dict[str, PeerRecord]:
        now = time.time()
        records = (
            accept(peer, record, self._run_id, now, self.ttl_s)
            for peer, record in entries
            if isinstance(peer, str) and isinstance(record, bytes)
        )
        return {record.peer_id: record for record in records if record is not None}

    async def _meet_again(self) -> None:
        """A node that knows nobody any more asks the bootstrap nodes again; hivemind asks only once, at the start."""
        from hivemind.p2p import PeerID

        if self._node.protocol.routing_table.uid_to_peer_id:
            return
        peers = [PeerID.from_base58(address.rpartition("/p2p/")[2]) for address in self._bootstrap]
        with suppress(TimeoutError):
            async with asyncio.timeout(_CALL_S):
                await asyncio.gather(*(self._node.protocol.call_ping(peer) for peer in peers))


class _Gate:
    """What we let stand in our share of the DHT; hivemind's name for it is a record validator.

    Asked of every record that others store with us, and of every record in an answer: one bad record discards the whole
    answer of a node, so nothing here may depend on two clocks agreeing. It says nothing about staleness: hivemind
    forgets a record at its expiry, which is bound to the signed time.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s

    def validate(self, record: Any) -> bool:
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        # msgpack's headers are cut off and put back instead of read: garbage never reaches a deserialiser.
        peer_id = record.subkey[2:].decode("ascii", errors="replace")  # str 8
        body = record.value[2 if record.value[:1] == b"\xc4" else 3 :]  # bin 8 or bin 16
        presence = _read(peer_id, body)
        if presence is None or (record.subkey, record.value) != tuple(map(MSGPackSerializer.dumps, (peer_id, body))):
            return False
        key = DHTID.generate(key_of(presence.run_id.hex(), peer_id)).to_bytes()
        expires, latest = presence.time + self._ttl_s, time.time() + MAX_SKEW_S
        return bool(record.key == key and record.expiration_time <= expires and presence.time <= latest)

    def sign_value(self, record: Any) -> Any:
        return record.value

    def strip_value(self, record: Any) -> Any:
        return record.value
