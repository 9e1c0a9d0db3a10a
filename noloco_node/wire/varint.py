"""Whole numbers as protobuf writes them, seven bits a byte, the lowest first; and how many fields a message has."""

MOST_FIELDS = 1024
"""Of a message: ours have up to 130, in the list of the runs that a rendezvous knows."""


def to_bytes(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def read(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """The number there, and where it ends. Raises IndexError where the data ends before."""
    value = shift = 0
    while data[at] & 0x80 and shift < 63:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | (data[at] & 0x7F) << shift, at + 1


def has_few_fields(data: bytes | bytearray | memoryview, parts: int = 0) -> bool:
    """Whether a message has at most MOST_FIELDS fields: each empty entry of a list takes two bytes to send, and a
    hundred in memory. Those of its parts count, too, of fields up to number `parts`, which are messages."""
    return _fields(memoryview(data), parts) <= MOST_FIELDS


def _fields(data: memoryview, parts: int) -> int:
    """More than MOST_FIELDS: too many to count, or none that we use."""
    at = fields = 0
    try:
        while at < len(data) and fields <= MOST_FIELDS:
            fields += 1
            tag, at = read(data, at)
            match tag & 7:
                case 0:
                    _, at = read(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = read(data, at)
                    if tag >> 3 <= parts:
                        fields += _fields(data[at : at + size], 0)
                    at += size
                case 5:
                    at += 4
                case _:
                    return MOST_FIELDS + 1
    except IndexError:
        pass  # it is cut off, which the parser finds
    return fields
