from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[RefusalCode]
    BUSY: _ClassVar[RefusalCode]
    APPOINTMENT: _ClassVar[RefusalCode]
    STALE: _ClassVar[RefusalCode]
    INCOMPATIBLE: _ClassVar[RefusalCode]
    DIVERGED: _ClassVar[RefusalCode]
    NOT_ADMITTED: _ClassVar[RefusalCode]
    QUARANTINED: _ClassVar[RefusalCode]
    PAUSED: _ClassVar[RefusalCode]
    LEAVING: _ClassVar[RefusalCode]
    EXPIRED: _ClassVar[RefusalCode]
    REVOKED: _ClassVar[RefusalCode]

class StateCoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FP32: _ClassVar[StateCoding]
    BF16: _ClassVar[StateCoding]
REFUSAL_UNSPECIFIED: RefusalCode
BUSY: RefusalCode
APPOINTMENT: RefusalCode
STALE: RefusalCode
INCOMPATIBLE: RefusalCode
DIVERGED: RefusalCode
NOT_ADMITTED: RefusalCode
QUARANTINED: RefusalCode
PAUSED: RefusalCode
LEAVING: RefusalCode
EXPIRED: RefusalCode
REVOKED: RefusalCode
FP32: StateCoding
BF16: StateCoding

class SwapFrame(_message.Message):
    __slots__ = ("offer", "accept", "refusal", "fragment", "ack", "done", "piece", "alive")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    accept: Accept
    refusal: Refusal
    fragment: Fragment
    ack: Ack
    done: Done
    piece: Piece
    alive: Alive
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., fragment: _Optional[_Union[Fragment, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("protocol", "run_id", "layout", "exchange_id", "fragments", "patience_s", "admission")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    layout: bytes
    exchange_id: bytes
    fragments: int
    patience_s: float
    admission: bytes
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., exchange_id: _Optional[bytes] = ..., fragments: _Optional[int] = ..., patience_s: _Optional[float] = ..., admission: _Optional[bytes] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("admission",)
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    admission: bytes
    def __init__(self, admission: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "retry_in_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_S_FIELD_NUMBER: _ClassVar[int]
    code: RefusalCode
    retry_in_s: float
    def __init__(self, code: _Optional[_Union[RefusalCode, str]] = ..., retry_in_s: _Optional[float] = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("index", "payload")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload: bytes
    def __init__(self, index: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("index", "scale")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    index: int
    scale: float
    def __init__(self, index: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data", "more")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    more: bool
    def __init__(self, data: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("round_trip_s",)
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    round_trip_s: float
    def __init__(self, round_trip_s: _Optional[float] = ...) -> None: ...

class RunsRequest(_message.Message):
    __slots__ = ("run", "author")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    run: str
    author: str
    def __init__(self, run: _Optional[str] = ..., author: _Optional[str] = ...) -> None: ...

class RunsReply(_message.Message):
    __slots__ = ("runs", "training")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[SignedManifest]
    training: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, runs: _Optional[_Iterable[_Union[SignedManifest, _Mapping]]] = ..., training: _Optional[_Iterable[int]] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("manifest", "author", "signature", "amendment", "amendment_signature")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    author: str
    signature: bytes
    amendment: bytes
    amendment_signature: bytes
    def __init__(self, manifest: _Optional[bytes] = ..., author: _Optional[str] = ..., signature: _Optional[bytes] = ..., amendment: _Optional[bytes] = ..., amendment_signature: _Optional[bytes] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: _Optional[bool] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "layout", "coding", "root", "fragment", "admission")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    layout: bytes
    coding: StateCoding
    root: bytes
    fragment: int
    admission: bytes
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., coding: _Optional[_Union[StateCoding, str]] = ..., root: _Optional[bytes] = ..., fragment: _Optional[int] = ..., admission: _Optional[bytes] = ...) -> None: ...

class StateFrame(_message.Message):
    __slots__ = ("header", "chunk", "refusal", "place")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    header: StateHeader
    chunk: StateChunk
    refusal: Refusal
    place: StatePlace
    def __init__(self, header: _Optional[_Union[StateHeader, _Mapping]] = ..., chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., place: _Optional[_Union[StatePlace, _Mapping]] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("round", "total_bytes", "root", "digests", "fragment")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    total_bytes: int
    root: bytes
    digests: bytes
    fragment: int
    def __init__(self, round: _Optional[int] = ..., total_bytes: _Optional[int] = ..., root: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., fragment: _Optional[int] = ...) -> None: ...

class StatePlace(_message.Message):
    __slots__ = ("place",)
    PLACE_FIELD_NUMBER: _ClassVar[int]
    place: int
    def __init__(self, place: _Optional[int] = ...) -> None: ...

class StateProgress(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "layout", "blocks", "admission")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    layout: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    admission: bytes
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ..., admission: _Optional[bytes] = ...) -> None: ...

class StateSample(_message.Message):
    __slots__ = ("round", "eval_loss", "blocks")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    round: int
    eval_loss: float
    blocks: bytes
    def __init__(self, round: _Optional[int] = ..., eval_loss: _Optional[float] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Presence(_message.Message):
    __slots__ = ("protocol", "run_id", "boot", "state", "round", "step", "loss", "tokens_per_s", "addresses", "time", "version", "peers", "eval_loss", "partner", "committed", "amendment", "admission", "stage", "ended")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    AMENDMENT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: bytes
    boot: bytes
    state: str
    round: int
    step: int
    loss: float
    tokens_per_s: float
    addresses: _containers.RepeatedScalarFieldContainer[str]
    time: float
    version: str
    peers: int
    eval_loss: float
    partner: str
    committed: int
    amendment: int
    admission: bytes
    stage: int
    ended: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[bytes] = ..., boot: _Optional[bytes] = ..., state: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., addresses: _Optional[_Iterable[str]] = ..., time: _Optional[float] = ..., version: _Optional[str] = ..., peers: _Optional[int] = ..., eval_loss: _Optional[float] = ..., partner: _Optional[str] = ..., committed: _Optional[int] = ..., amendment: _Optional[int] = ..., admission: _Optional[bytes] = ..., stage: _Optional[int] = ..., ended: _Optional[int] = ...) -> None: ...

class SignedPresence(_message.Message):
    __slots__ = ("presence", "signature")
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    presence: bytes
    signature: bytes
    def __init__(self, presence: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
