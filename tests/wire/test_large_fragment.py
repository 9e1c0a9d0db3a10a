"""Fragments are written and read as protobuf does it."""

from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from noloco_node.errors import PeerMisbehaved
from noloco_node.wire import large_fragment
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb

INDEX = st.integers(0, wire.MAX_FRAGMENTS)
PAYLOAD = st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes))


def by_protobuf(index: int, payload: bytes) -> bytes:
    message = pb.SwapFrame()
    message.fragment.index, message.fragment.payload = index, payload
    return message.SerializeToString()


@given(INDEX, PAYLOAD)
def test_the_bytes_are_those_of_protobuf(index: int, payload: bytes) -> None:
    written = wire.to_bytes(wire.Fragment(index, payload))
    assert written == by_protobuf(index, payload) == wire.to_bytes(wire.Fragment(index, memoryview(payload)))
    assert wire.from_bytes(written) == wire.Fragment(index, payload) == wire.from_bytes(bytearray(written))


def test_a_payload_is_not_copied() -> None:
    data = wire.to_bytes(wire.Fragment(7, b"abc" * 1000))
    assert large_fragment.read(data) is not None
    frame = wire.from_bytes(data)
    assert isinstance(frame, wire.Fragment)
    assert isinstance(frame.payload, memoryview)
    assert frame.payload.obj is data


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(by_protobuf(draw(INDEX), draw(PAYLOAD)))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, min(12, len(data) - 1)))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


@given(st.one_of(damaged(), st.binary(max_size=40).map(lambda more: b"\x22" + more)))
@example(b"\x22\x8b\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00" + b"\x12\x09" + bytes(9))  # too long a number
@example(b"\x22\x8b" + b"\x80" * 9 + b"\x12\x09" + bytes(9))
@example(b"\x22\x89\x00\x08\x05\x12\x05" + bytes(5))
@example(b"\x22\x0a\x08\x85\x80\x80\x80\x10\x12\x02ab")  # an index of 2^32 + 5
@example(b"\x22\x07\x08\x05\x12\x03abc" + b"\x22\x04\x12\x02ab")  # twice
@example(b"\x22\x0a\x12\x03abc\x12\x03abc")
@example(b"\x22\x07\x12\x03abc\x08\x05")
@example(b"\x22")
def test_what_is_read_at_all_means_what_protobuf_reads(data: bytes) -> None:
    found = large_fragment.read(data)
    if found is not None:
        message = pb.SwapFrame.FromString(data)
        assert (message.fragment.index, message.fragment.payload) == found
    with suppress(PeerMisbehaved):
        wire.from_bytes(data)
