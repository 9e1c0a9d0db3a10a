"""What a node says of itself to everybody, signed, and what can be believed of what others say.

A record is a hint for whom to call, never proof: what matters is asked of the peer itself. `accept` gives only what is
signed by its peer, of this run, fresh, small, and has sane numbers. Knows no network: peers/directory.py carries
records, and peers/cache.py keeps the addresses of some.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from google.protobuf.message import DecodeError

from noloco_node.base.identity import Identity, is_peer_id, verify
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.wire import peer_pb2 as pb

MAX_RECORD_BYTES = 4096 - 1
MAX_ADDRESSES = 8  # one interface, one relay and one announced address, over two protocols, and some to spare
MAX_ADDRESS_LETTERS = 256
MAX_WHOLE = 1 << 53
"""Rounds, steps and tokens: whole numbers up to here survive JSON and doubles."""
MAX_REAL = 1e15

_ADDRESS = re.compile(
    r"/(?P<kind>ip[46]|dns[46]?)/(?P<host>[0-9A-Za-z.:-]+)/(tcp|udp)/\d{1,5}(/quic-v1|/ws|/wss)?"
    r"(/p2p/(?P<relay>\w+)/p2p-circuit)?/p2p/(?P<peer>\w+)"
)
_SIGNED = b"noloco presence v1\n"


@dataclass(frozen=True, slots=True)
class Presence:
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
    eval_loss: float = 0.0
    """0: none yet."""
    partner: str = ""
    """Peer id of the one with whom a round was committed last."""
    committed: int = 0
    """Rounds with a partner, since its start."""


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
    peers: int
    """How many it thinks there are; 0: it does not say."""
    eval_loss: float
    partner: str
    committed: int
    expires: float


def bucket_of(peer_id: str, depth: int) -> str:
    """Of the 2^depth buckets that hold a run's peers: so many bits of a hash of the id."""
    return f"{int.from_bytes(hashlib.sha256(peer_id.encode()).digest()):0256b}"[:depth]


def key_of(run_id: str, bucket: str) -> str:
    """Where a bucket is in the DHT."""
    return f"noloco/{run_id}/peers/{bucket}"


def signed_record(  # noqa: PLR0913
    identity: Identity, standing: Presence, *, run_id: str, boot: bytes, started: float, now: float, peers: int = 0
) -> bytes:
    """`peers`: how many this node thinks there are, itself included; 0 where it has no idea."""
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
        peers=peers,
        eval_loss=standing.eval_loss,
        partner=standing.partner,
        committed=standing.committed,
    ).SerializeToString()
    return pb.SignedPresence(presence=presence, signature=identity.sign(_SIGNED + presence)).SerializeToString()


@lru_cache(maxsize=2048)  # the same record comes back from several nodes, and a signature takes 0.1 ms to check
def read(peer_id: str, record: bytes) -> pb.Presence | None:
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
    presence = read(peer_id, record)
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
        peers=presence.peers,
        eval_loss=presence.eval_loss,
        partner=presence.partner,
        committed=presence.committed,
        expires=min(presence.time, now) + ttl_s,
    )


def _is_sane(presence: pb.Presence, peer_id: str) -> bool:
    wholes = (presence.round, presence.step, presence.tokens, presence.peers, presence.committed)
    reals = (presence.loss, presence.eval_loss, presence.tokens_per_s, presence.started)
    return (
        len(presence.boot) == 16
        and re.fullmatch("[a-z]{1,16}", presence.state) is not None
        and re.fullmatch("[0-9A-Za-z.+-]{1,32}", presence.version) is not None
        and all(whole <= MAX_WHOLE for whole in wholes)
        and all(math.isfinite(real) and 0 <= real <= MAX_REAL for real in reals)
        and 0 <= presence.progress <= 1
        and (not presence.partner or is_peer_id(presence.partner))
        and len(presence.addresses) <= MAX_ADDRESSES
        and all(is_address(address, peer_id) for address in presence.addresses)
    )


def is_address(text: str, peer_id: str) -> bool:
    form = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS_LETTERS else None
    if form is None or form["peer"] != peer_id or not (form["relay"] is None or is_peer_id(form["relay"])):
        return False
    if form["kind"].startswith("dns"):
        return True
    try:
        return ip_address(form["host"]).version == int(form["kind"][-1])
    except ValueError:
        return False
