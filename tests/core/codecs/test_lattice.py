"""Lattice codes: opposite to the bit whatever is missed, right within the stated bound, safe against any bytes."""

import copy
import itertools
import tracemalloc
from contextlib import suppress
from types import MethodType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.core.codecs import lattice, lattice_ranges
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, Received
from noloco_node.core.codecs.lattice import Lattice, LatticeConversation
from noloco_node.core.kernels import reference, tables
from noloco_node.errors import NonFinite, PeerFault, PeerMisbehaved

ID = bytes(range(16))
SIZES = [0, 1, 255, 256, 257, 5000]
BITS = range(2, 9)


def noise(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def converse(
    pair: tuple[Tensor, Tensor], codecs: tuple[Lattice, Lattice], moved: float | None = None, exchange_id: bytes = ID
) -> tuple[LatticeConversation, LatticeConversation]:
    hints = [None if moved is None else torch.full((-(-len(u) // BLOCK),), moved) for u in pair]
    one, other = (c.converse(u, 0, exchange_id, h) for c, u, h in zip(codecs, pair, hints, strict=True))
    return one, other


def talk(one: LatticeConversation, other: LatticeConversation) -> tuple[Tensor, Tensor, int]:
    """Both corrections, and how often each side spoke."""
    say, reply, turns = one.open(), other.open(), 1
    while True:
        received, answered = one.receive(reply), other.receive(say)
        assert (received.reply is None) == (answered.reply is None), "both say the same number of turns"
        if received.reply is None or answered.reply is None:
            assert received.correction is not None and answered.correction is not None
            one.learn(), other.learn()
            return received.correction, answered.correction, turns
        say, reply, turns = received.reply, answered.reply, turns + 1


def opposite(a: Tensor, b: Tensor) -> bool:
    """To the bit; x − x is +0 on both sides."""
    return a.dtype == torch.float32 and torch.equal((a + 0.0).view(torch.int32), (0.0 - b).view(torch.int32))


def steps(conversation: LatticeConversation, bits: int, size: int) -> Tensor:
    """The step of each element."""
    step = torch.from_numpy(lattice_ranges.value_of(conversation._agreed)) * 2.0 ** (1 - bits)
    return step.repeat_interleave(BLOCK)[:size]


def within_bound(c: Tensor, pair: tuple[Tensor, Tensor], step: Tensor) -> bool:
    """1.5 steps in every element that neither side must clamp."""
    off = 2 * c.double() - (pair[1].double() - pair[0].double())
    fits = torch.maximum(pair[0].abs(), pair[1].abs()) < 2**21 * step
    return bool((off.abs() <= 1.5 * step)[fits].all())


# ---- what every pair may rely on ----
@settings(max_examples=200)
@given(
    size=st.sampled_from(SIZES),
    bits=st.sampled_from(BITS),
    scale=st.sampled_from([0.0, 1e-45, 1e-40, 1e-30, 1e-3, 1.0, 1e6, 1e30]),
    apart=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 100.0]),
    moved=st.sampled_from([None, 0.0, 1e-3]),
    seed=st.integers(0, 2**30),
)
def test_opposite_to_the_bit_and_right_for_any_two_vectors(  # noqa: PLR0917 - drawn by name
    size: int, bits: int, scale: float, apart: float, moved: float | None, seed: int
) -> None:
    a = noise(size, seed) * scale
    b = a + noise(size, seed + 1) * (scale * apart)
    if seed % 2:
        b[::300] += 50 * scale
    one, other = converse((a, b), (Lattice(bits), Lattice(bits)), None if moved is None else moved * scale)
    try:
        c, back, turns = talk(one, other)
    except PeerFault as fault:
        assert fault.reason == "diverged" and apart >= 0.1
        return
    assert c.shape == (size,) and 2 <= turns <= 5
    assert opposite(c, back)
    assert within_bound(c, (a, b), steps(one, bits, size))
    assert one.stats.missed == other.stats.missed


weights = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)


@settings(max_examples=100)
@given(pairs=st.lists(st.tuples(weights, weights), max_size=600), bits=st.sampled_from(BITS))
def test_opposite_for_vectors_without_any_likeness(pairs: list[tuple[float, float]], bits: int) -> None:
    a, b = torch.tensor([x for x, _ in pairs]), torch.tensor([x for _, x in pairs])
    c, back, _ = talk(*converse((a, b), (Lattice(bits), Lattice(bits))))
    assert opposite(c, back)


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_millions_of_elements(bits: int) -> None:
    size = (2 << 20) + 77
    a = noise(size, 0) * 0.05
    b = a + noise(size, 1) * 1e-3
    b[:: 300 * BLOCK] += 0.5
    one, other = converse((a, b), (Lattice(bits), Lattice(bits)), 3e-3)
    c, back, _ = talk(one, other)
    assert opposite(c, back)
    assert within_bound(c, (a, b), steps(one, bits, size))


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-20])
def test_two_equal_vectors_need_no_correction(value: float) -> None:
    a = torch.full((1000,), value)
    c, _, turns = talk(*converse((a, a.clone()), (Lattice(), Lattice()), 0.0))
    assert turns == 2
    assert not c.any()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_side_on_other_kernels_makes_no_difference(bits: int) -> None:
    a = noise(3000, 5)
    pair = a, a + 0.01 * noise(3000, 6)
    pair[1][700] += 3
    fused = talk(*converse(pair, (Lattice(bits), Lattice(bits)), 0.01))
    one, other = converse(pair, (Lattice(bits), Lattice(bits)), 0.01)
    other._kernels = reference
    mixed = talk(one, other)
    assert torch.equal(fused[0], mixed[0]) and torch.equal(fused[1], mixed[1]) and fused[2] == mixed[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_one_side_on_cuda_and_the_other_on_the_cpu(bits: int) -> None:
    a = noise(3000, 5)
    b = a + 0.01 * noise(3000, 6)
    b[700] += 3
    c, back, _ = talk(*converse((a.cuda(), b), (Lattice(bits), Lattice(bits)), 0.01))
    assert opposite(c.cpu(), back)
    assert torch.equal(c.cpu(), talk(*converse((a, b), (Lattice(bits), Lattice(bits)), 0.01))[0])


def test_what_does_not_fit_a_partners_tiny_range_is_clamped_alike_on_both_sides() -> None:
    a, b = torch.full((300,), 1e-9), torch.full((300,), -5.0)
    one, other = converse((a, b), (Lattice(), Lattice()), 1e-12)
    c, back, _ = talk(one, other)
    assert opposite(c, back)
    assert ((c < 0) & (2 * c > -5.0)).all(), "towards each other, not all the way"


# ---- blocks out of range ----
def heavy(size: int, seed: int) -> Tensor:
    """Differences with tails: many blocks have one element far out, some have more."""
    flat = torch.rand(size, generator=torch.Generator().manual_seed(seed)).clamp(1e-6, 1 - 1e-6)
    return torch.distributions.Laplace(0.0, 1.0).icdf(flat)


def mended(one: LatticeConversation, told: bytes) -> int:
    """How many blocks this side mends when it hears these codes."""
    before = lattice._missed
    found: list[int] = []

    def counted(*arguments: object) -> np.ndarray:
        missed = before(*arguments)  # type: ignore[arg-type]
        found.append(len(missed))
        return missed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice, "_missed", counted)
        one.receive(told)
    return found[0] - one.stats.missed


def test_the_one_element_that_is_a_little_out_of_range_is_found_by_the_checksum() -> None:
    codecs, size = (Lattice(), Lattice()), 2000 * BLOCK
    for meeting in range(8):  # until ranges are as narrow as they get
        a = 0.05 * noise(size, meeting)
        b = a + 1e-3 * heavy(size, 100 + meeting)
        one, other = converse((a, b), codecs, 3e-3, bytes([meeting]))
        c, back, _ = talk(one, other)
    assert opposite(c, back)
    assert one._energy.tolist() == other._energy.tolist()
    assert one.stats.missed == other.stats.missed <= 0.03 * 2000
    error = (2 * c.double() - (b.double() - a.double())).norm() / (b.double() - a.double()).norm()
    assert error < 0.30, "0.32 to 0.37 with ranges in which every element lies"
    wrong = (2 * c.double() - (b.double() - a.double())).abs() > 1.5 * steps(one, 4, size)
    assert wrong.view(-1, BLOCK).any(1).sum() <= 1, "three that look like one"
    one, other = converse((a, b), codecs, 3e-3, bytes([99]))
    codes = one.receive(other.open()).reply if one.open() else None
    theirs = other.receive(one._wish.pack()).reply
    assert codes is not None and theirs is not None
    assert mended(one, theirs) == mended(other, codes) > 100


def test_a_block_that_is_all_over_the_place_is_never_mended() -> None:
    size = 2000 * BLOCK
    a = 0.05 * noise(size, 0)
    b = a + 1e-3 * noise(size, 1)
    b[: 100 * BLOCK] = 5 * noise(100 * BLOCK, 2)
    one, other = converse((a, b), (Lattice(), Lattice()), 3e-3)
    c, back, turns = talk(one, other)
    assert 4 <= turns <= 5 and one.stats.missed >= 100
    assert opposite(c, back)
    assert within_bound(c, (a, b), steps(one, 4, size))


def test_a_checksum_names_one_element_and_never_two() -> None:
    w = tables.WEIGHTS.astype(np.int64)
    assert np.count_nonzero(tables.SPOTS) == 2 * BLOCK
    for up in (1, -1):
        assert (tables.SPOTS[(up * w) & 0xFFFF] == up * np.arange(1, BLOCK + 1)).all()
    for signs in itertools.product((1, -1), repeat=2):
        assert not tables.SPOTS[(signs[0] * w[:, None] + signs[1] * w) & 0xFFFF].any()


def test_a_block_out_of_range_is_sent_again_and_right() -> None:
    a = noise(64 * BLOCK, 0)
    b = a + 1e-3 * noise(64 * BLOCK, 1)
    b[5 * BLOCK + 3] += 0.4  # 8 more bits tell that
    b[9 * BLOCK] -= 40.0  # only the whole of k tells that
    one, other = converse((a, b), (Lattice(), Lattice()), 3e-3)
    c, back, turns = talk(one, other)
    assert turns == 4
    assert one.stats.missed == other.stats.missed == 2
    assert opposite(c, back)
    assert within_bound(c, (a, b), steps(one, 4, len(a)))


def test_where_most_blocks_miss_the_replicas_have_diverged() -> None:
    a, b = noise(100 * BLOCK, 0), 1000 * noise(100 * BLOCK, 1)
    one, other = converse((a, b), (Lattice(), Lattice()), 1e-6)
    ours, theirs = one.receive(other.open() if one.open() else b""), None
    theirs = other.receive(one._wish.pack())
    assert ours.reply is not None and theirs.reply is not None
    for side, payload in ((one, theirs.reply), (other, ours.reply)):
        with pytest.raises(PeerFault, match="diverged"):
            side.receive(payload)


def test_a_miss_that_the_checksum_lets_through_is_found_by_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    a = noise(40 * BLOCK, 0)
    b = a + 1e-3 * noise(40 * BLOCK, 1)
    b[5] += 1.0
    monkeypatch.setattr(lattice, "_missed", lambda *_: np.empty(0, np.int64))
    one, other = converse((a, b), (Lattice(), Lattice()), 3e-3)
    c, back, turns = talk(one, other)
    assert turns == 3, "ranges, codes, and the fragment whole"
    assert opposite(c, back)
    assert within_bound(c, (a, b), steps(one, 4, len(a)))


def test_the_digest_that_never_holds_is_misbehaviour() -> None:
    one, other = converse((noise(600, 0), noise(600, 0)), (Lattice(), Lattice()), 1e-3)
    first, reply = one.open(), other.open()
    codes = one.receive(reply).reply
    answer = other.receive(first).reply
    assert codes is not None and answer is not None
    forged = answer[:-1] + bytes([answer[-1] ^ 1])
    whole = one.receive(forged).reply
    assert whole is not None
    with pytest.raises(PeerMisbehaved, match="bad_digest"):
        one.receive(whole)


# ---- ranges ----
@pytest.mark.parametrize("distance", [0.05, 1.0, 20.0])
def test_ranges_find_the_distance_between_partners(distance: float) -> None:
    """Blocks that move differently, and a guess that is wrong by 20 either way."""
    codecs = Lattice(), Lattice()
    blocks = 600
    width = torch.logspace(-1, 1, blocks)[torch.randperm(blocks, generator=torch.Generator().manual_seed(0))]
    for meeting in range(12):
        a = 0.05 * noise(blocks * BLOCK, meeting)
        b = a + 1e-4 * noise(blocks * BLOCK, 100 + meeting) * width.repeat_interleave(BLOCK)
        one, other = converse((a, b), codecs, 3e-4 / distance, bytes([meeting]))
        c, _, _ = talk(one, other)
        error = (2 * c.double() - (b.double() - a.double())).norm() / (b.double() - a.double()).norm()
    assert one.stats.missed_share <= 0.03
    assert error <= 0.30
    assert one.stats.relative_error == pytest.approx(float(error), rel=0.2), "as the elements in full tell"


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.32), (6, 0.09), (8, 0.03)])
def test_meeting_again_and_again_few_blocks_miss_and_the_error_falls_with_the_bits(bits: int, bound: float) -> None:
    codecs, size = (Lattice(bits), Lattice(bits)), 64 * BLOCK
    for meeting in range(4):
        a = 0.05 * noise(size, meeting)
        one, other = converse((a, a + 5e-4 * noise(size, 100 + meeting)), codecs, exchange_id=bytes([meeting]))
        talk(one, other)
    assert one.stats.relative_error < bound
    assert one.stats.missed_share <= 0.05
    assert one.stats.sent_bytes / size < bits / 8 + 0.1


def test_a_partner_cannot_widen_ranges_beyond_64_times_our_wish() -> None:
    one, other = converse((noise(5000, 0), noise(5000, 0)), (Lattice(), Lattice()), 1e-3)
    one.open()
    mine, theirs = (
        one._wish,
        other._memory.wish(
            np.full(20, 127 << 23, np.int32), None, np.full_like(one._wish.sample, 9e9), one._wish.where
        ),
    )
    agreed = lattice_ranges.agree(
        mine, lattice_ranges.RangeWish(theirs.codes + 300, lattice_ranges.WIDEST, theirs.sample, mine.where)
    )
    assert (agreed <= mine.codes + lattice_ranges.CAP).all()


def test_both_sides_agree_on_the_same_ranges() -> None:
    one, other = converse((noise(5000, 0), noise(5000, 1)), (Lattice(), Lattice()), 0.3)
    one.open(), other.open()
    assert (lattice_ranges.agree(one._wish, other._wish) == lattice_ranges.agree(other._wish, one._wish)).all()


@pytest.mark.parametrize("moved", [None, torch.zeros(20)])
def test_wishes_leave_room_for_every_weight(moved: Tensor | None) -> None:
    """|k| below 2^21 after the largest shift down, whatever the hint."""
    u = noise(20 * BLOCK, 0) * torch.logspace(-20, 20, 20).repeat_interleave(BLOCK)
    for bits in BITS:
        peaks = reference.peaks(u.view(-1, BLOCK)).numpy()
        hint = None if moved is None else moved.numpy()
        wish = lattice_ranges.RangeMemory(20, bits).wish(peaks, hint, np.empty(0, np.float32), np.empty(0, np.int64))
        step = lattice_ranges.value_of(wish.codes - lattice_ranges.DOWN) * 2.0 ** (1 - bits)
        assert (u.view(-1, BLOCK).abs().amax(1).numpy() / step < 2**21).all()


def test_ranges_are_the_smallest_floats_with_two_more_bits_that_are_not_below() -> None:
    x = torch.rand(1000).numpy() + np.float32(0.5)
    values = lattice_ranges.value_of(lattice_ranges.code_of(x))
    assert (values >= x).all() and (values <= x * 1.25).all()
    assert set(values * 8) <= {4, 5, 6, 7, 8, 10, 12}


def test_each_fragment_has_a_memory_of_one_byte_a_block() -> None:
    codecs = Lattice(), Lattice()
    for index in range(2):
        talk(*(c.converse(noise(5000, 0), index, ID) for c in codecs))
    memories = codecs[0]._memories
    assert [memory._profile.nbytes for memory in memories.values() if memory._profile is not None] == [20, 20]


def test_a_fragment_of_another_size_begins_without_memory() -> None:
    one = Lattice()
    one.converse(noise(5000, 0), 0, ID)
    before = one._memories[0]
    one.converse(noise(300, 0), 0, ID)
    assert one._memories[0] is not before and one._memories[0].blocks == 2


# ---- what is not allowed ----
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 2.0**110])
def test_our_own_vector_is_not_sent_when_it_is_not_finite(poison: float) -> None:
    u = noise(700, 0)
    u[650] = poison
    with pytest.raises(NonFinite):
        Lattice().converse(u, 0, ID).open()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_elements_in_full_that_are_not_finite_are_refused(poison: float) -> None:
    one, other = converse((noise(700, 0), noise(700, 1)), (Lattice(), Lattice()))
    one.open(), other.open()
    other._wish.sample[3] = poison
    with pytest.raises(PeerMisbehaved, match="nonfinite"):
        one.receive(other._wish.pack())


@pytest.mark.parametrize(
    "header", [b"\x00\x00\x20", b"\xff\xff\x20", b"\x8d\x03\x20", b"\xe0\x01\x00", b"\xe0\x01\xff"]
)
def test_ranges_beyond_all_bounds_are_refused(header: bytes) -> None:
    one, other = converse((noise(700, 0), noise(700, 1)), (Lattice(), Lattice()))
    one.open()
    with pytest.raises(PeerMisbehaved, match="bad_range"):
        one.receive(header + other.open()[3:])


@pytest.mark.parametrize("parameter", ["1", "9", "0", "-4", "four", "4.0", "44444"])
def test_other_widths_are_refused_by_name(parameter: str) -> None:
    with pytest.raises(ValueError, match="2 to 8 bits"):
        codec(f"lattice:{parameter}")


def test_four_bits_are_the_default() -> None:
    assert codec("lattice").name == codec("lattice:4").name == "lattice:4"


def test_after_the_end_nothing_is_accepted() -> None:
    one, other = converse((noise(700, 0), noise(700, 0)), (Lattice(), Lattice()))
    talk(one, other)
    with pytest.raises(PeerMisbehaved, match="too_much"):
        one.receive(b"")


def test_half_a_byte_and_all_that_goes_with_it() -> None:
    a = noise(1 << 20, 0)
    one, other = converse((a, a + 1e-3 * noise(1 << 20, 1)), (Lattice(), Lattice()), 2e-3)
    talk(one, other)
    assert one.stats.sent_bytes == other.stats.sent_bytes
    assert one.stats.sent_bytes / (1 << 20) <= 0.55


# ---- any bytes at all ----
def at_each_turn() -> list[tuple[LatticeConversation, bytes]]:
    """A conversation of two blocks at every turn it can be at, with the payload that it waits for."""
    a = noise(300, 0)
    b = a + 1e-3 * noise(300, 1)
    b[7] += 40
    one, other = converse((a, b), (Lattice(), Lattice()), 3e-3)
    say, reply = one.open(), other.open()
    found = []
    while True:
        found.append((frozen(one), reply))
        received, answered = one.receive(reply), other.receive(say)
        if received.reply is None or answered.reply is None:
            return found
        say, reply = received.reply, answered.reply


def frozen(conversation: LatticeConversation) -> LatticeConversation:
    """As it is now, whatever becomes of it."""
    twin = copy.copy(conversation)
    twin.stats, twin._memory = copy.copy(conversation.stats), copy.copy(conversation._memory)
    for name in ("_c", "_their_sums", "_energy"):
        if name in vars(conversation):
            value = vars(conversation)[name]
            setattr(twin, name, value.clone() if isinstance(value, Tensor) else value.copy())
    twin._turn = MethodType(conversation._turn.__func__, twin)  # type: ignore[attr-defined]
    return twin


def mutated(payload: bytes, random: np.random.Generator) -> bytes:
    data = bytearray(payload)
    match random.integers(5):
        case 0:
            return random.bytes(len(payload))
        case 1:
            return bytes(data[: random.integers(len(data) + 1)])
        case 2:
            return payload + random.bytes(random.integers(1, 40))
        case _:
            for _ in range(random.integers(1, 6)):
                data[random.integers(len(data))] = random.integers(256)
    return bytes(data)


def allowed(received: Received) -> bool:
    """More to say, or a finite correction."""
    return received.reply is not None or (
        received.correction is not None and bool(received.correction.isfinite().all())
    )


@pytest.mark.parametrize("payloads", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_and_mutated_payloads(payloads: int) -> None:
    random = np.random.default_rng(0)
    turns = at_each_turn()
    assert len(turns) == 4, "ranges, codes, missed, whole"
    refused = dict.fromkeys(("bad_length", "bad_range", "nonfinite"), 0)
    for _ in range(payloads // 4):
        for conversation, payload in turns:
            try:
                assert allowed(frozen(conversation).receive(mutated(payload, random)))
            except PeerMisbehaved as fault:
                refused[fault.reason] += 1
    assert all(refused.values()), refused


@pytest.mark.parametrize("bits", BITS)
def test_what_was_accepted_breaks_nothing_in_a_later_turn(bits: int) -> None:
    random = np.random.default_rng(bits)
    a = 0.05 * noise(5 * BLOCK + 7, 0)
    b = a + 1e-3 * noise(len(a), 1)
    b[:BLOCK] += 2.0
    for _ in range(250):
        one, other = converse((a, b), (Lattice(bits), Lattice(bits)), 1e-3)
        say, reply = one.open(), other.open()
        with suppress(PeerFault):
            while say is not None and reply is not None:
                received = one.receive(mutated(reply, random) if random.random() < 0.5 else reply)
                assert allowed(received)
                say, reply = received.reply, other.receive(say).reply


def test_a_huge_payload_is_refused_before_anything_is_made_of_it() -> None:
    huge = bytes(64 << 20)
    for conversation, _ in at_each_turn():
        tracemalloc.start()
        with pytest.raises(PeerMisbehaved, match="bad_length"):
            conversation.receive(huge)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20
