"""The lattice kernels on the device: equal to the reference bit for bit, and able to talk with a CPU.

Large vectors: what a program index or an offset in 32 bits would spoil shows here only.
"""

import itertools

import torch
from checks.place import Place, Seen, Skip, require_same
from torch import Tensor

from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import Conversation
from noloco_node.core.kernels import BLOCK, Grid, Kernels, for_device, reference

BITS = range(2, 9)
KINDS = ("normal", "tiny", "subnormal", "huge", "mixed", "zero")
CODECS = ("fp32", "bf16", "int8", *(f"lattice:{bits}" for bits in BITS))


def the_fast_kernels_are_used(place: Place) -> Seen:
    """Else everything else works, and slowly."""
    kernels = for_device(place.device.type)
    wanted = "triton" if place.on_gpu else "numba"
    assert wanted == kernels.NAME, (
        f"the lattice kernels here are those of {kernels.NAME}: is {wanted} installed, and a C compiler with Python's "
        "headers?"
    )
    return Seen(facts={"kernels": kernels.NAME})


def every_kind_of_number_gives_the_same_bits(place: Place) -> None:
    kernels = for_device(place.device.type)
    for kind, blocks, bits in itertools.product(KINDS, (0, 1, 9, 1000), BITS):
        u, v = _rows(place, kind, blocks, blocks), _rows(place, "normal", blocks, blocks + 1)
        _check(kernels, (u, v), _grid(place, blocks, bits, -14), bits, f"{kind}, {blocks} blocks, {bits} bits")


def far_from_one_gives_the_same_bits(place: Place) -> None:
    kernels = for_device(place.device.type)
    for octave, bits in itertools.product((-97, -40, 0, 80), (2, 4, 8)):
        u, v = _rows(place, "mixed", 65, octave + 100), _rows(place, "mixed", 65, octave + 101)
        _check(kernels, (u, v), _grid(place, 65, 4095, octave), bits, f"steps of 2^{octave}, {bits} bits")


def large_vectors_give_the_same_bits(place: Place) -> Seen:
    """Against the reference on the same device; every number of bits."""
    blocks = 4097 if place.quick else (1 << 20) + 3  # 268 million elements
    kernels = for_device(place.device.type)
    u = _rows(place, "normal", blocks, 1)
    v = u + 1e-3 * _rows(place, "normal", blocks, 2)
    grid = _grid(place, blocks, 3, -18)
    for bits in (4,) if place.quick else BITS:
        pieces = torch.arange(0, blocks, 1 << 17).tolist()
        require_same("peaks", kernels.peaks(u), _by_pieces(pieces, blocks, lambda p: reference.peaks(u[p])))
        coded = [kernels.encode(x, grid, bits) for x in (u, v)]
        decoded = kernels.decode(coded[0][0], coded[1][0], grid.half_step, bits)
        for start in pieces:  # the reference needs 30 times the memory
            part = slice(start, min(start + (1 << 17), blocks))
            for name, x, (codes, sums) in zip("uv", (u, v), coded, strict=True):
                meant = _encoded(x, grid, part, bits)
                require_same(f"codes of {name}, {bits} bits, from block {start}", codes[part], meant[0])
                require_same(f"sums of {name}, {bits} bits, from block {start}", sums[part], meant[1])
            meant_c = reference.decode(coded[0][0][part], coded[1][0][part], grid.half_step[part], bits)
            for name, seen, right in zip(("c", "sums", "energies"), decoded, meant_c, strict=True):
                require_same(f"{name}, {bits} bits, from block {start}", seen[part], right)
    return Seen(facts={"elements": blocks * BLOCK})


def the_device_and_a_cpu_say_the_same(place: Place) -> None:
    """Both partners compute the same from the same numbers, whatever they run on."""
    cpu, here = for_device("cpu"), for_device(place.device.type)
    if cpu.NAME != "numba":
        raise Skip("numba is not here: there is nothing to compare with")
    blocks = 513 if place.quick else 16_385
    on_cpu = Place(torch.device("cpu"), place.quick)
    for kind, bits in itertools.product(("normal", "mixed"), BITS):
        u = _rows(on_cpu, kind, blocks, bits)
        v, grid = u + 1e-3 * _rows(on_cpu, "normal", blocks, 9), _grid(on_cpu, blocks, 11, -16)
        there = Grid(grid.inverse.to(place.device), grid.half_step.to(place.device), grid.seed)
        mine, theirs = cpu.encode(u, grid, bits), here.encode(v.to(place.device), there, bits)
        same = here.encode(u.to(place.device), there, bits)
        for a, b in zip(mine, same, strict=True):
            require_same(f"{kind}, {bits} bits", a, b.cpu())
        codes_v = theirs[0].cpu()
        c, *_ = cpu.decode(mine[0], codes_v, grid.half_step, bits)
        back, *_ = here.decode(theirs[0], mine[0].to(place.device), there.half_step, bits)
        require_same(f"the corrections of both, {kind}, {bits} bits", c, -back.cpu() + 0.0)


def corrections_are_exact_opposites(place: Place) -> Seen:
    """Whole conversations of every codec, between two on the device, and between the device and a CPU. Some blocks miss
    their range, so that all turns are taken."""
    elements = 20_000 if place.quick else (1 << 20) - 77
    moved = torch.full((-(-elements // BLOCK),), 1e-3)
    u = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 0.05
    v = u + 1e-3 * torch.randn(elements, generator=torch.Generator().manual_seed(2))
    v[: 3 * BLOCK] += 1.0  # far: their blocks are sent again
    v[50 * BLOCK + 3] += 0.02  # one element: it is repaired
    sizes = {}
    cpu = torch.device("cpu")
    for name in CODECS:
        results = []
        for devices in ((place.device, place.device), (place.device, cpu), (cpu, place.device), (cpu, cpu)):
            pair = [
                codec(name).converse(x.to(device), 0, bytes(16), moved)
                for x, device in zip((u, v), devices, strict=True)
            ]
            said, corrections = _talk(*pair)
            c, opposite = (x.cpu() for x in corrections)
            require_same(f"{name} between {devices[0]} and {devices[1]}", c, _negated(opposite))
            results.append((said, c, devices))
        for said, c, devices in results[1:]:
            assert said == results[0][0], f"{name}: {devices} say other bytes than {results[0][2]}"
            require_same(f"{name} between {devices[0]} and {devices[1]}, and on one device", c, results[0][1])
        sizes[name] = sum(map(len, results[0][0])) / elements
    return Seen(facts={"bytes_per_element": sizes})


def _talk(one: Conversation, other: Conversation) -> tuple[list[bytes], tuple[Tensor, Tensor]]:
    """What `one` says, and both corrections."""
    payloads = one.open(), other.open()
    said = []
    while True:
        said.append(payloads[0])
        mine, theirs = one.receive(payloads[1]), other.receive(payloads[0])
        if mine.correction is not None and theirs.correction is not None:
            return said, (mine.correction, theirs.correction)
        assert mine.reply is not None and theirs.reply is not None, "both take the same number of turns"
        payloads = mine.reply, theirs.reply


# ---- numbers ---------------------------------------------------------------------------------------------------------
def _rows(place: Place, kind: str, blocks: int, seed: int) -> Tensor:
    generator = torch.Generator(place.device).manual_seed(seed)
    x = torch.randn(blocks, BLOCK, generator=generator, device=place.device)
    scales = {"normal": 0.05, "tiny": 1e-30, "subnormal": 1e-41, "huge": 1e30, "zero": 0.0}
    return x * (scales[kind] if kind in scales else torch.logspace(-44, 30, BLOCK, device=place.device))


def _grid(place: Place, blocks: int, seed: int, octave: int) -> Grid:
    """Steps from 2^octave up, with two bits after the leading one. Made on the CPU: a device may round powers."""
    random = torch.Generator().manual_seed(seed)
    quarter = torch.randint(4, 8, (blocks,), generator=random) / 4
    step = torch.ldexp(quarter, torch.tensor(octave) + torch.randint(0, 5, (blocks,), generator=random))
    return Grid((1 / step).to(place.device), (step / 2).to(place.device), seed % 4096)


def _negated(c: Tensor) -> Tensor:
    """Without -0."""
    return -c + 0.0


def _by_pieces(starts: list[int], blocks: int, work: object) -> Tensor:
    return torch.cat([work(slice(start, min(start + (1 << 17), blocks))) for start in starts])  # type: ignore[operator]


def _encoded(u: Tensor, grid: Grid, part: slice, bits: int) -> tuple[Tensor, Tensor]:
    """Of some blocks of a longer vector: their dither depends on where they lie."""
    which = torch.arange(part.start, part.stop, device=u.device)
    k = reference.steps(u, grid, which)
    return reference.pack(k & (1 << bits) - 1, bits), reference.sums(k)


def _check(kernels: Kernels, pair: tuple[Tensor, Tensor], grid: Grid, bits: int, what: str) -> None:
    u, v = pair
    require_same(f"peaks, {what}", kernels.peaks(u), reference.peaks(u))
    coded, meant = ([k.encode(x, grid, bits) for x in (u, v)] for k in (kernels, reference))
    for (codes, sums), (right, right_sums) in zip(coded, meant, strict=True):
        require_same(f"codes, {what}", codes, right)
        require_same(f"sums, {what}", sums, right_sums)
    pair = coded[0][0], coded[1][0], grid.half_step, bits
    for name, seen, right in zip(
        ("c", "sums", "energies"), kernels.decode(*pair), reference.decode(*pair), strict=True
    ):
        require_same(f"decoded {name}, {what}", seen, right)


CHECKS = (
    the_fast_kernels_are_used,
    every_kind_of_number_gives_the_same_bits,
    far_from_one_gives_the_same_bits,
    large_vectors_give_the_same_bits,
    the_device_and_a_cpu_say_the_same,
    corrections_are_exact_opposites,
)
