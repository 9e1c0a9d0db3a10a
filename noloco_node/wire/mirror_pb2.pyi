from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class LookRequest(_message.Message):
    __slots__ = ("ports", "padding")
    PORTS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedScalarFieldContainer[int]
    padding: bytes
    def __init__(self, ports: _Optional[_Iterable[int]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("host", "open", "time")
    HOST_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    host: str
    open: _containers.RepeatedScalarFieldContainer[int]
    time: float
    def __init__(self, host: _Optional[str] = ..., open: _Optional[_Iterable[int]] = ..., time: _Optional[float] = ...) -> None: ...

class WhenceRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class WhenceReply(_message.Message):
    __slots__ = ("place",)
    PLACE_FIELD_NUMBER: _ClassVar[int]
    place: str
    def __init__(self, place: _Optional[str] = ...) -> None: ...

class ArrangeRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class ArrangeReply(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class DialRequest(_message.Message):
    __slots__ = ("peer", "address")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    address: str
    def __init__(self, peer: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class DialReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
