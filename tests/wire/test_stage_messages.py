"""Messages between stages: what is written reads back, and of anything else only PeerMisbehaved comes out."""

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.errors import PeerMisbehaved
from noloco_node.wire import stage_pb2 as pb
from noloco_node.wire.messages import Code, Refusal
from noloco_node.wire.stage_messages import MAX_EXAMPLES, MAX_FREE, MicroBatch, Part, Passed, decode, encode

micro_batches = st.builds(
    MicroBatch,
    st.integers(0, 9),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 64),
    st.integers(1, MAX_EXAMPLES),
    st.floats(0.5, 100, width=32),
    st.booleans(),
    tries=st.booleans(),
)
frames = (
    micro_batches
    | st.builds(Part, st.binary(max_size=100))
    | st.builds(Passed, st.floats(-1e9, 1e9), st.integers(0, MAX_FREE))
    | st.builds(Refusal, st.sampled_from(Code))
)


@given(frames)
def test_what_is_written_reads_back(frame) -> None:
    assert decode(pb.StageFrame.FromString(encode(frame).SerializeToString())) == frame


@given(st.binary(max_size=200))
def test_of_garbage_only_a_fault_of_the_peer_comes(data: bytes) -> None:
    with suppress(DecodeError, PeerMisbehaved):
        decode(pb.StageFrame.FromString(data))


@pytest.mark.parametrize(
    "message",
    [
        pb.StageFrame(),
        pb.StageFrame(part=bytes((1 << 17) + 1)),
        pb.StageFrame(passed=pb.Passed(loss=float("inf"))),
        pb.StageFrame(micro_batch=pb.MicroBatch(run_id=bytes(31), examples=1, deadline_s=1)),
        pb.StageFrame(micro_batch=pb.MicroBatch(run_id=bytes(32), examples=1, deadline_s=1, admission=b"x")),
        pb.StageFrame(micro_batch=pb.MicroBatch(run_id=bytes(32), examples=1, deadline_s=1, stage=65)),
    ],
)
def test_what_is_out_of_bounds_is_refused(message: pb.StageFrame) -> None:
    with pytest.raises(PeerMisbehaved):
        decode(message)
