"""Activations across a stage's boundary: sizes known beforehand, errors bounded, only finite numbers come out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.core.codecs.activations import CODECS, GROUP, SMALLEST, activation_codec
from noloco_node.errors import NonFinite, PeerMisbehaved

CPU = torch.device("cpu")
STEP = {"fp32": 0.0, "bf16": 2.0**-8, "int8": (1 + 2.0**-6) / 254}
"""The largest error: of an element's own size, for int8 of its group's largest element."""

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).flatmap(
    lambda batch: st.sampled_from([1, 3, 16, GROUP, GROUP + 1, 3 * GROUP]).map(lambda hidden: (*batch, hidden))
)


def values(shape: tuple[int, ...], seed: int, scale: float) -> Tensor:
    """Tokens, and channels in them, of very different sizes."""
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=chance) * 4
    return torch.randn(shape, generator=chance) * sizes.exp() * scale


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(CODECS)), shape=shapes, seed=st.integers(0, 999), scale=st.sampled_from([1e-20, 1, 1e20])
)
def test_any_shape_comes_back_within_the_bound_and_takes_the_bytes_that_were_announced(
    name: str, shape: tuple[int, ...], seed: int, scale: float
) -> None:
    codec, sent = activation_codec(name), values(shape, seed, scale)
    payload = codec.encode(sent)
    assert len(payload) == codec.encoded_bytes(shape)
    got = codec.decode(payload, shape, CPU)
    assert got.shape == sent.shape and got.dtype == torch.float32
    largest = sent.abs()
    if name == "int8":
        groups = [part.abs().amax(-1, keepdim=True).expand_as(part) for part in sent.split(GROUP, -1)]
        largest = torch.cat(groups, -1)
    assert ((got - sent).abs() <= largest * STEP[name] + SMALLEST).all()
    got.requires_grad_().sum().backward()


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(list(CODECS)), payload=st.binary(max_size=600))
def test_any_bytes_are_finite_values_or_misbehaviour(name: str, payload: bytes) -> None:
    codec, shape = activation_codec(name), (2, 70)
    payload = payload.ljust(codec.encoded_bytes(shape), b"\xfe")
    try:
        got = codec.decode(payload, shape, CPU)
    except PeerMisbehaved as fault:
        assert fault.reason == ("nonfinite" if len(payload) == codec.encoded_bytes(shape) else "bad_length")
    else:
        assert got.shape == shape and got.isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_a_wrong_length_is_refused_before_memory_is_taken(name: str) -> None:
    codec = activation_codec(name)
    payload = codec.encode(torch.ones(2, 3, 8))
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(PeerMisbehaved, match="bad_length"):
            codec.decode(wrong, (2, 3, 8), CPU)
    with pytest.raises(PeerMisbehaved, match="bad_length"):
        codec.decode(payload, (1 << 40, 1 << 20), CPU)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_neither_sent_nor_taken(name: str, value: float) -> None:
    codec = activation_codec(name)
    with pytest.raises(NonFinite):
        codec.encode(torch.tensor([[0.0, value]]))
    raw = torch.tensor(value, dtype=torch.float32 if name == "fp32" else torch.bfloat16).view(-1).view(torch.uint8)
    hostile = bytes(raw.tolist()) + codec.encode(torch.ones(1, 2))[len(raw) :]
    with pytest.raises(PeerMisbehaved, match="nonfinite"):
        codec.decode(hostile, (1, 2), CPU)


def test_int8_keeps_a_large_channel_from_the_others() -> None:
    sent = torch.full((1, 2 * GROUP), 1.0)
    sent[0, 0] = 1e6
    got = activation_codec("int8").decode(activation_codec("int8").encode(sent), sent.shape, CPU)
    torch.testing.assert_close(got[0, GROUP:], sent[0, GROUP:], rtol=0.01, atol=0)
    assert activation_codec("int8").encoded_bytes((4, 1024, 2048)) == 4 * 1024 * 2048 * 65 // 64


def test_halves_and_strided_values_are_sent_as_they_are() -> None:
    sent = torch.arange(12.0).view(3, 4).t()
    for name in CODECS:
        codec = activation_codec(name)
        for given_values in (sent, sent.bfloat16()):
            got = codec.decode(codec.encode(given_values), sent.shape, CPU)
            torch.testing.assert_close(got, sent, rtol=0.01, atol=0.05)


def test_an_unknown_name_names_the_others() -> None:
    with pytest.raises(ValueError, match=r"int7.*fp32, bf16, int8"):
        activation_codec("int7")
