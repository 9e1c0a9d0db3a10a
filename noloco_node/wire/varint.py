"""Whole numbers as protobuf writes them: seven bits a byte, the lowest first."""


def to_bytes(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def read(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number there, and where it ends. Raises IndexError where the data ends before."""
    value = shift = 0
    while data[at] & 0x80 and shift < 63:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | (data[at] & 0x7F) << shift, at + 1
