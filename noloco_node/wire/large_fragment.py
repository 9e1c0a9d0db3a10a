"""A SwapFrame with a fragment, written and read without protobuf, which copies the payload twice each time: of half a
megabyte, that took an eighth of a swap's CPU time. The bytes are protobuf's.
"""

from noloco_node.wire import varint

_FRAGMENT, _INDEX, _PAYLOAD = b"\x22", b"\x08", b"\x12"  # each field's number and kind, of `SwapFrame` and `Fragment`


def write(index: int, payload: bytes | memoryview) -> bytes:
    return b"".join((_head(index, payload), payload))


def read(data: bytes | bytearray) -> tuple[int, memoryview] | None:
    """Index and payload, which is a part of the data; None: not written as here, protobuf may read it."""
    view = memoryview(data)
    try:
        if view[:1] != _FRAGMENT:
            return None
        _, at = varint.read(view, 1)
        index = 0
        if view[at : at + 1] == _INDEX:
            index, at = varint.read(view, at + 1)
        _, at = varint.read(view, at + 1)
    except IndexError:
        return None
    payload = view[at:]
    return (index, payload) if not index >> 32 and view[:at] == _head(index, payload) else None


def _head(index: int, payload: bytes | memoryview) -> bytes:
    place = _INDEX + varint.to_bytes(index) if index else b""
    size = _PAYLOAD + varint.to_bytes(len(payload)) if payload else b""
    return b"".join((_FRAGMENT, varint.to_bytes(len(place) + len(size) + len(payload)), place, size))
