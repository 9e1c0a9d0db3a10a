"""The format of a state transfer: how the numbers are coded, where they are cut into fragments, and their root hash.

A version of a state is its round and its coded bytes. The cut follows from the size alone, so donor and receiver agree
without a message; two donors whose versions have the same root hold the same bytes, and one can continue where the
other broke off. Pure arithmetic on buffers: knows nothing of peers, and of the numbers only that they are fp32.
"""

import hashlib
from enum import IntEnum

import numpy as np

from noloco_node.wire import peer_pb2 as pb

CHUNK_BYTES = 128 << 10
"""Of one message. A donor's limited uplink sends it before the receiver times out: in 4 s at the slowest rate that can
be set (host/limits.py)."""
MAX_FRAGMENTS = 1024
"""Of a state: a break costs a thousandth of it, and the digests of all fit into one small message."""
DIGEST_BYTES = 32

_ROOT = b"noloco state v1\n"


class Coding(IntEnum):
    FP32 = pb.FP32
    BF16 = pb.BF16

    def size(self, numbers: int) -> int:
        """In bytes."""
        return (4 if self is Coding.FP32 else 2) * numbers

    def encode(self, numbers: memoryview, start: int, end: int) -> memoryview:
        """The coded bytes from `start` to `end`, both multiples of 4, of fp32 bytes."""
        if self is Coding.FP32:
            return numbers[start:end]
        bits = np.frombuffer(numbers[2 * start : 2 * end], np.uint32)
        tie_to_even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + tie_to_even) >> np.uint32(16)
        return rounded.astype(np.uint16).data.cast("B")

    def decode(self, coded: bytes | bytearray | memoryview, into: memoryview) -> None:
        """Writes the fp32 bytes."""
        if self is Coding.FP32:
            into[:] = coded
        else:
            np.frombuffer(into, np.uint32)[:] = np.frombuffer(coded, np.uint16).astype(np.uint32) << np.uint32(16)


def fragment_bytes(total_bytes: int) -> int:
    """The size of all fragments but the last: whole chunks, and as few as MAX_FRAGMENTS allows."""
    return CHUNK_BYTES * max(1, -(-total_bytes // (MAX_FRAGMENTS * CHUNK_BYTES)))


def fragments(total_bytes: int) -> int:
    return -(-total_bytes // fragment_bytes(total_bytes))


def digest(fragment: bytes | bytearray | memoryview) -> bytes:
    return hashlib.sha256(fragment).digest()


def root(round: int, total_bytes: int, digests: bytes) -> bytes:
    return hashlib.sha256(_ROOT + round.to_bytes(8, "big") + total_bytes.to_bytes(8, "big") + digests).digest()
