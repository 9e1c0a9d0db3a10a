"""The wire's compatibility rule: what version N−1 sent, N understands, with the same meaning.

`golden/<version>.json` holds messages as that version wrote them, and what they mean. The file of a released version is
never changed. `python tests/wire/test_golden.py` writes the one of the version that stands in version.py.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.base.addresses import Address
from noloco_node.base.identity import Identity
from noloco_node.peers import record
from noloco_node.version import PROTOCOL, VERSION
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format

FOLDER = Path(__file__).with_name("golden")
RUN, LAYOUT, BOOT = b"r" * 32, b"l" * 32, b"b" * 16
AT = 1_800_000_000.0
TTL_S = 60.0
AUTHOR = Identity(Ed25519PrivateKey.from_private_bytes(b"k" * 32), Path("nowhere"))
DIGESTS = state_format.digest(b"state")


def read_presence(signed: bytes) -> Any:
    return record.accept(AUTHOR.peer_id, signed, RUN.hex(), AT, TTL_S)


READERS: dict[str, Callable[[bytes], Any]] = {
    "SwapFrame": lambda raw: wire.decode(pb.SwapFrame.FromString(raw)),
    "StateFrame": lambda raw: wire.decode_state(pb.StateFrame.FromString(raw)),
    "StateRequest": lambda raw: wire.decode_state_request(pb.StateRequest.FromString(raw)),
    "SignedPresence": read_presence,
}


def written() -> Iterator[tuple[str, bytes]]:
    """Each message that has a meaning of its own, as this version writes it."""
    swaps: list[wire.Frame] = [
        wire.Offer(PROTOCOL, RUN, LAYOUT, b"x" * 16, 3, 2.5),
        wire.Accept(),
        wire.Refusal(wire.Code.APPOINTMENT, 1.5),
        wire.Fragment(5, b"abc"),
        wire.Ack(5, 0.5),
        wire.Done(),
        wire.Piece(b"abc", True),
        wire.Alive(),
    ]
    for frame in swaps:
        yield "SwapFrame", wire.encode(frame).SerializeToString()
    states: list[wire.StateFrame] = [
        wire.StateHeader(4, 8, state_format.root(4, 8, DIGESTS), DIGESTS),
        wire.StateChunk(b"abc"),
        wire.StatePlace(2),
        wire.Refusal(wire.Code.BUSY, 1.0),
    ]
    for state in states:
        yield "StateFrame", wire.encode_state(state).SerializeToString()
    yield "StateRequest", wire.encode_state_request(wire.StateRequest(PROTOCOL, RUN, LAYOUT)).SerializeToString()
    address = Address("ip4", "203.0.113.7", 4001, AUTHOR.peer_id)
    standing = record.Presence("training", 41, 2063, 1.875, 1024.0, (address,), 1.9375, AUTHOR.peer_id, 39)
    signed = record.signed_record(AUTHOR, standing, run_id=RUN.hex(), boot=BOOT, now=AT)
    yield "SignedPresence", signed


def meaning(read: Any) -> dict[str, Any]:
    """As JSON can hold it."""
    values = {field.name: getattr(read, field.name) for field in fields(read)}
    plain = {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}
    return {"is": type(read).__name__, **json.loads(json.dumps(plain, default=str))}


def document() -> list[dict[str, Any]]:
    return [
        {"message": message, "bytes": raw.hex(), "means": meaning(READERS[message](raw))} for message, raw in written()
    ]


def golden() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.json")):
        for entry in json.loads(path.read_text()):
            yield pytest.param(entry, id=f"{path.stem}-{entry['message']}-{entry['means']['is']}")


@pytest.mark.parametrize("entry", [*golden()])
def test_a_message_of_each_version_still_means_the_same(entry: dict[str, Any]) -> None:
    read = meaning(READERS[entry["message"]](bytes.fromhex(entry["bytes"])))
    assert {name: read[name] for name in entry["means"]} == entry["means"], "what came later is passed over"


def test_this_version_has_its_golden_messages() -> None:
    path = FOLDER / f"{VERSION}.json"
    kept = {(entry["message"], entry["means"]["is"]) for entry in json.loads(path.read_text())}
    assert kept == {(entry["message"], entry["means"]["is"]) for entry in document()}, (
        "python tests/wire/test_golden.py"
    )


@pytest.mark.parametrize("frame", [pb.SwapFrame, pb.StateFrame])
def test_every_kind_of_frame_has_one(frame: Any) -> None:
    kinds = {field.name for field in frame.DESCRIPTOR.oneofs_by_name["frame"].fields}
    mine = [raw for message, raw in written() if message == frame.DESCRIPTOR.name]
    assert {frame.FromString(raw).WhichOneof("frame") for raw in mine} == kinds


if __name__ == "__main__":
    (FOLDER / f"{VERSION}.json").write_text(json.dumps(document(), indent=2) + "\n")
