"""The messages between two nodes, as dataclasses: protobuf stays behind this module, and has fields of the same names.

`decode_*` checks everything before anything is used: a field of the wrong size, a number out of bounds, an empty frame
raise PeerMisbehaved, whose code says which. Nothing here knows who sent a message or what it will be used for.
"""

import math
from dataclasses import asdict, dataclass
from enum import IntEnum

from google.protobuf.message import DecodeError

from noloco_node.errors import PeerMisbehaved
from noloco_node.run.admission import TOKEN_BYTES
from noloco_node.wire import large_fragment, state_format, varint
from noloco_node.wire import peer_pb2 as pb

MAX_MESSAGE_BYTES = 8 << 20
"""Of the answer of a peer that this node has called: a list of 64 runs is half of it."""
MAX_FRAME_BYTES = (16 << 20) + (1 << 10)
"""Of a frame, which comes in pieces: a fragment of 4 Mi parameters in fp32."""
MAX_REQUEST_BYTES = (1 << 20) + (4 << 10)
"""Of a message that a caller sends, which may be a stranger: the payload of a ping is the largest; a piece of a frame
is smaller."""
MAX_FRAGMENTS = 1 << 20
"""2^42 parameters: beyond any model, small enough to count in memory."""
MAX_ROUND = 1 << 53
"""Whole numbers up to here survive JSON and doubles."""
MAX_WAIT_S = 86_400.0
"""No appointment is further away than a day."""
MAX_STATE_BYTES = 1 << 42
"""4 TiB: slow weights and momentum of half a trillion parameters."""
MAX_SAMPLE_BLOCKS, BLOCK = 256, 256
"""A sample of a state: so many blocks of so many parameters are a quarter of a megabyte."""
MAX_LOSS = 1e15


_KINDS = max(field.number for field in pb.SwapFrame.DESCRIPTOR.fields)


class Code(IntEnum):
    """Why a call is refused. The names in lower case are the reasons that `status` counts."""

    BUSY = pb.BUSY
    APPOINTMENT = pb.APPOINTMENT
    STALE = pb.STALE
    INCOMPATIBLE = pb.INCOMPATIBLE
    DIVERGED = pb.DIVERGED
    NOT_ADMITTED = pb.NOT_ADMITTED
    QUARANTINED = pb.QUARANTINED
    PAUSED = pb.PAUSED
    LEAVING = pb.LEAVING
    EXPIRED = pb.EXPIRED
    REVOKED = pb.REVOKED

    @property
    def reason(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Offer:
    protocol: int
    run_id: bytes
    layout: bytes
    exchange_id: bytes
    fragments: int
    patience_s: float
    admission: bytes = b""
    """The sender's token (run/admission.py), here and below; empty: none."""


@dataclass(frozen=True, slots=True)
class Accept:
    admission: bytes = b""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The callee's last frame, except for an appointment: then Accept or another Refusal follows."""

    code: Code
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fragment:
    index: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Ack:
    index: int
    scale: float
    """What the sender multiplies the correction by. The leader's is final: both use it. The other's is what it
    allows."""


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a large frame: see rounds/pieces.py."""

    data: bytes
    more: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """Sent while there is nothing else to send, to show that the peer is alive."""

    round_trip_s: float = 0.0
    """As the caller has measured it, at the beginning of a swap."""


Frame = Offer | Accept | Refusal | Fragment | Ack | Done | Piece | Alive


@dataclass(frozen=True, slots=True)
class StateRequest:
    protocol: int
    run_id: bytes
    layout: bytes
    coding: state_format.Coding = state_format.Coding.FP32
    root: bytes = b""
    """Of the version that the download began with."""
    fragment: int = 0
    """The first one of it that is still missing."""
    admission: bytes = b""


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Its parts agree with each other: as many digests as the size has fragments, and the root is theirs."""

    round: int
    total_bytes: int
    root: bytes
    digests: bytes
    fragment: int = 0
    """The first one that follows."""


@dataclass(frozen=True, slots=True)
class StateChunk:
    data: bytes


@dataclass(frozen=True, slots=True)
class StatePlace:
    place: int
    """Downloads that come first; 0: the donor takes its snapshot."""


StateFrame = StateHeader | StateChunk | StatePlace | Refusal


@dataclass(frozen=True, slots=True)
class SampleRequest:
    protocol: int
    run_id: bytes
    layout: bytes
    blocks: tuple[int, ...]
    """Numbered from the start of the flat vector; the last one of the vector may be shorter."""
    admission: bytes = b""


@dataclass(frozen=True, slots=True)
class StateSample:
    round: int
    eval_loss: float | None
    """None: none yet."""
    blocks: bytes
    """Slow weights: fp32, little-endian, in the order of the request."""


def encode(frame: Frame) -> pb.SwapFrame:  # noqa: PLR0911 - one for each kind
    match frame:
        case Offer():
            return pb.SwapFrame(offer=asdict(frame) | {"patience_s": min(frame.patience_s, MAX_WAIT_S)})
        case Accept():
            return pb.SwapFrame(accept=asdict(frame))
        case Refusal():
            return pb.SwapFrame(refusal=encode_refusal(frame))
        case Fragment(index, payload):
            return pb.SwapFrame(fragment=pb.Fragment(index=index, payload=bytes(payload)))
        case Ack():
            return pb.SwapFrame(ack=asdict(frame))
        case Done():
            return pb.SwapFrame(done=pb.Done())
        case Piece(data, more):
            message = pb.SwapFrame()  # a large one: so protobuf copies it once
            message.piece.data, message.piece.more = data, more
            return message
        case Alive():
            return pb.SwapFrame(alive=asdict(frame))


def to_bytes(frame: Frame) -> bytes:
    if isinstance(frame, Fragment):
        return large_fragment.write(frame.index, frame.payload)
    return encode(frame).SerializeToString()


def from_bytes(data: bytes | bytearray) -> Frame:
    """Bytes that are no message, or one of very many fields, are read as one without any. A fragment's payload is a
    part of the data."""
    if found := large_fragment.read(data):
        return Fragment(bounded(found[0], MAX_FRAGMENTS, "index"), found[1])
    few = varint.has_few_fields(data, _KINDS)  # a frame of 16 MiB of empty ones takes a second
    try:
        return decode(pb.SwapFrame.FromString(data if few else b""))  # type: ignore[arg-type]  # its stubs know bytes only
    except DecodeError:
        raise PeerMisbehaved("empty_frame") from None


def decode(message: pb.SwapFrame) -> Frame:  # noqa: PLR0911 - one for each kind
    match message.WhichOneof("frame"):
        case "offer":
            return _decode_offer(message.offer)
        case "accept":
            return Accept(token(message.accept.admission))
        case "refusal":
            return decode_refusal(message.refusal)
        case "fragment":
            fragment = message.fragment
            return Fragment(bounded(fragment.index, MAX_FRAGMENTS, "index"), fragment.payload)
        case "ack":
            scale = message.ack.scale
            if not 0 < scale <= 1:  # false for NaN too
                raise PeerMisbehaved("bad_scale", f"{scale:g} is not above 0 and at most 1")
            return Ack(bounded(message.ack.index, MAX_FRAGMENTS, "index"), scale)
        case "done":
            return Done()
        case "piece":
            return Piece(message.piece.data, message.piece.more)
        case "alive":
            return Alive(_seconds(message.alive.round_trip_s, "round_trip_s"))
        case _:
            raise PeerMisbehaved("empty_frame")


def encode_state(frame: StateFrame) -> pb.StateFrame:
    match frame:
        case StateHeader():
            return pb.StateFrame(header=asdict(frame))
        case StateChunk(data):
            return pb.StateFrame(chunk=pb.StateChunk(data=data))
        case StatePlace(place):
            return pb.StateFrame(place=pb.StatePlace(place=place))
        case Refusal():
            return pb.StateFrame(refusal=encode_refusal(frame))


def decode_state(message: pb.StateFrame) -> StateFrame:
    match message.WhichOneof("frame"):
        case "header":
            return _decode_header(message.header)
        case "chunk":
            return StateChunk(message.chunk.data)
        case "place":
            return StatePlace(message.place.place)
        case "refusal":
            return decode_refusal(message.refusal)
        case _:
            raise PeerMisbehaved("empty_frame")


def encode_state_request(request: StateRequest) -> pb.StateRequest:
    return pb.StateRequest(**asdict(request))


def decode_state_request(message: pb.StateRequest) -> StateRequest:
    try:
        coding = state_format.Coding(message.coding)
    except ValueError:
        raise PeerMisbehaved("bad_coding", f"{message.coding} is not known") from None
    return StateRequest(
        message.protocol,
        sized(message.run_id, 32, "run_id"),
        sized(message.layout, 32, "layout"),
        coding,
        sized(message.root, 32, "root") if message.root else b"",
        bounded(message.fragment, state_format.MAX_FRAGMENTS, "fragment"),
        token(message.admission),
    )


def decode_progress(message: pb.StateProgress) -> int:
    """The round."""
    return bounded(message.round, MAX_ROUND, "round")


def encode_sample_request(request: SampleRequest) -> pb.SampleRequest:
    return pb.SampleRequest(**asdict(request))


def decode_sample_request(message: pb.SampleRequest) -> SampleRequest:
    if not 0 < len(message.blocks) <= MAX_SAMPLE_BLOCKS:
        raise PeerMisbehaved("bad_blocks", f"{len(message.blocks)} of them")
    return SampleRequest(
        message.protocol,
        sized(message.run_id, 32, "run_id"),
        sized(message.layout, 32, "layout"),
        tuple(bounded(block, MAX_STATE_BYTES, "blocks") for block in message.blocks),
        token(message.admission),
    )


def encode_sample(sample: StateSample) -> pb.StateSample:
    return pb.StateSample(round=sample.round, eval_loss=sendable(sample.eval_loss), blocks=sample.blocks)


def sendable(loss: float | None) -> float:
    """0: not known. Whoever reads NaN, or a number beyond the limit, believes nothing else of the message either."""
    return loss if loss is not None and abs(loss) <= MAX_LOSS else 0.0


def decode_sample(message: pb.StateSample, size_bytes: int) -> StateSample:
    """`size_bytes`: of the blocks that were asked for."""
    loss = message.eval_loss
    if not (math.isfinite(loss) and abs(loss) <= MAX_LOSS):
        raise PeerMisbehaved("bad_eval_loss", "not a loss")
    blocks = sized(message.blocks, size_bytes, "blocks")
    return StateSample(bounded(message.round, MAX_ROUND, "round"), loss or None, blocks)


def _decode_header(header: pb.StateHeader) -> StateHeader:
    round_ = bounded(header.round, MAX_ROUND, "round")
    total_bytes = bounded(header.total_bytes, MAX_STATE_BYTES, "total_bytes")
    count = state_format.fragments(total_bytes)
    digests = sized(header.digests, state_format.DIGEST_BYTES * count, "digests")
    if header.root != state_format.root(round_, total_bytes, digests):
        raise PeerMisbehaved("bad_root", "not the one of its digests")
    return StateHeader(round_, total_bytes, header.root, digests, bounded(header.fragment, count, "fragment"))


def _decode_offer(offer: pb.Offer) -> Offer:
    if offer.fragments == 0:
        raise PeerMisbehaved("bad_fragments", "an offer of no fragments")
    return Offer(
        protocol=offer.protocol,
        run_id=sized(offer.run_id, 32, "run_id"),
        layout=sized(offer.layout, 32, "layout"),
        exchange_id=sized(offer.exchange_id, 16, "exchange_id"),
        fragments=bounded(offer.fragments, MAX_FRAGMENTS, "fragments"),
        patience_s=_seconds(offer.patience_s, "patience_s"),
        admission=token(offer.admission),
    )


def encode_refusal(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(code=refusal.code.value, retry_in_s=min(refusal.retry_in_s, MAX_WAIT_S))


def decode_refusal(refusal: pb.Refusal) -> Refusal:
    try:
        code = Code(refusal.code)
    except ValueError:  # a newer node's code: no is no
        code = Code.BUSY
    return Refusal(code, _seconds(refusal.retry_in_s, "retry_in_s"))


def sized(value: bytes, size: int, field: str) -> bytes:
    if len(value) != size:
        raise PeerMisbehaved(f"bad_{field}", f"{len(value)} bytes instead of {size}")
    return value


def token(value: bytes) -> bytes:
    return sized(value, TOKEN_BYTES, "admission") if value else b""


def bounded(value: int, limit: int, field: str) -> int:
    if value > limit:
        raise PeerMisbehaved(f"bad_{field}", f"{value} is above {limit}")
    return value


def _seconds(value: float, field: str) -> float:
    if not (math.isfinite(value) and 0 <= value <= MAX_WAIT_S):
        raise PeerMisbehaved(f"bad_{field}", "not a wait of 0 s to a day")
    return value
