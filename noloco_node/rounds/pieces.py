"""A large frame cut into pieces, and put together again.

A piece is what a limited link can carry within a partner's deadline: so each piece has a deadline of its own, a rate
can be held between them, and a small frame waits for one piece at most, not for a whole fragment. Knows nothing of
links and deadlines: `rounds/link.py` paces and times the pieces.
"""

from collections.abc import Iterator

from noloco_node.errors import PeerMisbehaved
from noloco_node.wire import messages as wire

PIECE_BYTES = 64 << 10
"""2 s at the slowest rate that can be set (host/limits.py). One more may be under way than rounds/link.py has a side
ahead: with 128 kB that did not fit into a router's queue of 50 ms, and what was lost there came again."""
LARGE_PIECE_BYTES = 576 << 10
"""A whole fragment of 2^20 elements at 4 bits, which a quick link does not cut: pieces of 128 kB cost a tenth more CPU
time a byte, in messages and copies. 18 s at the slowest rate, which a partner waits for."""
QUICK_S = 0.02
"""A link that carries a large piece in this time, on average, sends large ones: 236 Mbit/s. On a slower one each side
would have sent its piece before the partner's has come, and wait (rounds/link.py): 50 M elements at 50 Mbit/s take 4.8
to 6.4 s in whole fragments and 4.6 to 4.7 in pieces."""


def largest(bytes_s: float) -> int:
    """How large pieces may be, on a link that carries so much."""
    return LARGE_PIECE_BYTES if bytes_s * QUICK_S >= LARGE_PIECE_BYTES else PIECE_BYTES


def cut(frame: bytes, most: int = PIECE_BYTES) -> Iterator[bytes]:
    """The frame itself where it is small."""
    if len(frame) <= most:
        yield frame
        return
    for start in range(0, len(frame), most):
        end = start + most
        yield wire.to_bytes(wire.Piece(frame[start:end], end < len(frame)))


class Assembly:
    """Puts frames together; a partner cannot make it hold more than one frame may have."""

    def __init__(self, least: int = PIECE_BYTES) -> None:
        """`least`: bytes in a piece that is not the last."""
        self._least = least
        self._whole = bytearray()

    def add(self, message: bytes) -> wire.Frame | None:
        """The frame that this is or completes; None for a piece with more to come. Raises PeerMisbehaved."""
        piece = wire.from_bytes(message)
        if not isinstance(piece, wire.Piece):
            return piece
        if piece.more and len(piece.data) < self._least:  # each message costs 0.1 ms, however small it is
            raise PeerMisbehaved("bad_piece", f"{len(piece.data)} bytes, and more to come")
        if not piece.data or len(self._whole) + len(piece.data) > wire.MAX_FRAME_BYTES:
            raise PeerMisbehaved("bad_piece", f"{len(piece.data)} bytes after {len(self._whole)}")
        self._whole += piece.data
        if piece.more:
            return None
        whole, self._whole = self._whole, bytearray()
        frame = wire.from_bytes(whole)
        if isinstance(frame, wire.Piece):
            raise PeerMisbehaved("bad_piece", "a piece in pieces")
        return frame
