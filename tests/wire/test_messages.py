"""What travels: golden bytes for each message, and everything a peer could send instead."""

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.errors import PeerMisbehaved
from noloco_node.wire import messages as wire
from noloco_node.wire import peer_pb2 as pb
from noloco_node.wire import state_format, varint

OFFER = wire.Offer(1, b"r" * 32, b"l" * 32, b"x" * 16, 3, 2.5)

GOLDEN: list[tuple[wire.Frame, str]] = [
    (OFFER, "0a5f0801" + "1220" + "72" * 32 + "1a20" + "6c" * 32 + "2210" + "78" * 16 + "28033500002040"),
    (wire.Accept(), "1200"),
    (wire.Accept(b"t" * 69), "12470a45" + "74" * 69),
    (wire.Refusal(wire.Code.APPOINTMENT, 1.5), "1a070802150000c03f"),
    (wire.Fragment(5, b"abc"), "220708051203616263"),
    (wire.Ack(5, 0.5), "2a070805150000003f"),
    (wire.Done(), "3200"),
]


@pytest.mark.parametrize(("frame", "golden"), GOLDEN, ids=lambda v: type(v).__name__ if not isinstance(v, str) else "")
def test_golden_bytes(frame: wire.Frame, golden: str) -> None:
    assert wire.encode(frame).SerializeToString().hex() == golden
    assert wire.decode(pb.SwapFrame.FromString(bytes.fromhex(golden))) == frame


def test_state_frames_come_back_as_they_went() -> None:
    header = wire.StateHeader(4, 800, state_format.root(4, 800, b"d" * 32), b"d" * 32, 1)
    for frame in (header, wire.StateChunk(b"abc"), wire.StatePlace(3), wire.Refusal(wire.Code.BUSY, 1.0)):
        assert wire.decode_state(pb.StateFrame.FromString(wire.encode_state(frame).SerializeToString())) == frame
    request = wire.StateRequest(1, b"r" * 32, b"l" * 32, state_format.Coding.BF16, b"x" * 32, 7)
    assert wire.decode_state_request(wire.encode_state_request(request)) == request


def test_samples_come_back_as_they_went() -> None:
    request = wire.SampleRequest(1, b"r" * 32, b"l" * 32, (3, 0, 1 << 40))
    assert wire.decode_sample_request(wire.encode_sample_request(request)) == request
    for loss in (None, 2.5, -1.0):
        sample = wire.StateSample(12, loss, b"abcd")
        assert wire.decode_sample(wire.encode_sample(sample), 4) == sample
    for unknown in (math.nan, math.inf, 1e300):
        sample = wire.encode_sample(wire.StateSample(12, unknown, b"abcd"))
        assert wire.decode_sample(sample, 4).eval_loss is None, "an honest node has measured that"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blocks": []}, "bad_blocks"),
        ({"blocks": [0] * (wire.MAX_SAMPLE_BLOCKS + 1)}, "bad_blocks"),
        ({"blocks": [1 << 60]}, "bad_blocks"),
        ({"run_id": b"short"}, "bad_run_id"),
        ({"layout": b""}, "bad_layout"),
    ],
)
def test_a_bad_request_for_a_sample_is_named(changes: dict[str, Any], reason: str) -> None:
    good = {"protocol": 1, "run_id": b"r" * 32, "layout": b"l" * 32, "blocks": [0]}
    with pytest.raises(PeerMisbehaved, match=reason):
        wire.decode_sample_request(pb.SampleRequest(**{**good, **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blocks": b"abc"}, "bad_blocks"),
        ({"round": 1 << 60}, "bad_round"),
        ({"eval_loss": math.nan}, "bad_eval_loss"),
        ({"eval_loss": -math.inf}, "bad_eval_loss"),
        ({"eval_loss": 1e300}, "bad_eval_loss"),
    ],
)
def test_a_bad_sample_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerMisbehaved, match=reason):
        wire.decode_sample(pb.StateSample(**{"round": 1, "eval_loss": 2.0, "blocks": b"abcd", **changes}), 4)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("run_id", b"short", "bad_run_id"),
        ("layout", b"", "bad_layout"),
        ("exchange_id", b"x" * 17, "bad_exchange_id"),
        ("fragments", 0, "bad_fragments"),
        ("fragments", 1 << 30, "bad_fragments"),
        ("patience_s", math.nan, "bad_patience_s"),
        ("patience_s", -1.0, "bad_patience_s"),
        ("patience_s", math.inf, "bad_patience_s"),
    ],
)
def test_a_bad_field_is_named(field: str, value: object, reason: str) -> None:
    message = wire.encode(OFFER)
    setattr(message.offer, field, value)
    with pytest.raises(PeerMisbehaved) as fault:
        wire.decode(message)
    assert fault.value.reason == reason


def test_a_wait_of_days_arrives_as_a_day() -> None:
    """A quarantine of 512 phases, or a debt of many phases, is no fault of who says so."""
    long = wire.Refusal(wire.Code.BUSY, 1e6)
    assert wire.decode(wire.encode(long)) == wire.Refusal(wire.Code.BUSY, wire.MAX_WAIT_S)
    offer = wire.decode(wire.encode(replace(OFFER, patience_s=1e6)))
    assert isinstance(offer, wire.Offer) and offer.patience_s == wire.MAX_WAIT_S


def test_an_unknown_refusal_is_still_a_no() -> None:
    message = pb.SwapFrame(refusal=pb.Refusal(code=99))  # type: ignore[arg-type]
    assert wire.decode(message) == wire.Refusal(wire.Code.BUSY)


def test_unknown_fields_of_a_newer_node_are_passed_over() -> None:
    message = wire.encode(wire.Ack(5, 0.5)).SerializeToString() + b"\xfa\x7f\x01a"
    assert wire.decode(pb.SwapFrame.FromString(message)) == wire.Ack(5, 0.5)


@pytest.mark.parametrize("part", ["3200", "32000a0012001a00", "2a020801", "7b7c"])
def test_a_frame_of_very_many_fields_is_refused_before_it_is_read(part: str) -> None:
    """It took a second, and a partner may send one after the other."""
    many = bytes.fromhex(part) * (wire.MAX_FRAME_BYTES // len(bytes.fromhex(part)))
    for frame in (many, b"\x2a" + varint.to_bytes(len(many)) + many):
        with pytest.raises(PeerMisbehaved):
            wire.from_bytes(frame)


def test_a_sign_of_life_of_many_parts_of_many_fields_is_refused() -> None:
    """Of a MiB it took 0.15 s to count them, and a partner may send a hundred at once."""
    part = bytes.fromhex("0801") * varint.MOST_FIELDS
    with pytest.raises(PeerMisbehaved):
        wire.from_bytes((b"\x42" + varint.to_bytes(len(part)) + part) * 500)


def test_a_frame_may_have_a_field_that_only_a_newer_node_knows() -> None:
    newer = wire.encode(wire.Ack(5, 0.5)).SerializeToString() + b"\xfa\x7f\xff\xff\x03" + b"\x07" * 0xFFFF
    assert wire.from_bytes(newer) == wire.Ack(5, 0.5)


@given(st.binary(max_size=200))
def test_garbage_is_an_error_of_ours_or_a_frame(data: bytes) -> None:
    for kind, decode in (
        (pb.SwapFrame, wire.decode),
        (pb.StateFrame, wire.decode_state),
        (pb.StateRequest, wire.decode_state_request),
        (pb.SampleRequest, wire.decode_sample_request),
        (pb.StateSample, lambda sample: wire.decode_sample(sample, 4)),
    ):
        try:
            message = kind.FromString(data)
        except DecodeError:
            continue
        try:
            decode(message)
        except PeerMisbehaved as fault:
            assert fault.reason
