"""The codecs: corrections are opposite to the bit, and what a partner sends is checked before it is used."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.core import outer
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import CodecStats, Conversation, Payload, Received, carry
from noloco_node.errors import NonFinite, PeerMisbehaved

ID = bytes(16)
NAMES = ["fp32", "bf16"]
BYTES = {"fp32": 4, "bf16": 2}

weights = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)


def talk(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partners tell each other one fragment, turn by turn, as a swap does."""
    return carry(codec(name).converse(a, 0, ID), codec(name).converse(b, 0, ID))


def vectors(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])


def bits(x: Tensor) -> Tensor:
    """Without the sign of zero: x − x is +0 on both sides."""
    return (x + 0.0).view(torch.int32)


@pytest.mark.parametrize("name", NAMES)
@given(pairs=st.lists(st.tuples(weights, weights), max_size=300))
def test_corrections_are_opposite_for_any_two_vectors(name: str, pairs: list[tuple[float, float]]) -> None:
    c_a, c_b = talk(name, *vectors(pairs))
    assert c_a.dtype == torch.float32 and c_a.shape == (len(pairs),)
    assert torch.equal(bits(c_a), bits(-c_b))


@given(pairs=st.lists(st.tuples(weights, weights), max_size=300))
def test_fp32_is_the_outer_steps_own_correction(pairs: list[tuple[float, float]]) -> None:
    a, b = vectors(pairs)
    assert torch.equal(talk("fp32", a, b)[0], outer.correction(a, b))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-10, 1.0, 1e30])
def test_close_to_the_true_difference_at_every_scale(name: str, scale: float) -> None:
    a = torch.tensor([1.0, -2.0, 3.0, 0.0]) * scale
    b = torch.tensor([2.0, 2.0, -1.0, 4.0]) * scale
    wanted = (b.double() - a.double()) / 2
    allowed = 2**-7 * (a.abs() + b.abs()).double() + 1e-40  # bf16 keeps 8 bits; its smallest step is 9e-41
    assert ((talk(name, a, b)[0].double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("name", [*NAMES, "int8", "lattice:4"])
def test_the_snapshot_is_left_as_it_was(name: str) -> None:
    a, b = torch.randn(257), torch.randn(257)
    before = a.clone()
    talk(name, a, b)
    assert torch.equal(a, before)


def opened(name: str, size: int) -> Conversation:
    conversation = codec(name).converse(torch.ones(size), 3, ID)
    conversation.open()
    return conversation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("off_by", [-4, -1, 1, 2, 4, 1 << 20])
def test_a_payload_of_another_length_is_refused(name: str, off_by: int) -> None:
    payload = bytes(64 * BYTES[name] + off_by)
    with pytest.raises(PeerMisbehaved, match="bad_length"):
        opened(name, 64).receive(payload)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, poison: float) -> None:
    theirs = torch.ones(64, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[name])
    theirs[63] = poison
    with pytest.raises(PeerMisbehaved, match="nonfinite"):
        opened(name, 64).receive(theirs.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("name", NAMES)
@given(payload=st.binary(min_size=64, max_size=64))
def test_random_bytes_are_a_finite_correction_or_misbehaviour(name: str, payload: bytes) -> None:
    try:
        received = opened(name, 64 // BYTES[name]).receive(payload)
    except PeerMisbehaved as fault:
        assert fault.reason == "nonfinite"
    else:
        assert received.correction is not None and received.correction.isfinite().all()


@pytest.mark.parametrize(("name", "value"), [("fp32", math.nan), ("bf16", math.inf), ("bf16", 3.4e38)])
def test_our_own_vector_is_not_sent_when_it_is_not_finite_in_code(name: str, value: float) -> None:
    with pytest.raises(NonFinite):
        codec(name).converse(torch.tensor([0.0, value]), 0, ID).open()


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_payload_costs_what_it_says(name: str) -> None:
    assert len(codec(name).converse(torch.zeros(1000), 0, ID).open()) == 1000 * BYTES[name]


@pytest.mark.parametrize("name", ["", "fp64", "FP32", "fp32:8"])
def test_an_unknown_codec_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="codec") as error:
        codec(name)
    assert repr(name) in str(error.value)


def test_each_node_gets_a_codec_of_its_own() -> None:
    assert all(codec(name) is not codec(name) for name in NAMES)


class Slow:
    """Says hello as often as `greetings` says, then its number."""

    stats = CodecStats()

    def __init__(self, number: int, greetings: int = 1) -> None:
        self.number, self.left = number, greetings

    def open(self) -> bytes:
        return b"hello"

    def receive(self, payload: Payload) -> Received:
        self.left -= 1
        if self.left >= 0:
            return Received(bytes([self.number]), None)
        return Received(None, torch.tensor([payload[0] - self.number]))


def test_a_conversation_of_several_turns_is_carried_to_its_end() -> None:
    mine, theirs = carry(Slow(3), Slow(5))
    assert (int(mine), int(theirs)) == (2, -2)


def test_two_ends_that_do_not_agree_on_the_turns_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="how many turns"):
        carry(Slow(3), Slow(5, greetings=2))
