from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HopMessage(_message.Message):
    __slots__ = ("type", "limit", "status")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RESERVE: _ClassVar[HopMessage.Type]
        CONNECT: _ClassVar[HopMessage.Type]
        STATUS: _ClassVar[HopMessage.Type]
    RESERVE: HopMessage.Type
    CONNECT: HopMessage.Type
    STATUS: HopMessage.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    type: HopMessage.Type
    limit: Limit
    status: int
    def __init__(self, type: _Optional[_Union[HopMessage.Type, str]] = ..., limit: _Optional[_Union[Limit, _Mapping]] = ..., status: _Optional[int] = ...) -> None: ...

class Limit(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: int
    def __init__(self, data: _Optional[int] = ...) -> None: ...
