"""int8: one byte an element, opposite to the bit, right within half a step of both blocks' scales."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.core.codecs.codec import BLOCK
from noloco_node.core.codecs.int8 import HIGHEST, LOWEST, Int8Conversation
from noloco_node.errors import NonFinite, PeerMisbehaved

weights = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)


def opened(u: Tensor) -> tuple[Int8Conversation, bytes]:
    conversation = Int8Conversation(u)
    return conversation, conversation.open()


def talk(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    (one, say), (other, reply) = opened(a), opened(b)
    mine, theirs = one.receive(reply), other.receive(say)
    assert mine.reply is None and theirs.reply is None
    assert mine.correction is not None and theirs.correction is not None
    return mine.correction, theirs.correction


def close_enough(c: Tensor, a: Tensor, b: Tensor) -> bool:
    """A step is at most 1/64 of a block's largest element; rounding costs half of one, the clamp at 127 a whole one."""
    peaks = [torch.nn.functional.pad(x.abs(), (0, -len(x) % BLOCK)).view(-1, BLOCK).amax(1).double() for x in (a, b)]
    allowed = (peaks[0] + peaks[1]) / 64 + 2.0**LOWEST
    return bool(
        ((2 * c.double() - (b.double() - a.double())).abs() <= allowed.repeat_interleave(BLOCK)[: len(a)]).all()
    )


@settings(max_examples=100)
@given(pairs=st.lists(st.tuples(weights, weights), max_size=600))
def test_opposite_to_the_bit_and_close_for_any_two_vectors(pairs: list[tuple[float, float]]) -> None:
    a, b = torch.tensor([x for x, _ in pairs]), torch.tensor([x for _, x in pairs])
    c, back = talk(a, b)
    assert c.shape == a.shape
    assert torch.equal((c + 0.0).view(torch.int32), (0.0 - back).view(torch.int32))
    assert close_enough(c, a, b)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1 << 20])
def test_sizes(size: int) -> None:
    torch.manual_seed(size)
    a, b = torch.randn(size), torch.randn(size)
    c, back = talk(a, b)
    assert torch.equal((c + 0.0).view(torch.int32), (0.0 - back).view(torch.int32))
    assert close_enough(c, a, b)
    assert len(opened(a)[1]) == size + -(-size // BLOCK)


@pytest.mark.parametrize("off_by", [-301, -1, 1, 1 << 20])
def test_a_payload_of_another_length_is_refused(off_by: int) -> None:
    conversation, payload = opened(torch.ones(300))
    with pytest.raises(PeerMisbehaved, match="bad_length"):
        conversation.receive(bytes(len(payload) + off_by))


@pytest.mark.parametrize("exponent", [LOWEST - 1, HIGHEST + 1, 127, -128])
def test_scales_beyond_all_bounds_are_refused(exponent: int) -> None:
    conversation, payload = opened(torch.ones(300))
    with pytest.raises(PeerMisbehaved, match="bad_range"):
        conversation.receive(bytes([exponent & 0xFF]) + payload[1:])


@settings(max_examples=200)
@given(payload=st.binary(min_size=302, max_size=302))
def test_random_bytes_are_a_finite_correction_or_misbehaviour(payload: bytes) -> None:
    try:
        received = opened(torch.ones(300))[0].receive(payload)
    except PeerMisbehaved as fault:
        assert fault.reason == "bad_range"
    else:
        assert received.correction is not None and received.correction.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_our_own_vector_is_not_sent_when_it_is_not_finite(value: float) -> None:
    with pytest.raises(NonFinite):
        opened(torch.tensor([0.0, value]))


def test_bytes_are_counted() -> None:
    conversation, payload = opened(torch.ones(300))
    conversation.receive(payload)
    assert conversation.stats.sent_bytes == len(payload)
    assert np.frombuffer(payload, np.int8)[0] == 1 - 7, "1 is 1/2 · 2^1, and told as 64 · 2^-6"
