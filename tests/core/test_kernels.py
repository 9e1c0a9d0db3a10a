"""The lattice kernels: each implementation equals the plain torch one bit for bit, and what its arithmetic promises."""

import errno
import hashlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.core.codecs.by_name import rehearse
from noloco_node.core.codecs.codec import BLOCK as CODEC_BLOCK
from noloco_node.core.kernels import BLOCK, PHASES, Grid, Kernels, cpu, for_device, reference, tables

BITS = range(2, 9)
KINDS = ["normal", "tiny", "subnormal", "huge", "constant", "zero", "mixed"]


def rows(kind: str, blocks: int, seed: int) -> Tensor:
    x = torch.randn(blocks, BLOCK, generator=torch.Generator().manual_seed(seed))
    scales = {"normal": 0.05, "tiny": 1e-30, "subnormal": 1e-41, "huge": 1e30}
    if kind in scales:
        return x * scales[kind]
    if kind == "mixed":
        return x * torch.logspace(-44, 30, BLOCK)
    return torch.full_like(x, 0.0 if kind == "zero" else float(x[0, 0]) if blocks else 1.0)


def grid(blocks: int, seed: int, octave: int) -> Grid:
    """Steps from 2^octave up, as ranges give them: two bits after the leading one."""
    random = torch.Generator().manual_seed(seed)
    quarter = torch.randint(4, 8, (blocks,), generator=random) / 4
    step = torch.ldexp(quarter, torch.tensor(octave) + torch.randint(0, 5, (blocks,), generator=random))
    return Grid(1 / step, step / 2, seed % PHASES)


def equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Bit for bit; −0 is not 0."""
    pairs = [(a, b.to(a.device)) for a, b in zip(ours, theirs, strict=True)]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def check(kernels: Kernels, device: str, pair: tuple[Tensor, Tensor], on: Grid, bits: int) -> None:
    u, v = pair
    here = [x.to(device) for x in (u, v)]
    there = Grid(on.inverse.to(device), on.half_step.to(device), on.seed)
    assert equal((kernels.peaks(here[0]),), (reference.peaks(u),))
    told = [kernels.encode(x, there, bits) for x in here]
    assert equal(told[0], reference.encode(u, on, bits))
    codes = [codes.cpu() for codes, _ in told]
    assert equal(
        kernels.decode(told[0][0], told[1][0], there.half_step, bits), reference.decode(*codes, on.half_step, bits)
    )


def check_what_is_sent_again(device: str, pair: tuple[Tensor, Tensor], on: Grid, bits: int) -> None:
    """By plain torch operations, which give the same on every device."""
    u, v = pair
    here = [x.to(device) for x in (u, v)]
    there = Grid(on.inverse.to(device), on.half_step.to(device), on.seed)
    codes, _ = reference.encode(u, on, bits)
    assert equal((reference.unpack(codes.to(device), bits),), (reference.unpack(codes, bits),))
    which = torch.arange(0, len(u), 2)
    k = reference.steps(v, on, which)
    assert equal((reference.steps(here[1], there, which.to(device)),), (k,))
    for width in (bits + 8, 24):
        low = k & (1 << width) - 1
        c, meant_c = torch.zeros_like(here[0]), torch.zeros_like(u)
        sums, energy = reference.resolve(here[0], there, which.to(device), low.to(device), width, c)
        meant_sums, meant_energy = reference.resolve(u, on, which, low, width, meant_c)
        assert equal((c, sums), (meant_c, meant_sums))
        assert torch.allclose(energy.cpu(), meant_energy, rtol=1e-12), "sums in another order"


@settings(max_examples=150)
@given(
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    blocks=st.sampled_from([0, 1, 2, 5]),
    bits=st.sampled_from(BITS),
    octave=st.sampled_from([-97, -40, -14, 0, 80]),
    seed=st.integers(0, 2**31),
)
def test_numba_equals_the_reference(kinds: tuple[str, str], blocks: int, bits: int, octave: int, seed: int) -> None:
    u, v = rows(kinds[0], blocks, seed), rows(kinds[1], blocks, seed + 1)
    check(cpu, "cpu", (u, v), grid(blocks, seed, octave), bits)


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_numba_equals_the_reference_on_a_million_close_elements(bits: int) -> None:
    u = rows("normal", 4097, 0)
    check(cpu, "cpu", (u, u + 1e-3 * rows("normal", 4097, 1)), grid(4097, 2, -18), bits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("bits", BITS)
def test_triton_equals_the_reference(bits: int) -> None:
    kernels = for_device("cuda")
    assert kernels.NAME == "triton", "Triton or a C compiler is missing here: plain torch operations are used instead"
    for kind, blocks in itertools.product(KINDS, (0, 1, 9, 1000)):
        u, v = rows(kind, blocks, blocks), rows("normal", blocks, blocks + 1)
        check(kernels, "cuda", (u, v), grid(blocks, bits, -14), bits)
        check_what_is_sent_again("cuda", (u, v), grid(blocks, bits, -14), bits)


def test_what_fits_a_device_best_is_chosen() -> None:
    assert for_device("cpu") is cpu
    assert for_device("meta") is reference


@pytest.mark.parametrize("fault", [AssertionError("no driver"), RuntimeError("no compiler"), KeyError("sm_10")])
def test_where_triton_fails_plain_torch_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    """Whatever it raises; and one line says why."""
    triton = ModuleType("noloco_node.core.kernels.cuda")

    def try_out() -> None:
        raise fault

    triton.try_out = try_out
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    monkeypatch.setattr("noloco_node.core.kernels.cuda", triton, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert for_device.__wrapped__("cuda") is reference
    (line,) = caplog.messages
    assert type(fault).__name__ in line and "slower" in line


@pytest.mark.parametrize("name", ["lattice:4", "int8", "bf16"])
def test_a_rehearsal_launches_what_a_swap_will(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    called = set()
    names = ["peaks", "encode", "decode"] if name == "lattice:4" else []
    for each in names:
        real = getattr(cpu, each)
        monkeypatch.setattr(cpu, each, lambda *a, real=real, each=each: (called.add(each), real(*a))[1])
    rehearse(name, torch.device("cpu"))
    assert called == set(names)


def test_nan_and_infinity_peak_above_every_number() -> None:
    u = torch.ones(3, BLOCK)
    u[0, 7], u[1, 8], u[2, 9] = torch.nan, -torch.inf, -3e38
    for kernels in (reference, cpu):
        peaks = kernels.peaks(u).tolist()
        assert min(peaks[:2]) >= 0x7F800000 > peaks[2]


# ---- what the arithmetic promises, on the reference that the others equal ----
@pytest.mark.parametrize("bits", BITS)
def test_differences_are_opposite_even_at_the_edge_of_the_range(bits: int) -> None:
    every = torch.arange(1 << bits, dtype=torch.int32)
    one, other = (x.reshape(-1) for x in torch.meshgrid(every, every, indexing="ij"))
    forth, back = reference.difference(other - one, bits), reference.difference(one - other, bits)
    assert torch.equal(forth, -back)
    assert forth.abs().max() == 1 << bits - 1
    assert torch.equal((one + forth) & (1 << bits) - 1, other), "the partner's code is met"


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_as_documented_and_comes_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, BLOCK), dtype=torch.int32)
    packed = reference.pack(codes, bits)
    assert packed.shape == (3, 32 * bits)
    assert torch.equal(reference.unpack(packed, bits), codes)
    width = next(width for width in (8, 4, 2) if bits & width)
    first = codes[1, 5 :: 32 * width] & (1 << width) - 1
    assert packed[1, 5] == sum(int(c) << width * i for i, c in enumerate(first))


def test_steps_are_rounded_to_the_nearest_with_dither_and_stay_small() -> None:
    u, on = rows("normal", 50, 3), grid(50, 3, -9)
    k = reference.steps(u, on, torch.arange(50))
    off = k - u.double() * on.inverse[:, None]
    assert off.abs().max() <= 1
    assert off.mean().abs() < 0.01, "dither has no bias"
    assert reference.steps(rows("huge", 2, 0), grid(2, 0, 0), torch.arange(2)).abs().max() == 2**22 - 1


def test_the_sum_of_the_partners_steps_is_ours_and_the_differences() -> None:
    u, v, on = rows("normal", 9, 1), rows("normal", 9, 2), grid(9, 1, -2)
    (mine, sums), (theirs, their_sums) = reference.encode(u, on, 8), reference.encode(v, on, 8)
    _, more, _ = reference.decode(mine, theirs, on.half_step, 8)
    assert torch.equal(sums + more, their_sums), "no element is out of range here"


def test_up_to_three_elements_off_by_one_range_never_escape_the_checksum() -> None:
    w = tables.WEIGHTS.astype(np.int64)
    assert len(set(w.tolist())) == BLOCK and (w % 2 == 1).all() and w.min() > 0 and w.max() < 1 << 15
    for signs in itertools.product((1, -1), repeat=2):  # three odd numbers never add up to an even one
        pairs = signs[0] * w[:, None] + signs[1] * w
        assert np.count_nonzero(pairs % (1 << 16) == 0) == (BLOCK if sum(signs) == 0 else 0), "only one with itself"


def test_a_block_out_of_range_escapes_the_checksum_as_rarely_as_stated() -> None:
    """2^-15 where an even number of elements is off, never where an odd number is."""
    random = np.random.default_rng(0)
    trials, escaped = 400_000, 0
    for _ in range(10):
        count = random.integers(4, 40, trials // 10)
        off = random.integers(-1, 2, (trials // 10, 40)) * (np.arange(40) < count[:, None])
        where = random.integers(0, BLOCK // 40, (trials // 10, 40)) + BLOCK // 40 * np.arange(40)
        hash_ = (off * tables.WEIGHTS.astype(np.int64)[where]).sum(1) & 0xFFFF
        escaped += np.count_nonzero((hash_ == 0) & off.any(1))
    assert escaped <= 2 * trials / 2**15, f"{escaped} of {trials}"


def test_both_partners_share_the_tables_for_ever() -> None:
    digest = hashlib.sha256(tables.DITHER.tobytes() + tables.WEIGHTS.tobytes()).hexdigest()
    assert digest == "7edaad6be2ba1bb179406a0b879a0452e7b242c19114f5d190696d89ca77fc05", (
        "another table is another protocol version"
    )
    assert tables.BLOCK == CODEC_BLOCK
    assert sorted(tables.DITHER[:PHASES]) == [(i + 0.5) / PHASES - 0.5 for i in range(PHASES)]


def test_kernels_work_where_no_folder_can_keep_them() -> None:
    made: dict[str, object] = {}
    exec("def add(x):\n    x += 1", made)  # a function without a file has no place in any cache
    x = np.zeros(3)
    cpu._compiled(made["add"])(x)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("damaged", ["*.nbi", "*.nbc"])
def test_a_damaged_file_of_kept_kernels_is_written_again(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves empty ones."""
    kernel = kept_in(tmp_path, monkeypatch)
    added_up(kernel)
    (file,) = tmp_path.rglob(damaged)
    file.write_bytes(b"")
    for _ in range(2):
        cpu._ready.clear()
        added_up(kernel)
    assert file.stat().st_size and cpu._ready[kernel].stats.cache_misses, "compiled by the first start after it"
    cpu._ready.clear()
    added_up(kernel)
    assert cpu._ready[kernel].stats.cache_hits, "and read by later ones"


def test_a_full_disk_costs_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    kernel = kept_in(tmp_path, monkeypatch)
    added_up(kernel)
    assert not list(tmp_path.rglob("*.nb?"))


def kept_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A small kernel, compiled ones of which are kept in this folder."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    monkeypatch.setattr(cpu, "_ready", {})
    made: dict[str, Any] = {}
    source = folder / "adding.py"
    source.write_text("def add(x):\n    x[0] += 1")
    exec(compile(source.read_text(), source, "exec"), made)
    add: Callable[..., None] = made["add"]
    return add


def added_up(kernel: Callable[..., None]) -> None:
    x = np.zeros(3)
    for _ in range(2):
        cpu._compiled(kernel)(x)
    assert x.tolist() == [2, 0, 0]
