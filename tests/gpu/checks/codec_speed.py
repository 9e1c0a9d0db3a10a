"""How quick the codec is on the device: its kernels over a large vector, and whole conversations of fragments."""

import time

import torch
from checks.place import Place, Seen

from noloco_node.bench import cost
from noloco_node.bench.replica_pairs import Side
from noloco_node.core.codecs.by_name import codec
from noloco_node.core.codecs.codec import BLOCK, carry
from noloco_node.training.thread import FRAGMENT_ELEMENTS

ENCODE, DECODE = 1000.0, 800.0
"""GB of fp32 a second, wanted of a card with HBM: a copy reads and writes 8 bytes an element, encoding reads 4."""
FRAGMENTS = 64


def the_kernels_keep_up_with_memory(place: Place) -> Seen:
    """As `bench codec` measures them."""
    elements = (1 << 20) if place.quick else 1 << 29
    u, v, moved = _pair(place, elements)
    one, other = Side(u, moved), Side(v, moved)
    rows, facts = [], {}
    for name in ("lattice:4",) if place.quick else ("lattice:4", "lattice:2", "lattice:8"):
        speed = cost.speed(name, place.device.type, one, other)
        facts[name] = {"encode": speed.encode, "decode": speed.decode, "copy": speed.copy}
        if name == "lattice:4":
            beside = f" (a copy {speed.copy:.3g})"
            rows.append(
                place.figure(
                    f"{name} encode, GB/s of fp32",
                    f">= {ENCODE:.0f}",
                    f"{speed.encode:.4g}{beside}",
                    speed.encode >= ENCODE,
                )
            )
            rows.append(
                place.figure(
                    f"{name} decode, GB/s of fp32",
                    f">= {DECODE:.0f}",
                    f"{speed.decode:.4g}{beside}",
                    speed.decode >= DECODE,
                )
            )
    return Seen(rows, facts)


def a_swap_is_coded_in_time(place: Place) -> Seen:
    """Both sides of whole conversations, one fragment after the other, as one thread codes them: with all that the
    host does between two kernels."""
    size = 20_000 if place.quick else FRAGMENT_ELEMENTS
    u, v, moved = _pair(place, size * FRAGMENTS)
    fragments = [
        [x.to(place.device)[start : start + size] for x in (u, v)] for start in range(0, size * FRAGMENTS, size)
    ]
    codecs, taken = (codec("lattice:4"), codec("lattice:4")), []
    for index, pair in enumerate(fragments):
        where = index * size // BLOCK
        near = moved[where : where + -(-size // BLOCK)]
        place.synchronize()
        began = time.perf_counter()
        talk = [c.converse(x, 0, bytes([index] * 16), near) for c, x in zip(codecs, pair, strict=True)]
        carry(*talk)
        place.synchronize()
        taken.append((time.perf_counter() - began) / 2)
        for each in talk:
            each.learn()
    usual = sorted(taken)[len(taken) // 2]
    whole_s = usual * 1.1e9 / size
    row = place.figure("coding one side of a swap of 1.1 G parameters, s", "-", f"{whole_s:.2f}", True)
    return Seen([row], {"fragment_ms": usual * 1e3, "first_ms": taken[0] * 1e3, "slowest_ms": max(taken[4:]) * 1e3})


def _pair(place: Place, elements: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On the CPU; the second one is some of its own movement away."""
    piece = torch.randn(min(elements, 1 << 24), generator=torch.Generator().manual_seed(1)) * 0.05
    other = piece + 1e-3 * torch.randn(len(piece), generator=torch.Generator().manual_seed(2))
    times = -(-elements // len(piece))
    u, v = (x.repeat(times)[:elements] for x in (piece, other))
    return u, v, torch.full((-(-elements // BLOCK),), 2e-3)


CHECKS = (the_kernels_keep_up_with_memory, a_swap_is_coded_in_time)
