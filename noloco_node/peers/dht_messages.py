"""What two nodes of the DHT send each other, checked before hivemind reads any of it.

hivemind believes its messages: a value nested some hundred deep ends its process, a peer id of 100 kB takes it ten
seconds to write in base58, a bucket may have any number of entries of any type. So each request and each reply comes
through here first. What no node of ours would send is refused, or taken out where the rest may be used:

- A node's id in the DHT follows from its peer id, which libp2p has proved: nobody has two, nor another one's. Who names
  another one is answered, and is no part of the DHT. The neighbours in an answer are checked in the same way.
- A peer stores its own records only, one at a time; signers renew them, so nobody hands over those of others.
- Who pings is not called back meanwhile, which would hold the call's place for as long as the caller is silent. Whether
  a node can be called, transport/reachability.py finds out.
- A bucket is read here, strictly, and written anew: at most MAX_IN_BUCKET records, none of which lives longer than a
  node would store it.

Pure, but for the clock; hivemind's message types are known by their names, as importing them takes seconds.
"""

import hashlib
import math
import time
from typing import Any

import msgpack

from noloco_node.base.identity import is_raw_peer_id
from noloco_node.errors import PeerMisbehaved
from noloco_node.peers.record import MAX_RECORD_BYTES

MAX_REQUEST_BYTES, MAX_REPLY_BYTES = 1 << 16, 1 << 20
MAX_IN_BUCKET = 128
"""Five times as many as peers/size_estimate.py puts into one: an answer of 80 kB, of 530 kB at the worst. At depth 0 a
run has up to 144, and more where it grows; any of them show how large it is."""
MAX_KEYS = 1
"""That one request may look for, as ours do: each may be answered with a bucket."""
MAX_NEIGHBOURS = 20
"""In an answer: hivemind's usual number. Ours name eight."""
KEY_BYTES = 20
_NOT_FOUND, _BUCKET = 0, 2
"""Kinds of an answer; the one between them is a value without a signer, which no record of ours is."""
LEFT_OUT = -1.0
"""In place of an expiry: there are records, but this caller has fetched too many."""
_DICTIONARY = 0x50
"""msgpack's extension type of a bucket."""
_TEXT, _BYTES, _LONG_BYTES = 0xD9, 0xC4, 0xC5
"""msgpack's headers of a text, and of bytes, of up to 255, and of up to 65,535."""


def node_id(raw_peer_id: bytes) -> bytes:
    """The id of this peer in the DHT."""
    return hashlib.sha1(raw_peer_id, usedforsecurity=False).digest()  # as long as hivemind's


class Bounded:
    """In the place of a message type: reads no message of more bytes, of which two million empty parts take a second,
    and 200 MB."""

    def __init__(self, kind: Any, most: int) -> None:
        self._kind, self._most = kind, most

    def FromString(self, data: bytes) -> Any:  # noqa: N802 (hivemind calls it)
        """Raises PeerMisbehaved."""
        if len(data) > self._most:
            raise PeerMisbehaved("too_large", f"{len(data)} bytes")
        return self._kind.FromString(data)


def check_request(request: Any, peer: Any) -> None:
    """`peer`: the caller, as hivemind's PeerID. Raises PeerMisbehaved."""
    _check_sender(request, peer)
    match request.DESCRIPTOR.name:
        case "PingRequest":
            request.validate = False
        case "FindRequest":
            del request.keys[MAX_KEYS:]
            _check_keys(request.keys)
        case "StoreRequest":
            parts = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
            if {len(part) for part in parts} != {1}:
                raise PeerMisbehaved("bad_store", "not one record")
            _check_keys(request.keys)
            if not (_is_own(request.subkeys[0], peer) and math.isfinite(request.expiration_time[0])):
                raise PeerMisbehaved("bad_store", "not a record of its own")


def corrected(reply: Any) -> Any:
    """Our own reply, as callers expect it: hivemind's nodes warn where a ping does not find them available."""
    if reply.DESCRIPTOR.name == "PingResponse":
        reply.available = True
    return reply


def leave_out_records(reply: Any) -> None:
    """Of our own reply to a look-up; of one without records the neighbours."""
    for result in reply.results:
        if result.type == _NOT_FOUND:
            del result.nearest_node_ids[:], result.nearest_peer_ids[:]
        _clear(result)
        result.expiration_time = LEFT_OUT


def are_left_out(reply: Any) -> bool:
    """Whether the node that sent this reply says that it has left out records."""
    is_look_up = reply.DESCRIPTOR.name == "FindResponse"
    return is_look_up and any(result.expiration_time == LEFT_OUT for result in reply.results[:MAX_KEYS])


def check_reply(reply: Any, peer: Any, longest_s: float) -> None:
    """Of this peer; `longest_s`: how long a record may live at most. Raises PeerMisbehaved."""
    _check_sender(reply, peer)
    if reply.DESCRIPTOR.name == "FindResponse":
        del reply.results[MAX_KEYS:]
        for result in reply.results:
            _check_neighbours(result)
            _check_bucket(result, time.time() + longest_s)


def _check_sender(message: Any, peer: Any) -> None:
    if message.peer.node_id != node_id(peer.to_bytes()):
        message.peer.node_id = b""  # as of a node that stores nothing


def _is_own(subkey: bytes, peer: Any) -> bool:
    return subkey == packed_text(peer.to_base58())


def _check_keys(keys: Any) -> None:
    if any(len(key) != KEY_BYTES for key in keys):
        raise PeerMisbehaved("bad_key")


def _check_neighbours(result: Any) -> None:
    """Leave those whose id is theirs."""
    ids, peers = list(result.nearest_node_ids), list(result.nearest_peer_ids)
    del result.nearest_node_ids[:], result.nearest_peer_ids[:]
    for dht_id, raw in zip(ids[:MAX_NEIGHBOURS], peers[:MAX_NEIGHBOURS], strict=False):
        if is_raw_peer_id(raw) and node_id(raw) == dht_id:
            result.nearest_node_ids.append(dht_id)
            result.nearest_peer_ids.append(raw)


def _check_bucket(result: Any, latest: float) -> None:
    """Leave the records that may be stored until then, and nothing else."""
    records = read_bucket(result.value) if result.type == _BUCKET else []
    records = [record for record in records if record[2] <= latest]
    if records:
        result.value, result.expiration_time = written_bucket(records), _latest(records)
    else:
        _clear(result)


def _clear(result: Any) -> None:
    """As where no record is stored; its neighbours stay."""
    result.type, result.value, result.expiration_time = _NOT_FOUND, b"", 0.0


Record = tuple[str, bytes, float]
"""A signer, what it has signed as hivemind keeps it, and when that expires."""


def read_bucket(raw: bytes) -> list[Record]:
    """Raises PeerMisbehaved."""
    try:
        outer = msgpack.unpackb(raw, max_array_len=0, max_map_len=0, max_str_len=0, max_bin_len=0)
        if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
            raise ValueError("no bucket")
        _, _, records = msgpack.unpackb(
            outer.data,
            max_array_len=MAX_IN_BUCKET,
            max_map_len=0,
            max_str_len=64,
            max_bin_len=MAX_RECORD_BYTES + 3,
            max_ext_len=0,
        )
        return [_record(*record) for record in records]
    except (ValueError, TypeError) as error:
        raise PeerMisbehaved("bad_bucket", str(error)) from None


def _record(signer: object, value: object, expires: object) -> Record:
    if not (isinstance(signer, str) and isinstance(value, bytes) and isinstance(expires, float)):
        raise TypeError("not a record")
    if packed_body(value) is None or not math.isfinite(expires):
        raise ValueError("not a record of a peer's")
    return signer, value, expires


def written_bucket(records: list[Record]) -> bytes:
    """As hivemind writes it: the most that it may hold, the latest expiry, the records."""
    body = [math.inf, _latest(records), list(map(list, records))]
    written: bytes = msgpack.packb(msgpack.ExtType(_DICTIONARY, msgpack.packb(body)))
    return written


def _latest(records: list[Record]) -> float:
    return max(expires for _, _, expires in records)


def packed_body(value: bytes) -> bytes | None:
    """What hivemind has packed as bytes; None where it is not packed so. By its header alone: garbage never reaches a
    deserialiser."""
    if value[:1] == bytes([_BYTES]) and len(value) == 2 + value[1]:
        return value[2:]
    if value[:1] == bytes([_LONG_BYTES]) and len(value) == 3 + int.from_bytes(value[1:3], "big") > 3 + 255:
        return value[3:]
    return None


def packed_text(text: str) -> bytes:
    return bytes([_TEXT, len(text)]) + text.encode()
