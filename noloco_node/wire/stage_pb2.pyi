from noloco_node.wire import peer_pb2 as _peer_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageFrame(_message.Message):
    __slots__ = ("micro_batch", "part", "passed", "refusal")
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    micro_batch: MicroBatch
    part: bytes
    passed: Passed
    refusal: _peer_pb2.Refusal
    def __init__(self, micro_batch: _Optional[_Union[MicroBatch, _Mapping]] = ..., part: _Optional[bytes] = ..., passed: _Optional[_Union[Passed, _Mapping]] = ..., refusal: _Optional[_Union[_peer_pb2.Refusal, _Mapping]] = ...) -> None: ...

class MicroBatch(_message.Message):
    __slots__ = ("protocol", "run_id", "stage", "examples", "deadline_s", "evaluates", "admission", "tries")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    EVALUATES_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    stage: int
    examples: int
    deadline_s: float
    evaluates: bool
    admission: bytes
    tries: bool
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., stage: _Optional[int] = ..., examples: _Optional[int] = ..., deadline_s: _Optional[float] = ..., evaluates: _Optional[bool] = ..., admission: _Optional[bytes] = ..., tries: _Optional[bool] = ...) -> None: ...

class Passed(_message.Message):
    __slots__ = ("loss", "free")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    loss: float
    free: int
    def __init__(self, loss: _Optional[float] = ..., free: _Optional[int] = ...) -> None: ...
