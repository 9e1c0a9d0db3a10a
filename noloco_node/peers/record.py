"""The presence record, signed, that each node publishes of itself; and the checks of those that others publish.

A record is a hint whom to call, never proof: what matters is asked of the peer itself. `accept` returns only a record
that its peer signed, of this run, fresh, small, and with sane numbers. No network here: peers/directory.py writes and
reads records, and peers/cache.py keeps the addresses of some.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from noloco_node.base.addresses import Address, parse
from noloco_node.base.identity import Identity, is_peer_id, verify
from noloco_node.errors import UsageError
from noloco_node.run.admission import TOKEN_BYTES
from noloco_node.run.schema import MAX_STAGES
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.wire import peer_pb2 as pb

TTL_S, REFRESH_S = 60.0, 20.0
"""A record's lifetime, the same for every node of a DHT, and how often it is written anew."""
MAX_RECORD_BYTES = 4096 - 1
MAX_ADDRESSES = 8  # one interface, one relay and one announced address, over two protocols, and a few more
MAX_ADDRESS_LETTERS = 256
MAX_WHOLE = 1 << 53
"""Rounds, steps and tokens: whole numbers up to here survive JSON and doubles."""
MAX_REAL = 1e15

_SIGNED = b"noloco presence v1\n"


@dataclass(frozen=True, slots=True)
class Presence:
    """What a node publishes of itself."""

    state: str
    """joining, training, paused, leaving, or another word in lower case."""
    round: int
    step: int
    loss: float
    tokens_per_s: float
    addresses: tuple[Address, ...]
    """With its peer id."""
    eval_loss: float = 0.0
    """0: none yet."""
    partner: str = ""
    """Peer id of the partner of the last committed round."""
    committed: int = 0
    """Rounds committed with a partner since its start."""
    amendment: int = 0
    """The version of the newest amendment of the run that it knows; 0: none."""
    admission: bytes = b""
    """Its token (run/admission.py)."""
    stage: int = 0
    """That it holds, from 1 (stages/); 0: the whole model."""
    ended: int = 0
    """The last round of what it has come to the end of, its own --rounds or the run. A stage may come there in an
    earlier round, as nothing is sent to it any more. 0: it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord(Presence):
    """What another node publishes of itself, after the checks."""

    peer_id: str
    boot: bytes
    """Drawn again at each start of that node."""
    time: float
    """By its wall clock, as is `expires`, which ours caps."""
    version: str
    peers: int
    """How many peers it estimates; 0: none given."""
    expires: float


def _unchanged(presence: Presence | pb.Presence) -> dict[str, Any]:
    """The fields that are in the message as they are here."""
    return {each.name: getattr(presence, each.name) for each in fields(Presence) if each.name != "addresses"}


def bucket_of(peer_id: str, depth: int) -> str:
    """Which of the 2^depth buckets of a run holds this peer: the first `depth` bits of a hash of its id."""
    return f"{int.from_bytes(hashlib.sha256(peer_id.encode()).digest()):0256b}"[:depth]


def key_of(run_id: str, bucket: str) -> str:
    """The DHT key of a bucket."""
    return f"noloco/{run_id}/peers/{bucket}"


def signed_record(  # noqa: PLR0913
    identity: Identity, presence: Presence, *, run_id: str, boot: bytes, now: float, peers: int = 0
) -> bytes:
    """`peers`: how many this node estimates, itself included; 0: no estimate."""
    body = pb.Presence(
        protocol=PROTOCOL,
        run_id=bytes.fromhex(run_id),
        boot=boot,
        addresses=map(str, presence.addresses),
        time=now,
        version=VERSION,
        peers=peers,
        **_unchanged(presence),
    ).SerializeToString()
    return pb.SignedPresence(presence=body, signature=identity.sign(_SIGNED + body)).SerializeToString()


def read(peer_id: str, record: bytes) -> pb.Presence | None:
    """The presence in a record; None where `peer_id` has not signed it."""
    return _read(peer_id, record) if len(record) <= MAX_RECORD_BYTES and is_peer_id(peer_id) else None


@lru_cache(maxsize=2048)  # the same record comes back from several nodes, and a signature takes 0.1 ms to check
def _read(peer_id: str, record: bytes) -> pb.Presence | None:
    try:
        signed = pb.SignedPresence.FromString(record)
        if not verify(peer_id, _SIGNED + signed.presence, signed.signature):
            return None
        return pb.Presence.FromString(signed.presence)
    except DecodeError:
        return None


def accept(peer_id: str, record: bytes, run_id: str, now: float, ttl_s: float) -> PeerRecord | None:
    """A record as read from the DHT; None if it is forged, stale, of another run, or not sane."""
    presence = read(peer_id, record)
    if presence is None or presence.run_id.hex() != run_id or not abs(now - presence.time) <= ttl_s:
        return None
    addresses = read_addresses(presence.addresses, peer_id)
    if addresses is None or not _is_sane(presence):
        return None
    return PeerRecord(
        peer_id=peer_id,
        boot=presence.boot,
        addresses=addresses,
        time=presence.time,
        version=presence.version,
        peers=presence.peers,
        expires=min(presence.time, now) + ttl_s,
        **_unchanged(presence),
    )


def _is_sane(presence: pb.Presence) -> bool:
    wholes = (presence.round, presence.step, presence.peers, presence.committed, presence.amendment, presence.ended)
    reals = (presence.loss, presence.eval_loss, presence.tokens_per_s)
    return (
        len(presence.boot) == 16
        and re.fullmatch("[a-z]{1,16}", presence.state) is not None
        and re.fullmatch("[0-9A-Za-z.+-]{1,32}", presence.version) is not None
        and all(whole <= MAX_WHOLE for whole in wholes)
        and all(abs(real) <= MAX_REAL for real in reals)
        and (not presence.partner or is_peer_id(presence.partner))
        and len(presence.admission) in (0, TOKEN_BYTES)
        and presence.stage <= MAX_STAGES
    )


def read_addresses(texts: Sequence[str], peer_id: str) -> tuple[Address, ...] | None:
    """None where there are too many, or one of them is malformed, too long or another peer's. Those of UDP are left
    out: nodes publish none, and p2pd takes UDP for blocked after 100 that lead nowhere."""
    if len(texts) > MAX_ADDRESSES or any(len(text) > MAX_ADDRESS_LETTERS for text in texts):
        return None
    try:
        found = tuple(map(parse, texts))
    except UsageError:
        return None
    if not all(is_publishable(address, peer_id) for address in found):
        return None
    return tuple(address for address in found if address.transport.startswith("tcp"))


def publishable(addresses: Sequence[Address], peer_id: str) -> tuple[Address, ...]:
    """Those that others accept in a record. Of too many, the relays' are kept, if they are not more than half, and
    private ones, as each of Docker's bridges has, go first: others can hardly use them."""
    accepted = [address for address in addresses if is_publishable(address, peer_id)]
    relayed = [address for address in accepted if address.relay]
    direct = [address for address in accepted if not address.relay]
    direct.sort(key=lambda address: address.ip is not None and not address.ip.is_global)
    some = MAX_ADDRESSES // 2
    kept = [*relayed[:some], *direct, *relayed[some:]][:MAX_ADDRESSES]
    return tuple(address for address in accepted if address in kept)


def is_publishable(address: Address, peer_id: str) -> bool:
    """Whether others accept this address in a record: not with a network interface in it, like fe80::1%eth0."""
    return address.peer == peer_id and "%" not in address.host and len(str(address)) <= MAX_ADDRESS_LETTERS
