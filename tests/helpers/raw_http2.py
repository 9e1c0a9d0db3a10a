"""HTTP/2 as a peer may write it that is no gRPC."""

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0, 1, 4, 6, 9
ACK = END_OF_STREAM = 1
END_OF_HEADERS = 4
REQUEST = {":method": "POST", ":scheme": "http", ":authority": "x", "te": "trailers"}
GRPC = {"content-type": "application/grpc"}
MOST_BYTES = 1 << 14
"""Of a frame."""


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def fields(known: Iterable[tuple[str, str]]) -> bytes:
    """Uncompressed."""
    parts = (b"\x00" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in known)
    return b"".join(parts)


def headers(stream: int, block: bytes, flags: int = 0) -> bytes:
    """In as many frames as they take."""
    parts = [block[at : at + MOST_BYTES] for at in range(0, len(block), MOST_BYTES)]
    last = len(parts) - 1
    return b"".join(
        frame(
            CONTINUATION if at else HEADERS, (0 if at else flags) | (END_OF_HEADERS if at == last else 0), stream, part
        )
        for at, part in enumerate(parts)
    )
