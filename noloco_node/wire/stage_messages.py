"""The messages between peers of neighbouring stages, as dataclasses: protobuf stays behind this module.

`decode` checks everything before anything is used, as wire/messages.py does for the other services.
"""

import math
from dataclasses import asdict, dataclass

from noloco_node.errors import PeerMisbehaved
from noloco_node.run.schema import MAX_STAGES
from noloco_node.wire import messages
from noloco_node.wire import stage_pb2 as pb
from noloco_node.wire.messages import Code, Refusal

MAX_PART_BYTES = 1 << 17
MAX_EXAMPLES = 1 << 16
MAX_DEADLINE_S = 120.0
MAX_FREE = 1 << 10
MAX_LOSS = 1e12
"""Of a micro-batch: the sum over its tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    protocol: int
    run_id: bytes
    stage: int
    examples: int
    deadline_s: float
    evaluates: bool
    admission: bytes = b""
    tries: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    data: bytes


@dataclass(frozen=True, slots=True)
class Passed:
    loss: float
    free: int


Frame = MicroBatch | Part | Passed | Refusal


def encode(frame: Frame) -> pb.StageFrame:
    match frame:
        case MicroBatch():
            return pb.StageFrame(micro_batch=asdict(frame))
        case Part(data):
            return pb.StageFrame(part=data)
        case Passed():
            return pb.StageFrame(passed=asdict(frame))
        case Refusal():
            return pb.StageFrame(refusal=messages.encode_refusal(frame))


def decode(message: pb.StageFrame) -> Frame:
    match message.WhichOneof("frame"):
        case "micro_batch":
            return _micro_batch(message.micro_batch)
        case "part":
            if len(message.part) > MAX_PART_BYTES:
                raise PeerMisbehaved("bad_part", f"{len(message.part)} bytes")
            return Part(message.part)
        case "passed":
            loss = message.passed.loss
            if not (math.isfinite(loss) and abs(loss) <= MAX_LOSS):
                raise PeerMisbehaved("bad_loss", "not a loss")
            return Passed(loss, min(message.passed.free, MAX_FREE))
        case "refusal":
            return messages.decode_refusal(message.refusal)
        case _:
            raise PeerMisbehaved("empty_frame")


def _micro_batch(message: pb.MicroBatch) -> MicroBatch:
    if not 0 < message.examples <= MAX_EXAMPLES:
        raise PeerMisbehaved("bad_examples", f"{message.examples}")
    if not 0 < message.deadline_s <= MAX_DEADLINE_S:  # false for NaN too
        raise PeerMisbehaved("bad_deadline", f"{message.deadline_s:g} s")
    return MicroBatch(
        message.protocol,
        messages.sized(message.run_id, 32, "run_id"),
        messages.bounded(message.stage, MAX_STAGES, "stage"),
        message.examples,
        message.deadline_s,
        message.evaluates,
        messages.token(message.admission),
        message.tries,
    )


__all__ = ["Code", "Frame", "MicroBatch", "Part", "Passed", "Refusal", "decode", "encode"]
