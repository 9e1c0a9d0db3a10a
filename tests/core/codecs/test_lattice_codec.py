"""Lattice codes and int8 through the conversation that the daemon holds: opposite to the bit, bounded, unbreakable."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, carry
from noloco_node.core.kernels import for_device, reference
from noloco_node.errors import NonFinite, PeerFault

NAMES = ["int8", *(f"lattice:{bits}" for bits in range(2, 9))]


def pair(size: int, scale: float, apart: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    u = torch.randn(size, generator=chance) * scale
    return u, u + torch.randn(size, generator=chance) * (scale * apart)


def moved(size: int, by: float) -> torch.Tensor:
    return torch.full((-(-size // BLOCK),), by)


@settings(max_examples=60)
@given(
    st.sampled_from(NAMES),
    st.sampled_from([0, 1, 255, 256, 257, 3000]),
    st.sampled_from([0.0, 1e-40, 1e-30, 1e-3, 1.0, 1e30]),
    st.sampled_from([0.0, 1e-4, 0.01, 3.0]),
    st.integers(0, 1000),
)
def test_corrections_are_opposite_to_the_bit(name: str, size: int, scale: float, apart: float, seed: int) -> None:
    u, v = pair(size, scale, apart, seed)
    talks = [codec(name).converse(x, 0, bytes(16), moved(size, scale * apart)) for x in (u, v)]
    try:
        c, opposite = carry(*talks)
    except PeerFault as fault:
        assert fault.reason == "diverged"
        return
    assert c.dtype == torch.float32
    assert torch.equal(c, -opposite)
    assert c.isfinite().all()


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_meeting_again_and_again_few_blocks_miss_and_the_error_falls_with_the_bits(bits: int) -> None:
    bound = {4: 0.32, 6: 0.09, 8: 0.03}[bits]
    one, other = codec(f"lattice:{bits}"), codec(f"lattice:{bits}")
    for meeting in range(4):
        u, v = pair(64 * BLOCK, 0.05, 0.01, meeting)
        talks = one.converse(u, 0, bytes([meeting]) * 16), other.converse(v, 0, bytes([meeting]) * 16)
        c, _ = carry(*talks)
    difference = v - u
    error = float((2 * c - difference).norm() / difference.norm())
    assert error < bound
    assert talks[0].stats.missed_share <= 0.05
    assert talks[0].stats.relative_error == pytest.approx(error, rel=0.5), "what is reported is what it is"
    assert talks[0].stats.sent_bytes / u.numel() < bits / 8 + 0.1


def test_a_block_far_out_of_range_is_noticed_and_sent_exactly() -> None:
    u, v = pair(100 * BLOCK, 0.05, 0.002, 1)
    v[5 * BLOCK : 6 * BLOCK] += 7.0
    v[70 * BLOCK] -= 3.0
    one, other = (codec("lattice:4").converse(x, 0, bytes(16), moved(u.numel(), 1e-4)) for x in (u, v))
    c, opposite = carry(one, other)
    assert torch.equal(c, -opposite)
    assert one.stats.missed >= 2
    assert (2 * c - (v - u)).abs().max() < 0.01


def test_a_vector_that_is_not_finite_is_not_sent() -> None:
    for name in NAMES:
        for bad in (float("nan"), float("inf")):
            u = torch.zeros(300)
            u[299] = bad
            with pytest.raises(NonFinite):
                codec(name).converse(u, 0, bytes(16)).open()


def test_replicas_that_lost_each_other_end_as_diverged() -> None:
    u, v = pair(200 * BLOCK, 0.05, 0.001, 1)
    one, other = (codec("lattice:4") for _ in range(2))
    carry(*(c.converse(x, 0, bytes(16), moved(u.numel(), 1e-4)) for c, x in ((one, u), (other, v))))
    with pytest.raises(PeerFault, match="diverged"):
        carry(*(c.converse(x, 0, b"1" * 16, moved(u.numel(), 1e-4)) for c, x in ((one, u), (other, v + 50))))


@pytest.mark.parametrize("name", NAMES)
def test_no_payload_breaks_it(name: str) -> None:
    """Mutated, cut and random payloads at each turn: an error of ours, or finite corrections."""
    rng = random.Random(NAMES.index(name))
    u, v = pair(5 * BLOCK + 7, 0.05, 0.02, 3)
    v[:BLOCK] += 2.0
    for _ in range(250):
        one, other = (codec(name).converse(x, 0, bytes(16), moved(u.numel(), 1e-3)) for x in (u, v))
        mine, theirs = one.open(), other.open()
        try:
            for _turn in range(6):
                if rng.random() < 0.5:
                    theirs = _spoiled(theirs, rng)
                received, answer = one.receive(theirs), other.receive(mine)
                if received.correction is not None:
                    assert received.correction.isfinite().all()
                    assert received.correction.shape == u.shape
                    break
                if received.reply is None or answer.reply is None:
                    break
                mine, theirs = received.reply, answer.reply
        except PeerFault as fault:
            assert fault.reason


def _spoiled(payload: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(len(payload))
    if kind == 1:
        return payload[: rng.randrange(len(payload) + 1)]
    if kind == 2:
        return payload + rng.randbytes(rng.randrange(1, 40))
    changed = bytearray(payload)
    for _ in range(rng.randrange(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_the_compiled_kernels_are_the_reference_bit_for_bit() -> None:
    compiled = for_device("cpu")
    assert compiled.NAME == "numba"
    u, _ = pair(33 * BLOCK, 0.05, 0.0, 9)
    assert torch.equal(compiled.peaks(u.view(-1, BLOCK)), reference.peaks(u.view(-1, BLOCK)))
